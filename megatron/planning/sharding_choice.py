# SPDX-License-Identifier: Apache-2.0
"""FSDP beside DDP with the distributed optimizer, by formulas, for several numbers of GPUs.

For each number of GPUs the fastest layout of either that fits is found: of FSDP with units of
layers at ZeRO level 3, and of Megatron-Core's DDP with the distributed optimizer, interleaved
stages among them. Both have the same costs (``step_formula.py``), so their difference is that of
the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.planning.costs.layer_memory import FULL, NONE
from megatron.planning.costs.model_sizes import ModelSizes, RunLayout
from megatron.planning.costs.software import Software
from megatron.planning.costs.step_formula import FormulaStep, StepFormula
from megatron.planning.machine import Cluster

LONGEST_PIPELINE = 16
MICRO_BATCHES = (1, 2, 4)
VIRTUAL_STAGES = (1, 2, 4, 8)
SHORTEST_PART = 4096
"""Tokens of a sequence that a context rank has at least."""


@dataclass(frozen=True)
class ChosenLayout:
    """A layout, and its step.

    Attributes:
        mesh: the layout.
        step: by formulas.
    """

    mesh: RunLayout
    step: FormulaStep


@dataclass(frozen=True)
class Choice:
    """The fastest layouts on some GPUs.

    Attributes:
        gpus: number of GPUs.
        fsdp: of FSDP; None: none fits.
        ddp: of DDP with the distributed optimizer; None: none fits.
    """

    gpus: int
    fsdp: ChosenLayout | None
    ddp: ChosenLayout | None

    @property
    def is_fsdp_faster(self) -> bool:
        """True if FSDP is faster, or DDP does not fit."""
        if self.ddp is None or self.fsdp is None:
            return self.ddp is None
        return self.fsdp.step.seconds <= self.ddp.step.seconds


def choices_of(
    sizes: ModelSizes,
    global_batch: int,
    machine: Cluster,
    software: Software,
    memory_limit: float,
    gpus: list[int],
) -> list[Choice]:
    """Return the fastest layouts for several numbers of GPUs.

    Args:
        sizes: of the model.
        global_batch: sequences of a step.
        machine: on which it is trained.
        software: of the run.
        memory_limit: bytes of a GPU.
        gpus: numbers of GPUs.
    """
    found: list[Choice] = []
    for number in gpus:
        best: dict[bool, ChosenLayout] = {}
        for mesh in meshes_of(sizes, global_batch, machine, number):
            for recompute in (NONE, FULL):
                formula = StepFormula(sizes, mesh, machine, software, recompute)
                step = formula.step()
                if step.peak_bytes > memory_limit:
                    continue
                fastest = best.get(mesh.is_fsdp)
                if fastest is None or step.seconds < fastest.step.seconds:
                    best[mesh.is_fsdp] = ChosenLayout(mesh, step)
        found.append(Choice(number, best.get(True), best.get(False)))
    return found


def meshes_of(
    sizes: ModelSizes, global_batch: int, machine: Cluster, gpus: int
) -> Iterator[RunLayout]:
    """Yield layouts of FSDP and of DDP whose sizes divide what they must.

    Args:
        sizes: of the model.
        global_batch: sequences of a step.
        machine: on which it is trained.
        gpus: number of GPUs.
    """
    experts = sizes.experts.number if sizes.experts else 1
    for tensor in _powers(min(8, machine.domain, sizes.key_heads)):
        for context in _powers(max(1, sizes.sequence // SHORTEST_PART)):
            for pipeline in _powers(min(LONGEST_PIPELINE, sizes.layers)):
                ranks = tensor * context * pipeline
                if gpus % ranks or global_batch % (gpus // ranks):
                    continue
                for expert in _powers(experts):
                    if gpus // pipeline % expert or (experts > 1 and tensor > 1 and expert == 1):
                        continue
                    yield from _meshes_on(
                        sizes, global_batch, gpus, (tensor, context, pipeline, expert)
                    )


def _meshes_on(
    sizes: ModelSizes, global_batch: int, gpus: int, ranks: tuple[int, int, int, int]
) -> Iterator[RunLayout]:
    """Yield the layouts with given ranks: of FSDP in one stage, and of DDP with virtual stages."""
    tensor, context, pipeline, expert = ranks
    data = gpus // (tensor * context * pipeline)
    for micro_batch in MICRO_BATCHES:
        if global_batch % (data * micro_batch):
            continue
        for virtual in VIRTUAL_STAGES:
            is_divided = sizes.layers % (pipeline * virtual) == 0
            if virtual > 1 and (pipeline == 1 or not is_divided):
                continue
            for is_fsdp in (True, False):
                if is_fsdp and pipeline > 1:
                    continue
                yield RunLayout(
                    gpus=gpus,
                    tensor=tensor,
                    pipeline=pipeline,
                    virtual=virtual,
                    context=context,
                    expert=expert,
                    level=3 if is_fsdp else 1,
                    micro_batch=micro_batch,
                    global_batch=global_batch,
                    is_sequence_parallel=tensor > 1,
                    is_fsdp=is_fsdp,
                )


def _powers(most: int) -> list[int]:
    """Return the powers of two up to ``most``."""
    return [2**number for number in range(most.bit_length()) if 2**number <= most]


def choice_lines(found: list[Choice]) -> Iterator[str]:
    """Yield lines with the fastest layouts, and the sentence on where the faster one changes."""
    yield "FSDP beside DDP with the distributed optimizer, by formulas:"
    yield "  GPUs          TP  PP  VP  CP  EP  recompute  micro    GiB  step s   bubble"
    for choice in found:
        for name, layout in (("FSDP", choice.fsdp), ("DDP", choice.ddp)):
            if layout is None:
                yield f"{choice.gpus:>6}  {name:<4}  does not fit"
                continue
            mesh, step = layout.mesh, layout.step
            yield (
                f"{choice.gpus:>6}  {name:<4}  {mesh.tensor:>4}  {mesh.pipeline:>2}"
                f"  {mesh.virtual:>2}  {mesh.context:>2}  {mesh.expert:>2}  {step.recompute:>9}"
                f"  {mesh.micro_batch:>5}  {step.peak_bytes / 2**30:>5.1f}  {step.seconds:>6.2f}"
                f"   {step.bubble_seconds / step.seconds:>6.1%}"
            )
    yield turn_of(found)


def turn_of(found: list[Choice]) -> str:
    """Return the sentence on where the faster one of the two changes.

    Args:
        found: choices for rising numbers of GPUs.
    """
    fitting = [choice for choice in found if choice.fsdp is not None or choice.ddp is not None]
    if not fitting:
        return "neither fits on these numbers of GPUs"
    first = fitting[0].is_fsdp_faster
    names = {True: "FSDP", False: "DDP with TP and PP"}
    for choice in fitting:
        if choice.is_fsdp_faster != first:
            return (
                f"{names[first]} is faster below {choice.gpus} GPUs,"
                f" {names[not first]} from there on"
            )
    return f"{names[first]} is faster on all of these numbers of GPUs"

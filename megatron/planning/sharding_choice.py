# SPDX-License-Identifier: Apache-2.0
"""FSDP compared with DDP and the distributed optimizer, by formulas, for several numbers of GPUs.

For each number of GPUs the fastest layout of either that fits is found: of FSDP with units of
layers at ZeRO level 3, and of Megatron-Core's DDP with the distributed optimizer, interleaved
stages among them. Both have the same costs (``step_formula.py``), so their difference is that of
the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.planning.candidates import Choices
from megatron.planning.costs.layer_memory import FULL, NONE
from megatron.planning.costs.model_sizes import ModelSizes
from megatron.planning.costs.software import Software
from megatron.planning.layout_search import MOST_TENSOR, ChosenLayout, best_layout, layouts_of
from megatron.planning.machine import Cluster

ANY = Choices()


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
    recompute: str = NONE,
    choices: Choices = ANY,
) -> list[Choice]:
    """Return the fastest layouts for several numbers of GPUs.

    Args:
        sizes: of the model.
        global_batch: sequences of a step.
        machine: on which it is trained.
        software: of the run.
        memory_limit: bytes of a GPU.
        gpus: numbers of GPUs.
        recompute: what the backward computes again where whole layers are not recomputed.
        choices: what may be chosen.
    """
    found: list[Choice] = []
    most_tensor = min(MOST_TENSOR, machine.domain)
    for number in gpus:
        fitting: list[ChosenLayout | None] = []
        for is_fsdp in (True, False):
            best = best_layout(
                layouts=layouts_of(sizes, global_batch, number, most_tensor, choices, is_fsdp),
                sizes=sizes,
                batch=global_batch,
                machine=machine,
                software=software,
                memory_limit=memory_limit,
                recomputations=list(dict.fromkeys((recompute, FULL))),
            )
            if best is not None and best.step.peak_bytes > memory_limit:
                best = None
            fitting.append(best)
        found.append(Choice(number, *fitting))
    return found


def choice_lines(found: list[Choice]) -> Iterator[str]:
    """Yield lines with the fastest layouts, and the sentence on where the faster one changes."""
    yield "FSDP beside DDP with the distributed optimizer, by formulas:"
    yield "  GPUs          TP  PP  VP  CP  EP  recompute  micro    GiB  step s   bubble"
    for choice in found:
        for name, layout in (("FSDP", choice.fsdp), ("DDP", choice.ddp)):
            if layout is None:
                yield f"{choice.gpus:>6}  {name:<4}  no layout fits"
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

# SPDX-License-Identifier: Apache-2.0
"""The search for layouts by formulas: of FSDP in one stage, and of DDP with virtual stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.planning.candidates import MICRO_BATCHES, Choices, meshes
from megatron.planning.costs.model_sizes import ModelSizes, RunLayout
from megatron.planning.costs.software import Software
from megatron.planning.costs.step_formula import FormulaStep, StepFormula
from megatron.planning.machine import Cluster

MOST_TENSOR = 8
VIRTUAL_STAGES = (1, 2, 4, 8)


@dataclass(frozen=True)
class ChosenLayout:
    """A layout, and its step.

    Attributes:
        mesh: the layout.
        step: by formulas.
    """

    mesh: RunLayout
    step: FormulaStep


def layouts_of(
    sizes: ModelSizes,
    batch: int,
    gpus: int,
    most_tensor: int,
    choices: Choices,
    is_fsdp: bool,
    gpus_of_copy: Sequence[int] = (),
    rounds_batch: bool = False,
) -> Iterator[RunLayout]:
    """Yield layouts of FSDP at level 3 in one stage, or of DDP with the distributed optimizer.

    Args:
        sizes: of the model.
        batch: sequences of a step.
        gpus: number of GPUs.
        most_tensor: the most tensor-parallel ranks, where ``choices`` has none.
        choices: what may be chosen.
        is_fsdp: layouts are those of FSDP.
        gpus_of_copy: GPUs that may share one copy of the weights in hybrid sharding; empty: all.
        rounds_batch: a batch that data ranks do not divide is rounded up, to one sequence for each
            of them at least; otherwise there is no such layout.
    """
    for tensor, pipeline, context, expert in meshes(sizes, gpus, most_tensor, choices):
        if is_fsdp and pipeline > 1:
            continue
        mesh = RunLayout(
            gpus=gpus,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            level=3 if is_fsdp else 1,
            is_sequence_parallel=tensor > 1,
            is_fsdp=is_fsdp,
        )
        for micro_batch in choices.micro_batch or MICRO_BATCHES:
            of_step = _with_batch(mesh, batch, micro_batch, rounds_batch)
            if of_step is None:
                continue
            if not is_fsdp:
                yield from _with_virtual_stages(sizes, of_step)
            elif gpus_of_copy:
                yield from _with_copies(of_step, gpus_of_copy)
            else:
                yield of_step


def _with_batch(
    mesh: RunLayout,
    batch: int,
    micro_batch: int,
    rounds_batch: bool,
) -> RunLayout | None:
    """Return a layout with microbatches of some sequences; None: they do not go together.

    Args:
        mesh: the layout.
        batch: sequences of a step.
        micro_batch: sequences of a microbatch.
        rounds_batch: a batch that data ranks do not divide is rounded up.
    """
    at_once = micro_batch * mesh.data
    if not rounds_batch and batch % at_once:
        return None
    if micro_batch > 1 and at_once > batch:
        return None
    rounded = -(-batch // at_once) * at_once
    return replace(mesh, micro_batch=micro_batch, global_batch=rounded)


def _with_copies(mesh: RunLayout, gpus_of_copy: Sequence[int]) -> Iterator[RunLayout]:
    """Yield a layout with several copies of the weights, each on some of the GPUs."""
    for inner in gpus_of_copy:
        if mesh.expert <= inner < mesh.gpus:
            yield replace(mesh, copies=mesh.gpus // inner)


def _with_virtual_stages(sizes: ModelSizes, mesh: RunLayout) -> Iterator[RunLayout]:
    """Yield a layout with each number of virtual stages that Megatron-Core runs."""
    for virtual in VIRTUAL_STAGES:
        if is_interleaved(sizes, mesh, virtual):
            yield replace(mesh, virtual=virtual)


def is_interleaved(
    sizes: ModelSizes,
    mesh: RunLayout,
    virtual: int,
) -> bool:
    """Return True if Megatron-Core runs a layout with so many virtual stages.

    All of them have as many layers, or embedding and loss count as one each
    (--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split); see its
    ``TransformerConfig``. Its schedule takes microbatches in groups of one for each stage.

    Args:
        sizes: of the model.
        mesh: the layout of the run.
        virtual: stages of each pipeline stage.
    """
    if virtual == 1:
        return True
    if mesh.pipeline == 1 or mesh.num_microbatches % mesh.pipeline:
        return False
    num_chunks = mesh.pipeline * virtual
    if num_chunks > sizes.layers:
        return False
    return sizes.layers % num_chunks == 0 or (sizes.layers + 2) % num_chunks == 0


def best_layout(
    layouts: Iterable[RunLayout],
    sizes: ModelSizes,
    batch: int,
    machine: Cluster,
    software: Software,
    memory_limit: float,
    recomputations: Sequence[str],
) -> ChosenLayout | None:
    """Return the layout that trains most sequences a second, by formulas.

    Layouts that fit come first, and of these the ones with the batch of the run. If nothing fits,
    it is the layout with least memory.

    Args:
        layouts: among which it is.
        sizes: of the model.
        batch: sequences of a step of the run.
        machine: on which it runs.
        software: of the run.
        memory_limit: bytes of a GPU.
        recomputations: what the backward may compute again.

    Returns:
        None if there is no layout.
    """
    best: ChosenLayout | None = None
    best_key = (False, False, 0.0)
    for mesh in layouts:
        for recompute in recomputations:
            step = StepFormula(sizes, mesh, machine, software, recompute).step()
            is_fitting = step.peak_bytes <= memory_limit
            merit = -step.peak_bytes
            if is_fitting:
                merit = mesh.global_batch / step.seconds
            key = (is_fitting, mesh.data <= batch, merit)
            if best is None or key > best_key:
                best = ChosenLayout(mesh, step)
                best_key = key
    return best

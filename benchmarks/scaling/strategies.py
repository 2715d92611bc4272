# SPDX-License-Identifier: Apache-2.0
"""The best layout of each strategy on so many GPUs, by the planner's formulas.

[Note: messages of a step] The planner's ``exposed_seconds`` are those in which compute waits for
gathers and reductions of shards, and those of the update. Tensor parallelism, exchanges of tokens
and messages between stages are within a layer's seconds there. What messages cost is the difference
to a machine whose links take no time: of ``exposed_seconds`` what those of shards cost, of the step
without its bubble what all of them cost.

[Note: rings] The planner's collectives have log2(n) latencies, as trees have. A ring has one for
each rank: n - 1. NCCL's all-gather and reduce-scatter are rings for large messages, and its
all-reduce has trees; source: PAT, a new algorithm for all-gather and reduce-scatter operations at
scale, arXiv:2506.20252. The page has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from benchmarks.scaling.models import ModelOfScale
from megatron.planning.candidates import Choices
from megatron.planning.costs.layer_memory import FULL, NONE
from megatron.planning.costs.model_sizes import ModelSizes, RunLayout
from megatron.planning.costs.step_formula import FormulaStep, StepFormula
from megatron.planning.layer_costs import MEGATRON_CORE
from megatron.planning.layout_search import MOST_TENSOR, best_layout, layouts_of
from megatron.planning.machine import Cluster, Link

NUMBERS = (64, 256, 1024, 4096, 16384, 65536)
"""GPUs of the sweep."""

USABLE_PART = 0.9
"""Part of a GPU's memory that a plan may use, as in ``tools/plan.py``."""

MOST_EXPOSED = 0.2
"""Part of a step in which compute may wait for shards, or stages for others, before a strategy
counts as stopped."""

INNER_GPUS = (64, 128, 256, 512)
"""GPUs that share one copy of the weights in hybrid sharding."""

STAGES = (2, 4, 8, 16)
EXPERT_RANKS = (8, 16, 32, 64)

NO_TIME = Link(1e30, 0.0)
"""A link that takes no time."""


class RingCluster(Cluster):
    """A cluster whose gathers and scatters are rings; see [Note: rings]."""

    def collective_seconds(self, name: str, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective.

        Args:
            name: of the operation.
            num_bytes: of the whole tensor.
            ranks: that take part.
        """
        seconds = super().collective_seconds(name, num_bytes, ranks)
        if name == "all_reduce" or len(ranks) < 2:
            return seconds
        num_nodes = self._nodes_of(ranks)
        of_tree = super().collective_seconds(name, 0.0, ranks)
        of_ring = (num_nodes - 1) * self.between.latency
        of_ring += (len(ranks) - num_nodes) * self.inside.latency
        return seconds - of_tree + of_ring


def with_rings(machine: Cluster) -> RingCluster:
    """Return a machine whose gathers and scatters are rings."""
    values = {field.name: getattr(machine, field.name) for field in fields(machine)}
    return RingCluster(**values)


@dataclass(frozen=True)
class ScaleStrategy:
    """A strategy of the page.

    Args:
        name: for readers.
        choices: sizes that it may have.
        is_hybrid: the weights have several copies.
        is_fsdp: level 3; otherwise DDP with the distributed optimizer.
    """

    name: str
    choices: Choices
    is_hybrid: bool = False
    is_fsdp: bool = True


def choices_of_strategy(
    tensor: Sequence[int] = (1,),
    pipeline: Sequence[int] = (1,),
    context: Sequence[int] = (),
    expert: Sequence[int] = (1,),
) -> Choices:
    """Return sizes that a strategy may have.

    Args:
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
        context: context-parallel ranks; empty: those with ``SHORTEST_PART`` tokens at least.
        expert: expert-parallel ranks.
    """
    return Choices(tensor=tensor, pipeline=pipeline, context=context, expert=expert)


OF_DATA = choices_of_strategy(context=(1,))
OF_TENSOR = choices_of_strategy(tensor=(8,))
OF_EXPERT = choices_of_strategy(expert=EXPERT_RANKS)

FSDP_ALONE = ScaleStrategy("FSDP", OF_DATA)
HYBRID = ScaleStrategy("hybrid", OF_DATA, is_hybrid=True)
FSDP_CONTEXT = ScaleStrategy("FSDP, CP 2", choices_of_strategy(context=(2,)))
FSDP_TENSOR = ScaleStrategy("FSDP, TP 8", OF_TENSOR)
HYBRID_TENSOR = ScaleStrategy("hybrid, TP 8", OF_TENSOR, is_hybrid=True)
DDP_STAGES = ScaleStrategy(
    "DDP, TP 8, PP", choices_of_strategy(tensor=(8,), pipeline=STAGES), is_fsdp=False
)
FSDP_EXPERT = ScaleStrategy("FSDP, EP", OF_EXPERT)
HYBRID_EXPERT = ScaleStrategy("hybrid, EP", OF_EXPERT, is_hybrid=True)
DDP_EXPERT = ScaleStrategy(
    "DDP, TP, PP, EP",
    choices_of_strategy(tensor=(1, 8), pipeline=STAGES, expert=EXPERT_RANKS),
    is_fsdp=False,
)

OF_DENSE = (FSDP_ALONE, HYBRID, FSDP_CONTEXT, FSDP_TENSOR, HYBRID_TENSOR, DDP_STAGES)
OF_EXPERTS = (FSDP_ALONE, FSDP_EXPERT, HYBRID_EXPERT, DDP_EXPERT)


def strategies_of(sizes: ModelSizes) -> tuple[ScaleStrategy, ...]:
    """Return the strategies for a model."""
    if sizes.experts is None:
        return OF_DENSE
    return OF_EXPERTS


@dataclass(frozen=True)
class ScaleRow:
    """The best layout of a strategy on so many GPUs.

    Attributes:
        model: that is trained.
        strategy: its name.
        machine: on which it runs.
        mesh: the layout, with the sequences of the step.
        step: by formulas.
        exposed: part of the step that messages of shards cost; see [Note: messages of a step].
        all_exposed: part of the step that all messages cost.
        has_few_sequences: the batch of the run has fewer sequences than data ranks; the step has
            one for each of them.
    """

    model: ModelOfScale
    strategy: str
    machine: Cluster
    mesh: RunLayout
    step: FormulaStep
    exposed: float
    all_exposed: float
    has_few_sequences: bool

    @property
    def gib(self) -> float:
        """GiB of the GPU with the most."""
        return self.step.peak_bytes / 2**30

    @property
    def fits(self) -> bool:
        """True if the memory of a GPU is enough."""
        return self.step.peak_bytes <= USABLE_PART * self.machine.memory_bytes

    @property
    def bubble(self) -> float:
        """Part of the step in which stages wait for others."""
        return self.step.bubble_seconds / self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a GPU in a second."""
        tokens = self.mesh.global_batch * self.model.sizes.sequence
        return tokens / self.mesh.gpus / self.step.seconds

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization, in bf16."""
        per_second = self.tokens_per_second * self.model.sizes.flops_per_token
        return per_second / self.machine.flops

    @property
    def stops(self) -> list[str]:
        """Reasons for which the strategy counts as stopped here; see ``MOST_EXPOSED``."""
        reasons: list[str] = []
        if not self.fits:
            reasons.append("memory")
        if self.has_few_sequences:
            reasons.append("batch")
        if self.exposed > MOST_EXPOSED:
            reasons.append("messages")
        if self.bubble > MOST_EXPOSED:
            reasons.append("bubble")
        return reasons


def layouts(model: ModelOfScale, strategy: ScaleStrategy, num_gpus: int) -> Iterator[RunLayout]:
    """Yield layouts of a strategy, with the batch of the model's run.

    The batch is rounded up to a multiple of the sequences that all data ranks read at once. Where
    it has fewer sequences than data ranks, it is one for each of them.

    Args:
        model: that is trained.
        strategy: of the layouts.
        num_gpus: of the run.
    """
    return layouts_of(
        sizes=model.sizes,
        batch=model.batch,
        gpus=num_gpus,
        most_tensor=MOST_TENSOR,
        choices=strategy.choices,
        is_fsdp=strategy.is_fsdp,
        gpus_of_copy=INNER_GPUS if strategy.is_hybrid else (),
        rounds_batch=True,
    )


def step_of(
    model: ModelOfScale, mesh: RunLayout, machine: Cluster, recompute: str = NONE
) -> FormulaStep:
    """Return a step by formulas, with the software of ``pretrain_gpt.py``.

    Args:
        model: that is trained.
        mesh: the layout.
        machine: on which it runs.
        recompute: what the backward computes again.
    """
    return StepFormula(model.sizes, mesh, machine, MEGATRON_CORE, recompute).step()


def row_of(
    model: ModelOfScale, strategy: str, mesh: RunLayout, machine: Cluster, recompute: str
) -> ScaleRow:
    """Return the row of a layout.

    Args:
        model: that is trained.
        strategy: its name.
        mesh: the layout.
        machine: on which it runs.
        recompute: what the backward computes again.
    """
    step = step_of(model, mesh, machine, recompute)
    no_links = replace(machine, inside=NO_TIME, between=NO_TIME)
    fast = step_of(model, mesh, no_links, recompute)
    of_shards = step.exposed_seconds - fast.exposed_seconds
    of_all = (step.seconds - step.bubble_seconds) - (fast.seconds - fast.bubble_seconds)
    return ScaleRow(
        model=model,
        strategy=strategy,
        machine=machine,
        mesh=mesh,
        step=step,
        exposed=of_shards / step.seconds,
        all_exposed=of_all / step.seconds,
        has_few_sequences=mesh.data > model.batch,
    )


def best_row(
    model: ModelOfScale, strategy: ScaleStrategy, num_gpus: int, machine: Cluster
) -> ScaleRow | None:
    """Return the best layout of a strategy: one that fits, has the run's batch, and is fastest.

    Args:
        model: that is trained.
        strategy: of the layouts.
        num_gpus: of the run.
        machine: on which it runs.

    Returns:
        None if the strategy has no layout on so few GPUs. If nothing fits, the layout with least
        memory.
    """
    best = best_layout(
        layouts=layouts(model, strategy, num_gpus),
        sizes=model.sizes,
        batch=model.batch,
        machine=machine,
        software=MEGATRON_CORE,
        memory_limit=USABLE_PART * machine.memory_bytes,
        recomputations=(NONE, FULL),
    )
    if best is None:
        return None
    return row_of(model, strategy.name, best.mesh, machine, best.step.recompute)


def sweep(model: ModelOfScale, machine: Cluster) -> list[ScaleRow]:
    """Return the rows of all strategies and numbers of GPUs for a model.

    Args:
        model: that is trained.
        machine: on which it runs.
    """
    rows: list[ScaleRow] = []
    for strategy in strategies_of(model.sizes):
        for num_gpus in NUMBERS:
            row = best_row(model, strategy, num_gpus, machine)
            if row is not None:
                rows.append(row)
    return rows

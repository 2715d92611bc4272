# SPDX-License-Identifier: Apache-2.0
"""The step of a run by formulas, for layouts that the engine does not run, and for quick answers.

[Note: the step by formulas] Layers of a stage take their seconds one after another. A unit of FSDP
is gathered while the unit before it computes, and reduced while the next one does: the longer one
of both counts, and compute is slower by a part while a collective is under way. DDP reduces its
buckets during the backward of the last microbatch, and the distributed optimizer gathers weights
during the forward of the first one; what these do not overlap, and the last bucket, come on top.
Pipeline stages run one forward and one backward in turn. The slowest stage counts, and the bubble
is the mean of the microbatch's seconds for each further stage, divided by the virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from megatron.planning.costs.gpu_kernels import FITTED, FP32, Fitted, Kernels
from megatron.planning.costs.layer_memory import NONE, LayerMemory
from megatron.planning.costs.layer_seconds import LayerWork
from megatron.planning.costs.message_seconds import (
    collective_seconds,
    overlapped_seconds,
    stage_message_seconds,
)
from megatron.planning.costs.model_sizes import ModelSizes, RunLayout
from megatron.planning.costs.pipeline_stages import Stage, stages_of
from megatron.planning.costs.software import Software
from megatron.planning.costs.spent_seconds import Spent
from megatron.planning.machine import Cluster

DENSE = "dense"
EXPERTS = "experts"
PREDICTED = "predicted"
"""A layer that predicts further tokens."""

OUTPUT = "output"
EMBEDDING = "embedding"

BUCKET_ELEMENTS = 40e6
BUCKET_ELEMENTS_OF_RANK = 1e6
"""Elements of a bucket of DDP in Megatron-Core, the default of --ddp-bucket-size: at least the
former, and the latter for each data rank."""

WORKSPACE = 600e6
"""Bytes of workspaces of cuBLAS and attention, and of what lives shortly besides activations; an
estimate."""


@dataclass(frozen=True)
class FormulaStep:
    """The step of a run by formulas.

    Attributes:
        seconds: of a step.
        bubble_seconds: in which a stage waits for others.
        exposed_seconds: in which compute waits for gathers and reductions of shards, and those of
            the optimizer's update.
        peak_bytes: the most bytes of a rank.
        first_bytes: the most bytes of a rank of the first pipeline stage.
        recompute: the recomputation that was planned.
        part: of the layers that are recomputed, if they are whole layers.
    """

    seconds: float
    bubble_seconds: float
    exposed_seconds: float
    peak_bytes: float
    first_bytes: float
    recompute: str
    part: float


@dataclass(frozen=True)
class UnitElements:
    """Elements of the weights of a unit on a rank, before they are sharded.

    Attributes:
        dense: without those of experts.
        experts: of experts.
    """

    dense: float
    experts: float = 0.0

    @property
    def whole(self) -> float:
        """All elements."""
        return self.dense + self.experts

    def of_shard(self, mesh: RunLayout) -> float:
        """Return the elements that a rank updates."""
        if mesh.level == 0:
            return self.whole
        num_shards = len(mesh.sharding_ranks) // mesh.copies
        shard = self.dense / num_shards
        if self.experts:
            num_shards = len(mesh.expert_sharding_ranks) // mesh.copies
            shard += self.experts / max(1, num_shards)
        return shard


@dataclass(frozen=True)
class UnitCost:
    """The cost of a unit.

    Attributes:
        forward: seconds in which it computes.
        backward: seconds in which its backward computes.
        gather: seconds of the gather of its weights.
        reduce: seconds of the reduction of its gradients.
        elements: of its weights.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    elements: UnitElements

    @property
    def without_weight(self) -> UnitCost:
        """The cost of the same computation with a weight of another unit."""
        return replace(self, gather=0.0, reduce=0.0, elements=UnitElements(0.0))


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a pipeline stage.

    Attributes:
        microbatch: of one microbatch, forward and backward.
        exposed: of it, in which compute waits for gathers and reductions.
        ends: of the update, and of collectives that only the ends of a step have.
    """

    microbatch: float
    exposed: float
    ends: float


class StepFormula:
    """The step of a run; see [Note: the step by formulas].

    Args:
        sizes: of the model.
        mesh: the layout of the run.
        machine: on which it runs.
        software: of the run.
        recompute: what the backward computes again.
        part: of the layers that are recomputed, if they are whole layers.
        fitted: constants of the model of time.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        mesh: RunLayout,
        machine: Cluster,
        software: Software,
        recompute: str = NONE,
        part: float = 1.0,
        fitted: Fitted = FITTED,
    ):
        self._sizes = sizes
        self._mesh = mesh
        self._machine = machine
        self._software = software
        self._recompute = recompute
        self._part = part
        self._fitted = fitted
        self._kernels = Kernels(machine, software, fitted)
        self._work = LayerWork(sizes, mesh, machine, software, fitted)
        self._memory = LayerMemory(sizes, mesh, software, recompute, part)
        self._units: dict[str, UnitCost] = {}

    def step(self) -> FormulaStep:
        """Return the step."""
        mesh = self._mesh
        stages = stages_of(self._sizes, mesh, self._software.balances_stages)
        seconds: list[StageSeconds] = []
        memory: list[float] = []
        for number, stage in enumerate(stages):
            seconds.append(self._seconds(stage))
            memory.append(self._bytes(stage, number))
        slowest = max(seconds, key=lambda stage_seconds: stage_seconds.microbatch)
        ends = max(stage_seconds.ends for stage_seconds in seconds)
        mean = sum(stage_seconds.microbatch for stage_seconds in seconds) / len(seconds)
        bubble = (mesh.pipeline - 1) * mean / mesh.virtual
        busy = mesh.num_microbatches * slowest.microbatch
        exposed = mesh.num_microbatches * slowest.exposed
        return FormulaStep(
            seconds=busy + bubble + ends,
            bubble_seconds=bubble,
            exposed_seconds=exposed + ends,
            peak_bytes=max(memory),
            first_bytes=memory[0],
            recompute=self._recompute,
            part=self._part,
        )

    # ---- units

    def _unit(self, kind: str) -> UnitCost:
        """Return the cost of a unit.

        Args:
            kind: ``DENSE``, ``EXPERTS``, ``PREDICTED``, ``OUTPUT`` or ``EMBEDDING``.
        """
        if kind not in self._units:
            elements = self._elements(kind)
            computing = self._computing(kind)
            self._units[kind] = UnitCost(
                forward=computing.forward,
                backward=computing.backward,
                gather=self._gather_seconds(elements),
                reduce=self._reduce_seconds(elements),
                elements=elements,
            )
        return self._units[kind]

    def _has_experts(self, kind: str) -> bool:
        """Return True if the MLP of a unit is experts: of predicting layers as of the last one."""
        return kind == EXPERTS or (kind == PREDICTED and self._sizes.experts is not None)

    def _computing(self, kind: str) -> Spent:
        """Return the seconds in which a unit computes."""
        spent = Spent()
        if kind in (OUTPUT, PREDICTED):  # with a loss of its own
            output = self._work.of_output()
            spent.add(Spent(output.forward, output.backward(Spent())))
        if kind not in (OUTPUT, EMBEDDING):
            forward, backward = self._work.forward_and_backward(
                self._has_experts(kind), self._recompute, self._part
            )
            spent.add(Spent(forward, backward))
        return spent

    def _elements(self, kind: str) -> UnitElements:
        """Return the elements of the weights of a unit on a rank, before they are sharded."""
        sizes = self._sizes
        mesh = self._mesh
        if kind in (OUTPUT, EMBEDDING):
            return UnitElements(sizes.vocabulary_weights / mesh.tensor)
        dense = float(sizes.attention_weights)
        if kind == PREDICTED:
            dense += 2 * sizes.hidden**2  # a projection of two states
        if not self._has_experts(kind):
            dense += sizes.dense_weights
            return UnitElements(dense / mesh.tensor)
        assert sizes.experts is not None
        dense += sizes.shared_weights
        local = sizes.experts.number / mesh.expert
        experts = local * sizes.one_expert / mesh.expert_tensor
        return UnitElements(dense / mesh.tensor, experts)

    def _groups(self, elements: UnitElements) -> Iterator[tuple[float, range]]:
        """Yield elements that ranks share, and these ranks: dense ones, and those of experts."""
        if elements.dense:
            yield elements.dense, self._mesh.sharding_ranks
        if elements.experts:
            yield elements.experts, self._mesh.expert_sharding_ranks

    def _inner(self, ranks: range) -> range:
        """Return the ranks that shard one copy: one of few experts' ranks for many copies."""
        num_inner = len(ranks) // self._mesh.copies
        return ranks[: max(1, num_inner)]

    def _collective(
        self,
        name: str,
        num_bytes: float,
        ranks: range,
    ) -> float:
        return collective_seconds(self._machine, name, num_bytes, ranks, self._fitted)

    def _gather_seconds(self, elements: UnitElements) -> float:
        """Return the seconds of the gather of weights."""
        mesh = self._mesh
        if mesh.level == 0:
            return 0.0
        seconds = 0.0
        for number, ranks in self._groups(elements):
            num_bytes = self._software.gather_bytes * number
            inner = self._inner(ranks)
            seconds += self._collective("all_gather", num_bytes, inner)
        return seconds

    def _reduce_seconds(self, elements: UnitElements) -> float:
        """Return the seconds of the reduction of gradients."""
        mesh = self._mesh
        seconds = 0.0
        for number, ranks in self._groups(elements):
            num_bytes = self._software.reduce_bytes * number
            if mesh.level == 0:
                seconds += self._collective("all_reduce", num_bytes, ranks)
                continue
            inner = self._inner(ranks)
            seconds += self._collective("reduce_scatter", num_bytes, inner)
            if mesh.copies > 1:
                outer = ranks[:: len(inner)]
                shard = num_bytes / len(inner)
                seconds += self._collective("all_reduce", shard, outer)
        return seconds

    # ---- seconds

    def _seconds(self, stage: Stage) -> StageSeconds:
        """Return the seconds of a stage."""
        mesh = self._mesh
        forward = 0.0
        backward = 0.0
        exposed = 0.0
        gathers = 0.0
        reductions = 0.0
        whole = 0.0
        updated = 0.0
        stored = self._stored_units_of(stage)
        for kind, count in (stored | self._units_of(stage)).items():
            unit = self._unit(kind)
            if kind not in stored:  # a tied output layer: its weight is the embedding's
                unit = unit.without_weight
            gathers += count * unit.gather
            reductions += count * unit.reduce
            whole += count * unit.elements.whole
            updated += count * unit.elements.of_shard(mesh)
            of_forward = unit.forward
            of_backward = unit.backward
            if mesh.is_fsdp:
                gather = unit.gather if mesh.level == 3 else 0.0
                of_forward = self._overlapped(unit.forward, gather)
                of_backward = self._overlapped(unit.backward, gather + unit.reduce)
            forward += count * of_forward
            backward += count * of_backward
            exposed += count * (of_forward - unit.forward)
            exposed += count * (of_backward - unit.backward)
        ends = self._kernels.move(self._software.update_bytes * updated)
        if mesh.level < 3:
            ends += self._exposed(gathers, forward, whole)
        if not mesh.is_fsdp:
            ends += self._exposed(reductions, backward, whole)
        return StageSeconds(
            microbatch=forward + backward + self._stage_messages(),
            exposed=exposed,
            ends=ends,
        )

    def _units_of(self, stage: Stage) -> dict[str, int]:
        """Return the units of a stage that compute, by their kinds."""
        units = {DENSE: stage.dense, EXPERTS: stage.experts}
        if stage.has_embedding:
            units[EMBEDDING] = 1
        if stage.has_output:
            units[OUTPUT] = 1
            units[PREDICTED] = self._sizes.predicted_tokens
        return {kind: count for kind, count in units.items() if count}

    def _overlapped(self, compute: float, message: float) -> float:
        """Return the seconds of compute while collectives run."""
        if not self._software.overlaps_data:
            return compute + message
        return overlapped_seconds(compute, message, self._fitted)

    def _exposed(
        self,
        message: float,
        compute: float,
        num_elements: float,
    ) -> float:
        """Return the seconds of the collectives of DDP that compute does not overlap.

        Args:
            message: seconds of all of them.
            compute: seconds of what runs at the same time.
            num_elements: of the weights of whole units, which buckets divide.
        """
        if not message or not self._software.overlaps_data:
            return message
        of_bucket = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_OF_RANK * self._mesh.data)
        num_buckets = max(1, ceil(num_elements / of_bucket))
        contention = self._fitted.contention * min(compute, message)
        longer = max(0.0, message - compute)
        return longer + message / num_buckets + contention

    def _stage_messages(self) -> float:
        """Return the seconds of messages between stages for a microbatch."""
        mesh = self._mesh
        if mesh.pipeline == 1:
            return 0.0
        return stage_message_seconds(
            machine=self._machine,
            num_bytes=self._memory.input_bytes,
            distance=mesh.gpus // mesh.pipeline,
            virtual=mesh.virtual,
            is_overlapped=mesh.virtual > 1 and self._software.overlaps_data,
            fitted=self._fitted,
        )

    # ---- memory

    def _bytes(self, stage: Stage, number: int) -> float:
        """Return the most bytes of a rank of a stage."""
        memory = self._memory
        lasting = 0.0
        largest = 0.0
        for kind, count in self._stored_units_of(stage).items():
            elements = self._unit(kind).elements
            lasting += count * self._lasting_bytes(elements)
            largest = max(largest, elements.whole)
        passing = 0.0
        if self._mesh.level == 3:
            # Two units are gathered at once, one has gradients, and one is being reduced.
            software = self._software
            of_element = 2 * software.gather_bytes + software.compute_bytes
            passing = largest * (of_element + software.reduce_bytes)
        # The peak is where the loss is computed, or in the backward of the last layer.
        at_once = self._recomputed_bytes(stage)
        if stage.has_output:
            num_outputs = 1 + self._sizes.predicted_tokens
            at_once = max(at_once, num_outputs * memory.output_kept)
        gradients = 2 * memory.input_bytes
        if self._mesh.tensor > 1:
            gradients = 2 * memory.gathered_input
        kept = self._kept_bytes(stage) * self._in_flight(number)
        return lasting + passing + kept + at_once + gradients + WORKSPACE

    def _stored_units_of(self, stage: Stage) -> dict[str, int]:
        """Return the units of a stage whose weights a rank stores and updates, by their kinds.

        A tied output layer beside its embedding has no weight of its own.
        """
        units = self._units_of(stage)
        if stage.has_embedding and self._sizes.is_tied:
            units.pop(OUTPUT, None)
        if PREDICTED in units:
            units[EMBEDDING] = 1  # of the tokens that it predicts from
        return units

    def _lasting_bytes(self, elements: UnitElements) -> float:
        """Return the bytes of weights, gradients and optimizer state of a unit."""
        software = self._software
        level = self._mesh.level
        whole = elements.whole
        shard = elements.of_shard(self._mesh)
        num_bytes = software.optimizer_bytes * shard
        if level >= 2:
            num_bytes += software.gradient_bytes * shard
        else:
            num_bytes += software.gradient_bytes * whole
        if level < 3:
            num_bytes += software.weight_bytes * whole
            if software.compute_bytes == FP32:  # the optimizer updates these
                num_bytes -= FP32 * shard
        return num_bytes

    def _kept_bytes(self, stage: Stage) -> float:
        """Return the bytes of activations of one microbatch."""
        memory = self._memory
        kept = stage.dense * memory.kept(False)
        if stage.experts:
            kept += stage.experts * memory.kept(True)
        if stage.has_output and self._sizes.predicted_tokens:
            of_layer = memory.kept(self._has_experts(PREDICTED))
            kept += self._sizes.predicted_tokens * of_layer
        return kept

    def _recomputed_bytes(self, stage: Stage) -> float:
        """Return the bytes of activations that the backward of a layer computes again."""
        num_bytes = 0.0
        if stage.dense:
            num_bytes = self._memory.recomputed(False)
        if stage.experts:
            num_bytes = max(num_bytes, self._memory.recomputed(True))
        return num_bytes

    def _in_flight(self, number: int) -> float:
        """Return the microbatches whose activations a stage keeps at once."""
        mesh = self._mesh
        behind = mesh.pipeline - number - 1
        ahead: float = behind + 1
        if mesh.virtual > 1:  # Megatron-Core's interleaved schedule
            chunks = 2 * behind + (mesh.virtual - 1) * mesh.pipeline + 1
            ahead = chunks / mesh.virtual
        return min(mesh.num_microbatches, ahead)

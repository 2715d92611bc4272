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

from dataclasses import dataclass
from math import ceil

from megatron.planning.costs.gpu_kernels import FITTED, FP32, Fitted, Kernels
from megatron.planning.costs.layer_memory import NONE, LayerMemory
from megatron.planning.costs.layer_seconds import LayerWork
from megatron.planning.costs.model_sizes import ModelSizes, RunLayout
from megatron.planning.costs.software import Software
from megatron.planning.costs.spent_seconds import Spent
from megatron.planning.machine import Cluster

BUCKET_ELEMENTS = 40e6
"""Elements of a bucket of DDP in Megatron-Core: the default of --ddp-bucket-size with few ranks."""

WORKSPACE = 600e6
"""Bytes of workspaces of cuBLAS and attention, and of what lives shortly beside activations."""


@dataclass(frozen=True)
class FormulaStep:
    """The step of a run by formulas.

    Attributes:
        seconds: of a step.
        bubble_seconds: in which a stage waits for others.
        exposed_seconds: in which compute waits for gathers and reductions of shards.
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
class Stage:
    """A pipeline stage.

    Attributes:
        dense: layers without experts.
        experts: layers with experts.
        has_embedding: it is the first one.
        has_output: it is the last one.
    """

    dense: int
    experts: int
    has_embedding: bool
    has_output: bool


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
        self._units: dict[str, tuple[float, float, Collectives]] = {}

    def step(self) -> FormulaStep:
        """Return the step."""
        stages = stages_of(self._sizes, self._mesh, self._software.balances_stages)
        found = [self._stage(stage, number) for number, stage in enumerate(stages)]
        slowest = max(found, key=lambda each: each.microbatch)
        mean = sum(each.microbatch for each in found) / len(found)
        bubble = (self._mesh.pipeline - 1) * mean / self._mesh.virtual
        memory = [self._bytes(stage, number) for number, stage in enumerate(stages)]
        seconds = self._mesh.num_microbatches * slowest.microbatch + bubble
        ends = max(each.ends for each in found)
        return FormulaStep(
            seconds=seconds + ends,
            bubble_seconds=bubble,
            exposed_seconds=self._mesh.num_microbatches * slowest.exposed + ends,
            peak_bytes=max(memory),
            first_bytes=memory[0],
            recompute=self._recompute,
            part=self._part,
        )

    # ---- seconds

    def _unit(self, kind: str) -> tuple[float, float, Collectives]:
        """Return the seconds of a unit forward and backward, and of its collectives.

        Args:
            kind: ``dense``, ``experts``, ``predicted``, ``output`` or ``embedding``.
        """
        if kind not in self._units:
            sizes, tensor = self._sizes, self._mesh.tensor
            dense_elements = sizes.attention_weights / tensor
            expert_elements = 0.0
            forward = backward = 0.0
            if kind == "output":
                seconds = self._work.of_output()
                forward, backward = seconds.forward, seconds.backward(Spent())
            has_experts = kind == "experts"
            if kind == "predicted":  # a layer behind a projection of two states, and the loss again
                has_experts = sizes.experts is not None
                dense_elements += 2 * sizes.hidden**2 / tensor
                seconds = self._work.of_output()
                forward, backward = seconds.forward, seconds.backward(Spent())
            if kind in ("output", "embedding"):
                dense_elements = sizes.vocabulary_weights / tensor
            elif not has_experts:
                dense_elements += sizes.dense_weights / tensor
            else:
                dense_elements += sizes.shared_weights / tensor
                assert sizes.experts is not None
                local = sizes.experts.number / self._mesh.expert
                expert_elements = local * sizes.one_expert / self._mesh.expert_tensor
            if kind not in ("output", "embedding"):
                of_layer = self._work.forward_and_backward(has_experts, self._recompute, self._part)
                forward += of_layer[0]
                backward += of_layer[1]
            collectives = self._collectives(dense_elements, expert_elements)
            self._units[kind] = forward, backward, collectives
        return self._units[kind]

    def _collectives(self, dense: float, experts: float) -> Collectives:
        """Return the seconds of the gather and the reduction of weights.

        Args:
            dense: elements of a rank without those of experts.
            experts: elements of experts.
        """
        software, mesh, machine = self._software, self._mesh, self._machine
        gather = reduce = 0.0
        parts = ((dense, mesh.sharding_ranks), (experts, mesh.expert_sharding_ranks))
        for elements, ranks in parts:
            inner = ranks[: len(ranks) // mesh.copies]
            gathered = software.gather_bytes * elements
            reduced = software.reduce_bytes * elements
            if not elements:
                continue
            if mesh.level == 0:
                reduce += machine.collective_seconds("all_reduce", reduced, ranks)
                continue
            gather += machine.collective_seconds("all_gather", gathered, inner)
            reduce += machine.collective_seconds("reduce_scatter", reduced, inner)
            if mesh.copies > 1:
                outer = ranks[:: len(inner)]
                shard = reduced / len(inner)
                reduce += machine.collective_seconds("all_reduce", shard, outer)
        link = self._fitted.link
        return Collectives(gather / link, reduce / link, dense, experts)

    def _stage(self, stage: Stage, number: int) -> StageSeconds:
        """Return the seconds of a stage."""
        units: list[tuple[int, str]] = [(stage.dense, "dense"), (stage.experts, "experts")]
        if stage.has_embedding:
            units.append((1, "embedding"))
        if stage.has_output:
            units.append((1, "output"))
            units.append((self._sizes.predicted_tokens, "predicted"))
        forward = backward = exposed = gathers = reductions = elements = 0.0
        for count, kind in units:
            if not count:
                continue
            of_forward, of_backward, collectives = self._unit(kind)
            gathers += count * collectives.gather
            reductions += count * collectives.reduce
            elements += count * collectives.elements_of_shard(self._mesh)
            if not self._mesh.is_fsdp:
                forward += count * of_forward
                backward += count * of_backward
                continue
            gather = collectives.gather if self._mesh.level == 3 else 0.0
            both = gather + collectives.reduce
            longer_forward = self._overlapped(of_forward, gather)
            longer_backward = self._overlapped(of_backward, both)
            exposed += count * (longer_forward - of_forward + longer_backward - of_backward)
            forward += count * longer_forward
            backward += count * longer_backward
        microbatch = forward + backward + self._stage_messages()
        ends = self._kernels.move(self._software.update_bytes * elements)
        if self._mesh.level < 3:
            ends += self._exposed(gathers, forward, elements)
        if not self._mesh.is_fsdp:
            ends += self._exposed(reductions, backward, elements)
        return StageSeconds(microbatch, exposed, ends)

    def _overlapped(self, compute: float, message: float) -> float:
        """Return the seconds of compute with collectives beside it."""
        if not self._software.overlaps_data:
            return compute + message
        slower = compute + self._fitted.contention * min(compute, message)
        return max(slower, message)

    def _exposed(self, message: float, compute: float, elements: float) -> float:
        """Return the seconds of the collectives of DDP that compute does not overlap."""
        if not message:
            return 0.0
        if not self._software.overlaps_data:
            return message
        num_shards = len(self._mesh.sharding_ranks)
        num_buckets = max(1, ceil(elements * num_shards / BUCKET_ELEMENTS))
        contention = self._fitted.contention * min(compute, message)
        return max(0.0, message - compute) + message / num_buckets + contention

    def _stage_messages(self) -> float:
        """Return the seconds of messages between stages for a microbatch."""
        mesh = self._mesh
        if mesh.pipeline == 1:
            return 0.0
        num_bytes = self._memory.input_bytes
        distance = mesh.gpus // mesh.pipeline
        message = self._machine.message_seconds(num_bytes, distance) / self._fitted.link
        launched = 4 * mesh.virtual * self._fitted.launch
        if mesh.virtual > 1 and self._software.overlaps_data:
            return launched
        return 2 * mesh.virtual * message + launched

    # ---- memory

    def _bytes(self, stage: Stage, number: int) -> float:
        """Return the most bytes of a rank of a stage."""
        software, mesh, memory = self._software, self._mesh, self._memory
        parts = [(stage.dense, "dense"), (stage.experts, "experts")]
        parts.append((int(stage.has_embedding), "embedding"))
        is_another = not (self._sizes.is_tied and stage.has_embedding)
        parts.append((int(stage.has_output and is_another), "output"))
        predicted = self._sizes.predicted_tokens if stage.has_output else 0
        parts.append((predicted, "predicted"))
        if predicted and not stage.has_embedding:  # it embeds the tokens that it predicts from
            parts.append((1, "embedding"))
        lasting, largest = 0.0, 0.0
        for count, kind in parts:
            if not count:
                continue
            collectives = self._unit(kind)[2]
            shard = count * collectives.elements_of_shard(mesh)
            whole = count * collectives.elements
            states = software.optimizer_bytes * (shard if mesh.level else whole)
            gradients = software.gradient_bytes * (shard if mesh.level >= 2 else whole)
            weights = 0.0
            if mesh.level < 3:
                weights = software.weight_bytes * whole
                if software.compute_bytes == FP32:  # the optimizer updates these
                    weights -= FP32 * (shard if mesh.level else whole)
            lasting += states + gradients + weights
            largest = max(largest, collectives.elements)
        passing = 0.0
        if mesh.level == 3:
            # Two units are gathered at once, one has gradients, and one is being reduced.
            of_element = 2 * software.gather_bytes + software.compute_bytes + software.reduce_bytes
            passing = largest * of_element
        layers = stage.dense * memory.kept(False)
        if stage.experts:
            layers += stage.experts * memory.kept(True)
        in_flight = self._in_flight(number)
        layers += predicted * memory.kept(self._sizes.experts is not None)
        kept = layers * in_flight
        again = 0.0
        if stage.dense:
            again = memory.recomputed(False)
        if stage.experts:
            again = max(again, memory.recomputed(True))
        # The peak is where the loss is computed, or in the backward of the last layer.
        output = 0.0
        if stage.has_output:
            output = (1 + predicted) * memory.output_kept
        gradients_of_layer = 2 * memory.input_bytes
        if mesh.tensor > 1:
            gradients_of_layer = 2 * memory.gathered_input
        return lasting + passing + kept + max(output, again) + gradients_of_layer + WORKSPACE

    def _in_flight(self, number: int) -> float:
        """Return the microbatches whose activations a stage keeps at once."""
        mesh = self._mesh
        if mesh.virtual > 1:  # Megatron-Core's interleaved schedule, for the first stage
            ahead = 2 * (mesh.pipeline - number - 1) + (mesh.virtual - 1) * mesh.pipeline + 1
            return min(mesh.num_microbatches, ahead / mesh.virtual)
        return min(mesh.num_microbatches, mesh.pipeline - number)


@dataclass(frozen=True)
class Collectives:
    """The collectives of the weights of a unit.

    Attributes:
        gather: seconds of the gather of its weights.
        reduce: seconds of the reduction of its gradients.
        dense: elements of a rank without those of experts.
        experts: elements of experts.
    """

    gather: float
    reduce: float
    dense: float
    experts: float

    @property
    def elements(self) -> float:
        """Elements of a rank, before they are sharded."""
        return self.dense + self.experts

    def elements_of_shard(self, mesh: RunLayout) -> float:
        """Return the elements that a rank updates."""
        if mesh.level == 0:
            return self.elements
        shard = self.dense / (len(mesh.sharding_ranks) // mesh.copies)
        if self.experts:
            shard += self.experts / max(1, len(mesh.expert_sharding_ranks) // mesh.copies)
        return shard


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


def stages_of(sizes: ModelSizes, mesh: RunLayout, is_balanced: bool = False) -> list[Stage]:
    """Return the pipeline stages of a model.

    Layers that do not divide evenly are one fewer in the first and in the last stage, if embedding
    and output then count as layers, and otherwise fewer in the last ones.

    Args:
        sizes: of the model.
        mesh: the layout of the run.
        is_balanced: layers and the output layer go to the stages by the size of their matrices.
    """
    num_stages = mesh.pipeline
    if is_balanced and sizes.experts is None and num_stages > 1:
        return _balanced_stages(sizes, num_stages)
    counts = [sizes.layers // num_stages] * num_stages
    rest = sizes.layers % num_stages
    if rest and (sizes.layers + 2) % num_stages == 0:
        counts = [(sizes.layers + 2) // num_stages] * num_stages
        counts[0] -= 1
        counts[-1] -= 1
    else:
        for number in range(rest):
            counts[(number + 1) % num_stages if num_stages > rest + 1 else number] += 1
    stages: list[Stage] = []
    begin = 0
    for number, count in enumerate(counts):
        dense = max(0, min(sizes.dense_layers - begin, count)) if sizes.experts else count
        is_last = number == num_stages - 1
        stages.append(Stage(dense, count - dense, number == 0, is_last))
        begin += count
    return stages


def _balanced_stages(sizes: ModelSizes, num_stages: int) -> list[Stage]:
    """Return stages to which layers are given until their share of the work is reached."""
    of_layer = sizes.attention_weights + sizes.dense_weights
    share = (sizes.layers * of_layer + sizes.vocabulary_weights) / num_stages
    counts = [0] * num_stages
    stage, work = 0, 0.0
    for _ in range(sizes.layers):
        if work >= (stage + 1) * share and stage < num_stages - 1:
            stage += 1
        counts[stage] += 1
        work += of_layer
    last = num_stages - 1
    return [Stage(count, 0, number == 0, number == last) for number, count in enumerate(counts)]

# SPDX-License-Identifier: Apache-2.0
"""Locations of shards in the buffers of the ranks that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.checkpoint.core import key_rules
from megatron.checkpoint.core.spelling import expert_number
from megatron.checkpoint.torch_dist.optimizer_buffers import (
    PARAMETER_ALIGNMENT,
    BufferLocation,
    LayoutMismatchError,
    OptimizerBuffer,
    ParameterShard,
)
from megatron.checkpoint.torch_dist.registered_model import RegisteredModel


@dataclass(frozen=True)
class StoredShard:
    """One rank's shard of a parameter in the file.

    Attributes:
        name: canonical name of the parameter.
        buffer: that has the shard.
        location: of the shard in the buffer.
    """

    name: str
    buffer: OptimizerBuffer
    location: BufferLocation


Placement = dict[str, list[list[StoredShard]]]
"""Name -> copies of the parameter -> its shards, one for each tensor-parallel rank."""


def dense_shards(shards: Sequence[ParameterShard], experts_are_apart: bool) -> list[ParameterShard]:
    """Return the shards that are in the buffers of the dense optimizer.

    Args:
        shards: of any parameters.
        experts_are_apart: experts have an optimizer, and so buffers, of their own.
    """
    if not experts_are_apart:
        return list(shards)
    return [shard for shard in shards if not key_rules.is_expert(shard.name)]


def place_chunk(
    model: RegisteredModel,
    shards: Sequence[ParameterShard],
    buffers: Mapping[str, OptimizerBuffer],
) -> list[StoredShard]:
    """Locate the shards of one rank's model chunk in its buffers.

    Args:
        model: the model.
        shards: in the order of registration.
        buffers: by dtype of the parameters.

    Raises:
        LayoutMismatchError: if they do not fill the buffers.
    """
    by_dtype = shards_by_dtype(model, shards)
    if by_dtype.keys() != buffers.keys():
        raise LayoutMismatchError(
            f"parameters have the dtypes {sorted(by_dtype)}, buffers are for {sorted(buffers)}"
        )
    placed: list[StoredShard] = []
    for dtype, of_dtype in by_dtype.items():
        numel, buffer = sum(shard.numel for shard in of_dtype), buffers[dtype]
        # Gaps between parameters are shorter than the alignment.
        if not numel <= buffer.numel < numel + PARAMETER_ALIGNMENT * len(of_dtype):
            raise LayoutMismatchError(
                f"parameters have {numel} elements and the buffer {buffer.numel}"
            )
        placed += _place_in(buffer, of_dtype)
    return placed


def place_experts(
    model: RegisteredModel,
    experts: Sequence[Sequence[OptimizerBuffer]],
    chunks: Sequence[Sequence[ParameterShard]],
    num_stages: int,
    placement: Placement,
) -> None:
    """Add the experts, which expert parallelism divides among ranks in the order of their numbers.

    Args:
        model: the model.
        experts: buffers of each rank, with expert tensor parallelism fastest, then expert
            parallelism, then pipeline stages.
        chunks: all shards of each model chunk, in the order of the layers.
        num_stages: number of pipeline stages.
        placement: gets the experts.

    Raises:
        LayoutMismatchError: if they do not fill the buffers.
    """
    expert_tensor_parallel_size = model.layout.expert_tensor_parallel_size
    expert_parallel_size, rest = divmod(len(experts), expert_tensor_parallel_size * num_stages)
    if rest or not expert_parallel_size or model.num_experts % expert_parallel_size:
        raise LayoutMismatchError(
            f"{len(experts)} ranks have buffers of {model.num_experts} experts in {num_stages}"
            " pipeline stages"
        )
    experts_of_rank = model.num_experts // expert_parallel_size
    for stage in range(num_stages):
        # All stages have a first chunk, then all have a second one: with two stages, stage 1 has
        # the chunks 1 and 3 of four.
        chunks_of_stage = chunks[stage::num_stages]
        for expert_rank in range(expert_parallel_size):
            numbers = range(expert_rank * experts_of_rank, (expert_rank + 1) * experts_of_rank)
            contents: list[tuple[str, list[ParameterShard]]] = []
            for shards in chunks_of_stage:
                mine = [shard for shard in shards if expert_number(shard.name) in numbers]
                contents += shards_by_dtype(model, mine).items()
            # With two stages of two expert-parallel and two expert-tensor-parallel ranks, the ranks
            # 4 and 5 of eight have the first half of the experts in stage 1: 2 * (0 + 2 * 1) = 4.
            first = expert_tensor_parallel_size * (expert_rank + expert_parallel_size * stage)
            buffers_of_ranks = experts[first : first + expert_tensor_parallel_size]
            add_copies(
                placement, [_place_in_turn(contents, buffers) for buffers in buffers_of_ranks]
            )


def add_copies(placement: Placement, ranks: Sequence[Sequence[StoredShard]]) -> None:
    """Add a copy of every parameter of a model chunk to ``placement``.

    Args:
        placement: gets the copies.
        ranks: shards of each tensor-parallel rank. Ranks have the same parameters in one order.
    """
    for shards in zip(*ranks):
        placement.setdefault(shards[0].name, []).append(list(shards))


def shards_by_dtype(
    model: RegisteredModel, shards: Sequence[ParameterShard]
) -> dict[str, list[ParameterShard]]:
    """Group shards by the dtype that the parameter has in the model, as text."""
    found: dict[str, list[ParameterShard]] = {}
    for shard in shards:
        found.setdefault(model.dtype(shard.name), []).append(shard)
    return found


def _place_in_turn(
    contents: Sequence[tuple[str, list[ParameterShard]]], buffers: Sequence[OptimizerBuffer]
) -> list[StoredShard]:
    """Locate experts in the buffers of a rank; a model chunk without any has no buffer.

    Args:
        contents: dtype and shards of each buffer that there should be.
        buffers: those that there are.
    """
    if [dtype for dtype, _ in contents] != [buffer.dtype for buffer in buffers]:
        raise LayoutMismatchError(
            f"a rank has {len(buffers)} buffers of experts, expected {len(contents)}"
        )
    placed: list[StoredShard] = []
    for (_, shards), buffer in zip(contents, buffers):
        placed += _place_in(buffer, shards)
    return placed


def _place_in(buffer: OptimizerBuffer, shards: Sequence[ParameterShard]) -> list[StoredShard]:
    locations = buffer.locate(shards)
    return [StoredShard(shard.name, buffer, location) for shard, location in zip(shards, locations)]

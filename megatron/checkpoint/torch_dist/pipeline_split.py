# SPDX-License-Identifier: Apache-2.0
"""Division of a model over the chunks of a pipeline, and the place of every shard in a buffer.

Both are found from the sizes of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.checkpoint.core.spelling import expert_number, is_in_expert
from megatron.checkpoint.torch_dist.optimizer_buffers import (
    PARAMETER_ALIGNMENT,
    BufferLocation,
    BuffersOfRanks,
    LayoutMismatchError,
    OptimizerBuffer,
    ParameterShard,
)
from megatron.checkpoint.torch_dist.registered_model import ModelChunk, RegisteredModel


@dataclass(frozen=True)
class StoredShard:
    """One rank's shard of a parameter in a buffer of the file.

    Attributes:
        name: canonical name of the parameter.
        buffer: the rank's buffer.
        location: position of the shard in the buffer.
    """

    name: str
    buffer: OptimizerBuffer
    location: BufferLocation


Placement = dict[str, list[list[StoredShard]]]
"""Name -> copies of the parameter -> its shards, one for each tensor-parallel rank."""


def dense_shards(
    shards: Sequence[ParameterShard],
    experts_are_apart: bool,
) -> list[ParameterShard]:
    """Return the shards in the buffers of the dense optimizer; experts may have their own."""
    if not experts_are_apart:
        return list(shards)
    return [shard for shard in shards if not is_in_expert(shard.name)]


def place_chunk(
    model: RegisteredModel,
    shards: Sequence[ParameterShard],
    buffers: Mapping[str, OptimizerBuffer],
) -> list[StoredShard]:
    """Locate the shards of one rank's model chunk in its buffers.

    Args:
        model: the model in a supposed layout.
        shards: the shards of the chunk, in the order of registration.
        buffers: the rank's buffers for the chunk, by the dtype of their parameters.

    Raises:
        LayoutMismatchError: if they do not fill the buffers.
    """
    by_dtype = shards_by_dtype(model, shards)
    if by_dtype.keys() != buffers.keys():
        raise LayoutMismatchError(
            f"parameters have the dtypes {sorted(by_dtype)}, buffers are for {sorted(buffers)}"
        )
    placed = []
    for dtype, of_dtype in by_dtype.items():
        numel = sum(shard.numel for shard in of_dtype)
        buffer = buffers[dtype]
        # Gaps between parameters are shorter than the alignment.
        if not numel <= buffer.numel < numel + PARAMETER_ALIGNMENT * len(of_dtype):
            raise LayoutMismatchError(
                f"parameters have {numel} elements and the buffer {buffer.numel}"
            )
        placed += _place_in(buffer, of_dtype)
    return placed


def place_experts(
    model: RegisteredModel,
    experts: BuffersOfRanks,
    chunks: Sequence[Sequence[ParameterShard]],
    num_stages: int,
    placement: Placement,
) -> None:
    """Add the experts, which expert parallelism divides among ranks in the order of their numbers.

    Args:
        model: the model in a supposed layout.
        experts: buffers of each rank, with expert tensor parallelism fastest, then expert
            parallelism, then pipeline stages.
        chunks: all shards of each model chunk, in the order of the layers.
        num_stages: number of pipeline stages.
        placement: mapping that gets the experts.

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
                mine = []
                for shard in shards:
                    if expert_number(shard.name) in numbers:
                        mine.append(shard)
                contents += shards_by_dtype(model, mine).items()
            # With two stages of two expert-parallel and two expert-tensor-parallel ranks, the ranks
            # 4 and 5 of eight have the first half of the experts in stage 1: 2 * (0 + 2 * 1) = 4.
            first = expert_tensor_parallel_size * (expert_rank + expert_parallel_size * stage)
            buffers_of_ranks = experts[first : first + expert_tensor_parallel_size]
            placed = [_place_in_turn(contents, buffers) for buffers in buffers_of_ranks]
            add_copies(placement, placed)


def add_copies(placement: Placement, ranks: Sequence[Sequence[StoredShard]]) -> None:
    """Add a copy of every parameter of a model chunk, whose ranks have them in one order."""
    for shards in zip(*ranks):
        placements = placement.setdefault(shards[0].name, [])
        placements.append(list(shards))


def shards_by_dtype(
    model: RegisteredModel,
    shards: Sequence[ParameterShard],
) -> dict[str, list[ParameterShard]]:
    """Group shards by the dtype that the parameter has in the model, as text."""
    found: dict[str, list[ParameterShard]] = {}
    for shard in shards:
        shards_of_dtype = found.setdefault(model.dtype(shard.name), [])
        shards_of_dtype.append(shard)
    return found


def _place_in_turn(
    contents: Sequence[tuple[str, list[ParameterShard]]],
    buffers: Sequence[OptimizerBuffer],
) -> list[StoredShard]:
    """Locate experts, by dtype, in the buffers of a rank; a chunk without any has no buffer."""
    dtypes = [dtype for dtype, _ in contents]
    if dtypes != [buffer.dtype for buffer in buffers]:
        raise LayoutMismatchError(
            f"a rank has {len(buffers)} buffers of experts, expected {len(contents)}"
        )
    placed = []
    for (_, shards), buffer in zip(contents, buffers):
        placed += _place_in(buffer, shards)
    return placed


def _place_in(
    buffer: OptimizerBuffer,
    shards: Sequence[ParameterShard],
) -> list[StoredShard]:
    placed = []
    for shard, location in zip(shards, buffer.locate(shards)):
        placed.append(StoredShard(shard.name, buffer, location))
    return placed


# ---- the split of the model

BuffersOfChunk = Mapping[str, OptimizerBuffer]
"""Dtype -> the buffer that a rank has for a model chunk."""


def place_model(
    model: RegisteredModel,
    dense: BuffersOfRanks,
    experts: BuffersOfRanks,
) -> Placement:
    """Locate all parameters, giving each model chunk as many layers as fill its buffers.

    Args:
        model: the model in a supposed layout.
        dense: buffers of each rank, tensor-parallel ranks fastest, then pipeline stages.
        experts: buffers of each rank of the experts' own optimizer; empty if they have none.

    Raises:
        LayoutMismatchError: if the parameters do not fill the buffers.
    """
    num_stages, rest = divmod(len(dense), model.layout.tensor_parallel_size)
    if rest or not num_stages:
        raise LayoutMismatchError(f"{len(dense)} ranks have buffers")
    pipeline = _in_order_of_layers(dense, num_stages, model.layout.tensor_parallel_size)
    chunks = _split(model, pipeline, num_stages, experts_are_apart=bool(experts))
    placement: Placement = {}
    for buffers_of_ranks, shards in zip(pipeline, chunks):
        of_dense = dense_shards(shards, experts_are_apart=bool(experts))
        placed = [place_chunk(model, of_dense, buffers) for buffers in buffers_of_ranks]
        add_copies(placement, placed)
    if experts:
        place_experts(model, experts, chunks, num_stages, placement=placement)
    return placement


def _in_order_of_layers(
    ranks: BuffersOfRanks,
    num_stages: int,
    tensor_parallel_size: int,
) -> list[list[BuffersOfChunk]]:
    """Return the buffers of each model chunk's tensor-parallel ranks, in the order of the layers.

    All stages have a first chunk, then all have a second one. With two stages, two tensor-parallel
    ranks and two chunks::

        rank                          0 and 1   2 and 3   0 and 1   2 and 3
        stage (rank // 2), chunk       0, 0      1, 0      0, 1      1, 1
    """
    chunks_of_rank = [_by_chunk(rank) for rank in ranks]
    num_chunks = max(len(chunks) for chunks in chunks_of_rank)
    pipeline = []
    for chunk in range(num_chunks):
        for stage in range(num_stages):
            first = stage * tensor_parallel_size
            buffers_of_ranks = []
            for chunks in chunks_of_rank[first : first + tensor_parallel_size]:
                # A rank with fewer chunks has none of the parameters of this one.
                buffers = chunks[chunk] if chunk < len(chunks) else {}
                buffers_of_ranks.append(buffers)
            pipeline.append(buffers_of_ranks)
    return pipeline


def _by_chunk(rank: Sequence[OptimizerBuffer]) -> list[BuffersOfChunk]:
    """Group a rank's buffers by model chunk: a dtype that comes again begins the next chunk."""
    chunks: list[dict[str, OptimizerBuffer]] = []
    for buffer in rank:
        if not chunks or buffer.dtype in chunks[-1]:
            chunks.append({})
        chunks[-1][buffer.dtype] = buffer
    return [*chunks]


@dataclass(frozen=True)
class _Remainder:
    """The part of the model that is left for later chunks.

    Attributes:
        first_layer: number of the first layer of the decoder that is left.
        final_norm: whether the norm after the decoder is left.
        prediction: whether multi-token prediction is left.
    """

    first_layer: int
    final_norm: bool
    prediction: bool

    def after(self, chunk: ModelChunk) -> _Remainder:
        """Return the remainder after one more chunk."""
        return _Remainder(
            chunk.layers.stop,
            self.final_norm and not chunk.has_final_norm,
            self.prediction and not chunk.has_prediction,
        )


def _split(
    model: RegisteredModel,
    pipeline: Sequence[Sequence[BuffersOfChunk]],
    num_stages: int,
    experts_are_apart: bool,
) -> list[list[ParameterShard]]:
    """Return the shards of every model chunk, those of experts included."""
    contents = []
    remainder = _Remainder(0, bool(model.final_norm), bool(model.prediction))
    for number, buffers_of_ranks in enumerate(pipeline):
        buffers = buffers_of_ranks[0]  # other tensor-parallel ranks have the same sizes
        numel_of_buffers = sum(buffer.numel for buffer in buffers.values())
        candidates = _possible_chunks(
            model,
            remainder,
            is_first=number == 0,
            is_last=number + 1 == len(pipeline),
        )
        reasons = []
        for chunk in candidates:
            shards = model.shards(chunk, num_stages)
            of_dense = dense_shards(shards, experts_are_apart)
            reason = _mismatch(model, of_dense, buffers)
            if reason is None:
                break
            reasons.append(f"with {len(chunk.layers)} layers, {reason}")
            if sum(shard.numel for shard in of_dense) > numel_of_buffers:
                break  # larger chunks do not fit either
        if reason is not None:
            head = (
                f"chunk {number} of the pipeline's {len(pipeline)} is to begin with layer"
                f" {remainder.first_layer}"
            )
            raise LayoutMismatchError("; ".join([head, *reasons[-2:]]))
        contents.append(shards)
        remainder = remainder.after(chunk)
    return contents


def _mismatch(
    model: RegisteredModel,
    shards: Sequence[ParameterShard],
    buffers: BuffersOfChunk,
) -> str | None:
    """Return the reason why shards do not fill the buffers; None if they do."""
    try:
        place_chunk(model, shards, buffers)
    except LayoutMismatchError as error:
        return str(error)
    return None


def _possible_chunks(
    model: RegisteredModel,
    remainder: _Remainder,
    is_first: bool,
    is_last: bool,
) -> Iterator[ModelChunk]:
    """Yield the chunks that can come next, the smallest first; the last one has all that is left.

    In models with multi-token prediction, its layers and the final norm can be in any chunk after
    all other layers, not only in the last one.
    """
    first = remainder.first_layer
    num_layers = len(model.decoder)
    if is_last:
        yield ModelChunk(
            range(first, num_layers),
            has_final_norm=remainder.final_norm,
            has_prediction=remainder.prediction,
            is_first=is_first,
            is_last=True,
        )
        return
    for stop in range(first, num_layers + 1):
        ends_decoder = bool(model.prediction) and stop == num_layers
        for has_prediction in (False, True):
            if has_prediction and not (ends_decoder and remainder.prediction):
                continue
            for has_norm in (False, True):
                if has_norm and not (ends_decoder and remainder.final_norm):
                    continue
                yield ModelChunk(
                    range(first, stop),
                    has_final_norm=has_norm,
                    has_prediction=has_prediction,
                    is_first=is_first,
                    is_last=False,
                )

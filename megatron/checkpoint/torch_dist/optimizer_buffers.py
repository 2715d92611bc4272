# SPDX-License-Identifier: Apache-2.0
"""Buffers of Megatron-Core's distributed optimizer, as two layouts of torch_dist files store them.

:mod:`megatron.checkpoint.torch_dist.optimizer_buckets` explains what a buffer is, with a picture.
A :class:`ShardedBuffer` (``dp_reshardable``) is a tensor per bucket and optimizer slot. A
:class:`GatheredBuffer` (``dp_zero_gather_scatter``) is a tensor per slot, with all buckets in it.
Both find where the parameters are that a layout puts into them, and read ranges of these.
"""

from __future__ import annotations

import functools
import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.checkpoint.core.lazy_tensor import Shape
from megatron.checkpoint.dcp.chunk import Chunk
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist.optimizer_keys import BucketKey, OptimizerKey, OptimizerOfRank
from megatron.checkpoint.torch_dist.unsharded_state import read_sharded_object

PARAMETER_ALIGNMENT = 64
"""Parameters begin at multiples of this number of elements, counted from their bucket's start."""


class LayoutMismatchError(ValueError):
    """A layout of the model over ranks is not the one that the file was written with."""


@dataclass(frozen=True)
class ParameterShard:
    """One rank's shard of a parameter under tensor parallelism.

    Attributes:
        name: canonical name of the parameter.
        shape: shape of the shard.
        has_own_bucket: no other parameter is in its bucket. Word embeddings that two pipeline
            stages share are stored so.
    """

    name: str
    shape: Shape
    has_own_bucket: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferLocation:
    """Position of a shard's first element.

    Attributes:
        bucket: number of the stored tensor; 0 where all buckets are in one tensor.
        offset: offset in that tensor, in elements.
    """

    bucket: int
    offset: int


class OptimizerBuffer(Protocol):
    """All parameters of one dtype that a rank has in one model chunk.

    Attributes:
        dtype: dtype of the parameters in the model, as ``torch.bfloat16`` prints.
        slots: slot of the optimizer, such as ``exp_avg``, -> dtype of its tensors.
        numel: number of stored elements.
        shows_order: the file shows where parameters begin, not only how many elements there are.
    """

    dtype: str
    slots: Mapping[str, torch.dtype]
    numel: int
    shows_order: bool

    def locate(self, shards: Sequence[ParameterShard]) -> list[BufferLocation]:
        """Find where each of the shards begins, if these are the ones in the buffer.

        Args:
            shards: all shards of the buffer, in the order in which the model registers them.

        Raises:
            LayoutMismatchError: if they do not fill the buffer.
        """
        ...

    def read(
        self,
        slot: str,
        location: BufferLocation,
        start: int,
        stop: int,
    ) -> torch.Tensor:
        """Read some elements of a shard, a 1-d tensor.

        Args:
            slot: slot of the optimizer.
            location: position of the shard's first element.
            start: first element that is read, counted from the start of the shard.
            stop: end of the elements that are read, counted likewise.
        """
        ...


BuffersOfRanks = Sequence[Sequence[OptimizerBuffer]]
"""The buffers of every model-parallel rank, in the order of its model chunks."""


def _aligned(position: int) -> int:
    """Round up to the next position at which a parameter may begin: 0 -> 0, 1 -> 64, 65 -> 128."""
    return math.ceil(position / PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT


class ShardedBuffer:
    """A buffer whose buckets are tensors of their own: the layout ``dp_reshardable``.

    Data-parallel ranks wrote their shards as chunks of these tensors. Chunks begin and end where
    parameters and gaps do, and where the shard of a data-parallel rank does. So they show where
    parameters begin.

    Args:
        stored: the checkpoint.
        dtype: dtype of the parameters in the model.
        keys: keys of each bucket, slot -> key.

    Attributes:
        lengths: number of elements of each bucket, without the padding at its end.

    Raises:
        ValueError: if slots of a bucket differ in length.
    """

    shows_order = True

    def __init__(
        self,
        stored: StoredCheckpoint,
        dtype: str,
        keys: Sequence[Mapping[str, str]],
    ):
        self._stored = stored
        self._keys = keys
        self.dtype = dtype
        self.slots: Mapping[str, torch.dtype] = {
            slot: stored.dtype(key) for slot, key in keys[0].items()
        }
        self.lengths = [self._bucket_length(bucket) for bucket in keys]
        self.numel = sum(self.lengths)

    def _bucket_length(self, bucket: Mapping[str, str]) -> int:
        shapes = set()
        for key in bucket.values():
            shapes.add(self._stored.shape(key))
        shape = next(iter(shapes))
        is_one_shape = len(shapes) == 1 and len(shape) == 1
        if bucket.keys() != self.slots.keys() or not is_one_shape:
            found = ", ".join(f"{key} {self._stored.shape(key)}" for key in bucket.values())
            raise ValueError(
                f"the tensors of a bucket differ: {found}, expected one dim of the same length for"
                f" {', '.join(self.slots)}"
            )
        return shape[0]

    @functools.cached_property
    def _boundaries(self) -> list[set[int]]:
        """Positions in each bucket at which a chunk of the file begins or ends."""
        boundaries = []
        for bucket in self._keys:
            key = next(iter(bucket.values()))  # the other slots are cut in the same way
            positions: set[int] = set()
            for chunk in self._stored.chunks[key]:
                positions.update(chunk.span(0))
            boundaries.append(positions)
        return boundaries

    def locate(self, shards: Sequence[ParameterShard]) -> list[BufferLocation]:
        """Find where each shard begins: each must begin and end at boundaries of chunks.

        With buckets of 228 and 60 elements and three shards of 100, 100 and 60 (in the order of the
        buffer), the first is at 0 to 100 of bucket 0, the second at 128 to 228, where the bucket
        ends, and the third at 0 to 60 of bucket 1.

        Raises:
            LayoutMismatchError: if they do not fill the buckets.
        """
        locations = []
        bucket = position = 0
        for shard in reversed(shards):  # the order of the buffer is that of the backward pass
            if bucket == len(self.lengths):
                raise LayoutMismatchError(f"{shard.name} comes after the last bucket")
            length = self.lengths[bucket]
            start = _aligned(position)
            end = start + shard.numel
            if end > length or not {start, end} <= self._boundaries[bucket]:
                raise LayoutMismatchError(
                    f"{shard.name} is not at {start} to {end} of bucket {bucket}, which has"
                    f" {length} elements"
                )
            locations.append(BufferLocation(bucket, start))
            # A parameter with its own bucket begins at an aligned position, and the gap before it
            # belongs to the bucket before. That bucket then ends at an aligned position, too.
            position = end
            if length in (end, _aligned(end)):
                bucket += 1
                position = 0
        if bucket < len(self.lengths):
            raise LayoutMismatchError(
                f"buckets from {bucket} on, of {self.lengths[bucket:]} elements, have more than the"
                " parameters"
            )
        return locations[::-1]

    def read(
        self,
        slot: str,
        location: BufferLocation,
        start: int,
        stop: int,
    ) -> torch.Tensor:
        """Read elements of a shard as :meth:`OptimizerBuffer.read` does.

        Args:
            slot: slot of the optimizer.
            location: bucket of the shard, and offset of its first element there.
            start: first element that is read, counted from the start of the shard.
            stop: end of the elements that are read, counted likewise.
        """
        key = self._keys[location.bucket][slot]
        chunk = Chunk((location.offset + start,), (stop - start,))
        return self._stored.read_chunk(key, chunk)


class GatheredBuffer:
    """A buffer that data-parallel rank 0 has gathered and stored: ``dp_zero_gather_scatter``.

    Its buckets stand one after another in one tensor per slot, without the padding at their ends.
    The tensors are in an object of the file, so that reading any of them reads all of it.

    Args:
        load: function that reads the object: slot -> tensor, and ``numel_unpadded``, the number of
            elements.
        dtype: dtype of the parameters in the model.
        bucket_size: a bucket is closed when it has as many elements; None for one bucket.

    Raises:
        ValueError: if a tensor does not have the number of elements that is stored with it.
    """

    shows_order = False

    def __init__(
        self,
        load: Callable[[], Mapping[str, Any]],
        dtype: str,
        bucket_size: int | None,
    ):
        self._load = load
        self.dtype = dtype
        self._bucket_size = bucket_size
        content = load()
        slots = {}
        sizes = {}
        for slot, value in content.items():
            if isinstance(value, torch.Tensor):
                slots[slot] = value.dtype
                sizes[slot] = tuple(value.shape)
        self.slots: Mapping[str, torch.dtype] = slots
        self.numel = int(content["numel_unpadded"])
        if set(sizes.values()) != {(self.numel,)}:
            raise ValueError(
                f"the tensors of a buffer are {sizes}, expected {self.numel} elements for each"
            )

    def locate(self, shards: Sequence[ParameterShard]) -> list[BufferLocation]:
        """Find where each shard begins, by following Megatron-Core's rules for closing a bucket.

        With a bucket size of 150 and four shards of 100, 30, 60 and 20 elements (in the order of
        the buffer), the first two are at 0 to 100 and 128 to 158, which closes the bucket. The next
        bucket begins at 158: its shards are at 158 to 218 and, 64 elements after its beginning, at
        222 to 242.

        Raises:
            LayoutMismatchError: if they do not fill the buffer.
        """
        locations = []
        bucket_start = end = 0  # both from the beginning of the tensor
        for shard in reversed(shards):  # the order of the buffer is that of the backward pass
            start = bucket_start + _aligned(end - bucket_start)
            end = start + shard.numel
            locations.append(BufferLocation(0, start))
            is_full = self._bucket_size is not None and end - bucket_start >= self._bucket_size
            if shard.has_own_bucket or is_full:
                bucket_start = end
        if end != self.numel:
            raise LayoutMismatchError(f"the parameters fill {end} of its {self.numel} elements")
        return locations[::-1]

    def read(
        self,
        slot: str,
        location: BufferLocation,
        start: int,
        stop: int,
    ) -> torch.Tensor:
        """Read elements of a shard as :meth:`OptimizerBuffer.read` does.

        Args:
            slot: slot of the optimizer.
            location: offset of the shard's first element in the tensor.
            start: first element that is read, counted from the start of the shard.
            stop: end of the elements that are read, counted likewise.
        """
        tensor: torch.Tensor = self._load()[slot]
        first = location.offset + start
        last = location.offset + stop
        return tensor[first:last].clone()


def sharded_buffers(
    stored: StoredCheckpoint,
    keys: Mapping[str, OptimizerKey],
) -> dict[OptimizerOfRank, list[ShardedBuffer]]:
    """Find the buffers of a ``dp_reshardable`` file among the keys of its optimizer."""
    buckets_of: dict[tuple[OptimizerOfRank, int, str], dict[int, dict[str, str]]] = {}
    for key, parsed in keys.items():
        if isinstance(parsed, BucketKey):
            position = (parsed.owner, parsed.buffer, parsed.dtype)
            buckets = buckets_of.setdefault(position, {})
            keys_of_bucket = buckets.setdefault(parsed.bucket, {})
            keys_of_bucket[parsed.slot] = key
    found: dict[OptimizerOfRank, list[ShardedBuffer]] = defaultdict(list)
    for owner, buffer, dtype in sorted(buckets_of):
        buckets = buckets_of[owner, buffer, dtype]
        in_order = [buckets[number] for number in sorted(buckets)]
        found[owner].append(ShardedBuffer(stored, dtype, in_order))
    return dict(found)


def check_bucket_sizes(
    stored: StoredCheckpoint,
    buffers: Mapping[OptimizerOfRank, list[ShardedBuffer]],
    keys: Mapping[OptimizerOfRank, str],
) -> None:
    """Compare the buckets with the sizes that each rank has stored.

    Args:
        stored: the checkpoint.
        buffers: the buffers of each rank.
        keys: key of each rank's object ``per_bucket_numel_unpadded``.

    Raises:
        ValueError: if they differ.
    """
    for owner, key in keys.items():
        expected = []
        for sizes_of_dtypes in read_sharded_object(stored, key):
            expected += [list(sizes) for sizes in sizes_of_dtypes.values()]
        actual = []
        for buffer in buffers.get(owner, []):
            actual.append(buffer.lengths)
        if expected != actual:
            raise ValueError(
                f"the buckets should have {expected} elements by {key}, but they have {actual}"
            )


def gathered_buffers(
    stored: StoredCheckpoint,
    keys: Mapping[OptimizerOfRank, str],
    args: Namespace | None,
) -> dict[OptimizerOfRank, list[GatheredBuffer]]:
    """Find the buffers of a ``dp_zero_gather_scatter`` file, reading each object for its sizes.

    Args:
        stored: the checkpoint.
        keys: keys of each rank's object ``param_state``.
        args: arguments of the run that wrote the file; where buckets end follows from them.

    Raises:
        ValueError: for objects of early releases, which store buckets one by one.
    """
    tensor_parallel_size = getattr(args, "tensor_model_parallel_size", None) or 1
    pipeline_parallel_size = getattr(args, "pipeline_model_parallel_size", None) or 1

    # One whole parameter is read from the objects of all its tensor-parallel ranks.
    @functools.lru_cache(maxsize=tensor_parallel_size)
    def load_object(key: str) -> Any:
        return read_sharded_object(stored, key)

    def loader(
        key: str,
        number: int,
        dtypes: tuple[Any, Any],
    ) -> Callable[[], Any]:
        return lambda: load_object(key)[number][dtypes]

    found: dict[OptimizerOfRank, list[GatheredBuffer]] = {}
    for (chain, rank), key in keys.items():
        content = load_object(key)
        if not isinstance(content, dict) or not content.get("buckets_coalesced"):
            raise ValueError(
                f"{key} is not {{'buckets_coalesced': True, number: {{dtypes: tensors}}}}"
            )
        num_ranks = sum(other == chain for other, _ in keys)
        is_first_stage = rank < num_ranks // pipeline_parallel_size
        buffers = found.setdefault((chain, rank), [])
        for number in sorted(name for name in content if isinstance(name, int)):
            for dtypes in content[number]:
                dtype = str(dtypes[0])
                # Later model chunks have one bucket: their reductions are not on the critical path.
                is_first_chunk = all(buffer.dtype != dtype for buffer in buffers)
                bucket_size = None
                if is_first_stage and is_first_chunk:
                    bucket_size = _bucket_size(args)
                load = loader(key, number, dtypes)
                buffers.append(GatheredBuffer(load, dtype, bucket_size))
    return found


def _bucket_size(args: Namespace | None) -> int | None:
    """Return the number of elements at which Megatron-LM closes a bucket; None for one bucket."""
    if not getattr(args, "overlap_grad_reduce", False):
        return None
    if getattr(args, "ddp_num_buckets", None):
        raise ValueError(
            "dp_zero_gather_scatter of a run with --ddp-num-buckets: where its buckets end is not"
            " known"
        )
    asked: int | None = getattr(args, "ddp_bucket_size", None)
    return asked or max(40_000_000, 1_000_000 * getattr(args, "data_parallel_size", 1))

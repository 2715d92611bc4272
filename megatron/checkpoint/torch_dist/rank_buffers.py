# SPDX-License-Identifier: Apache-2.0
"""The buffers of every model-parallel rank in a file of a layout by rank, in the rank's order."""

from __future__ import annotations

import argparse
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist import optimizer_keys
from megatron.checkpoint.torch_dist.optimizer_buffers import GatheredBuffer, ShardedBuffer
from megatron.checkpoint.torch_dist.optimizer_keys import BucketKey, OptimizerOfRank
from megatron.checkpoint.torch_dist.sharded_objects import read_sharded_object


def sharded_buffers(
    stored: StoredCheckpoint, keys: Iterable[str]
) -> dict[OptimizerOfRank, list[ShardedBuffer]]:
    """Find the buffers of a ``dp_reshardable`` file.

    Args:
        stored: the checkpoint.
        keys: of the optimizer; those that are not of buckets are ignored.
    """
    buckets_of: dict[tuple[OptimizerOfRank, int, str], dict[int, dict[str, str]]] = {}
    for key in keys:
        parsed = optimizer_keys.parse(key)
        if isinstance(parsed, BucketKey):
            buckets = buckets_of.setdefault((parsed.owner, parsed.buffer, parsed.dtype), {})
            buckets.setdefault(parsed.bucket, {})[parsed.slot] = key
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
    """Compare the buckets with the sizes that each rank has stored beside them.

    Args:
        stored: the checkpoint.
        buffers: of each rank.
        keys: of each rank's object ``per_bucket_numel_unpadded``.

    Raises:
        ValueError: if they differ.
    """
    for owner, key in keys.items():
        expected: list[list[int]] = []
        for sizes_of_dtypes in read_sharded_object(stored, key):
            expected += map(list, sizes_of_dtypes.values())
        actual = [buffer.lengths for buffer in buffers.get(owner, [])]
        if expected != actual:
            raise ValueError(
                f"{key} says that the buckets have {expected} elements, but they have {actual}"
            )


def gathered_buffers(
    stored: StoredCheckpoint,
    keys: Mapping[OptimizerOfRank, str],
    args: argparse.Namespace | None,
) -> dict[OptimizerOfRank, list[GatheredBuffer]]:
    """Find the buffers of a ``dp_zero_gather_scatter`` file, reading each object for its sizes.

    Args:
        stored: the checkpoint.
        keys: of each rank's object ``param_state``.
        args: of the run that wrote the file. They say where buckets end.

    Raises:
        ValueError: for objects of early releases, which store buckets one by one.
    """
    tensor_parallel_size = getattr(args, "tensor_model_parallel_size", None) or 1
    pipeline_parallel_size = getattr(args, "pipeline_model_parallel_size", None) or 1
    bucket_size_of_run = functools.partial(
        _bucket_size,
        overlaps=getattr(args, "overlap_grad_reduce", False),
        num_buckets=getattr(args, "ddp_num_buckets", None),
        asked=getattr(args, "ddp_bucket_size", None),
        data_parallel_size=getattr(args, "data_parallel_size", 1),
    )

    # One whole parameter is read from the objects of all its tensor-parallel ranks.
    @functools.lru_cache(maxsize=tensor_parallel_size)
    def load(key: str) -> Any:
        return read_sharded_object(stored, key)

    found: dict[OptimizerOfRank, list[GatheredBuffer]] = {}
    for (chain, rank), key in keys.items():
        content = load(key)
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
                bucket_size = bucket_size_of_run() if is_first_stage and is_first_chunk else None
                read = functools.partial(_tensors_of_buffer, load, key, number, dtypes)
                buffers.append(GatheredBuffer(read, dtype, bucket_size))
    return found


def _tensors_of_buffer(load: Any, key: str, number: int, dtypes: tuple[Any, Any]) -> Any:
    return load(key)[number][dtypes]


def _bucket_size(
    *, overlaps: bool, num_buckets: int | None, asked: int | None, data_parallel_size: int
) -> int | None:
    """Return the number of elements at which Megatron-LM closes a bucket; None for one bucket.

    Args:
        overlaps: the run reduces gradients during backward.
        num_buckets: the run's --ddp-num-buckets.
        asked: the run's --ddp-bucket-size, in elements.
        data_parallel_size: number of data-parallel ranks of the run.

    Raises:
        ValueError: with ``num_buckets``.
    """
    if not overlaps:
        return None
    if num_buckets:
        raise ValueError(
            "dp_zero_gather_scatter of a run with --ddp-num-buckets: where its buckets end is not"
            " known"
        )
    return asked or max(40_000_000, 1_000_000 * data_parallel_size)

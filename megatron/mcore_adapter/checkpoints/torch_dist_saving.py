# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's saves and loads of torch_dist: their strategies, and files written by threads.

[Note: files written by threads] Megatron-Core collects the results of a save in a queue of a
separate process (``multiprocessing.Manager``). When the rank is killed, that process stays for
ever, and a job that is restarted many times fills the memory of its machine. Release 0.16 also
forks a process for each file: if such a fork is killed, the save waits for its result until the
watch ends the job. A rank that waits for its own save needs neither: here its threads write, and
the queue is in the rank. Later releases write in threads too, but report the type of an error
without its text.
"""

from __future__ import annotations

import argparse
import os
import queue
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints.saved_state import StateDict

Structure = list[tuple[Any, ...]]
"""Keys and layouts of the entries of a rank, see :func:`structure_of`."""

_PROBE_BYTES = 1 << 20
"""Bytes that are written to find out whether a disk is full."""

_WRITING = ("write_preloaded_data_multithread", "write_preloaded_data_multiproc")
"""Names of the method that writes, in release 0.17 and newer, and in 0.16."""


class SaveStrategies:
    """The strategy of the last save.

    With --ckpt-assume-constant-structure the next save uses it again, with the plans that it has
    kept, if every rank has the same entries as before. Megatron-Core itself does not compare them,
    and would write a changed structure by the old plan.
    """

    def __init__(self) -> None:
        self._strategy: Any = None
        self._structure: Structure = []

    def strategy(self, args: argparse.Namespace, content: StateDict) -> Any:
        """Return the strategy of a save of content in Megatron-Core's sharded form; a collective.

        With ``args.ckpt_fully_parallel_save`` ranks that have the same tensors share their writing;
        otherwise the first of these ranks writes them.
        """
        if not args.ckpt_assume_constant_structure:
            return _new_strategy(args)
        structure = structure_of(content)
        is_kept = self._strategy is not None and structure == self._structure
        if agree([] if is_kept else ["changed"]):
            self._strategy = _new_strategy(args)
        self._structure = structure
        return self._strategy

    def forget(self) -> None:
        """Forget the strategy, after a save that failed."""
        self._strategy = None


def _new_strategy(args: argparse.Namespace) -> Any:
    strategy = get_default_save_sharded_strategy("torch_dist")
    strategy.use_cached_ckpt_structure = args.ckpt_assume_constant_structure
    if not args.ckpt_fully_parallel_save:
        return strategy
    return FullyParallelSaveStrategyWrapper(
        strategy,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        do_cache_distribution=args.ckpt_assume_constant_structure,
    )


class LoadStrategy(TorchDistLoadShardedStrategy):
    """Megatron-Core's load, changed to list the tensors of a file with torch 2.15 too."""

    def load_tensors_metadata(
        self,
        checkpoint_dir: Path,
        metadata: Metadata,
    ) -> dict[str, ShardedTensor]:
        """Return the tensors of a checkpoint, without their elements."""
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                # Megatron-Core (0.16 to 0.19) passes all fields to torch.empty, which has no
                # argument for this one, new in torch 2.15.
                vars(entry.properties).pop("strides", None)
        return super().load_tensors_metadata(checkpoint_dir, metadata)


def load_strategy(args: argparse.Namespace) -> Any:
    """Return the strategy of a load.

    With ``args.ckpt_fully_parallel_load``, one of the data-parallel ranks that need the same tensor
    reads it and sends it to the others.
    """
    strategy = LoadStrategy()
    if not args.ckpt_fully_parallel_load:
        return strategy
    return FullyParallelLoadStrategyWrapper(
        strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
    )


def error_of_disk(error: Exception, folder: Path) -> Exception:
    """Return the error of the disk that has caused an error of torch's writer of archives.

    torch reports positions in the file ("unexpected pos 64 vs 0"). If torch has opened the file
    itself, the error of the disk is lost, and a write to ``folder`` is tried to get it again.
    """
    if "inline_container" not in str(error):
        return error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as found:
        return OSError(found.errno, found.strerror, str(folder))
    return error


def structure_of(content: StateDict) -> Structure:
    """Return key, dtype, shapes and offsets of every entry of this rank, without its content."""
    structure: Structure = []
    for value in nested_values(content):
        if isinstance(value, ShardedTensor):
            structure.append(
                (
                    value.key,
                    value.dtype,
                    tuple(value.local_shape),
                    tuple(value.global_shape),
                    tuple(value.global_offset),
                    value.flattened_range,
                    value.replica_id,
                )
            )
        elif isinstance(value, ShardedObject):
            structure.append((value.unique_key, value.replica_id))
    return structure


@contextmanager
def written_by_threads() -> Iterator[None]:
    """Replace Megatron-Core's method that writes files by :func:`write_in_threads`."""
    results = filesystem_async._results_queue
    name = next(method for method in _WRITING if method in vars(FileSystemWriterAsync))
    writing = vars(FileSystemWriterAsync)[name]
    # Private, but all releases use the queue that is there before they make one.
    filesystem_async._results_queue = queue.Queue()
    setattr(FileSystemWriterAsync, name, staticmethod(write_in_threads))
    try:
        yield
    finally:
        filesystem_async._results_queue = results
        setattr(FileSystemWriterAsync, name, writing)


def write_in_threads(
    transforms: list[Any],
    use_msc: bool,
    rank: int,
    buckets: list[Any],
    results: queue.Queue[Any],
) -> None:
    """Write files as Megatron-Core's method with these parameters does, without forks.

    Args:
        transforms: changes of the bytes before they are written.
        use_msc: True to write by the multi-storage client.
        rank: rank of this process; not used.
        buckets: path and content of each file.
        results: queue for the results of all files by their numbers, or for the first error.
    """

    def write(number: int) -> Any:
        answers: queue.Queue[Any] = queue.Queue()
        working: queue.Queue[int] = queue.Queue()
        working.put(number)  # the method removes it at its end
        FileSystemWriterAsync.write_preloaded_data(
            transforms,
            local_proc_idx=number,
            write_bucket=buckets[number],
            results_queue=answers,
            count_queue=working,
            use_fsync=True,
            use_msc=use_msc,
        )
        return answers.get_nowait()[1]

    with ThreadPoolExecutor(max(len(buckets), 1)) as threads:
        written = list(threads.map(write, range(len(buckets))))
    for bucket, result in zip(buckets, written):
        if isinstance(result, Exception):
            results.put(error_of_disk(result, Path(bucket[0]).parent))
            return
    results.put(dict(enumerate(written)))

# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a dataset: which samples each rank reads, in which order."""

import argparse
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.mcore_adapter.run.errors import RunError

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


@contextmanager
def batches(
    args: argparse.Namespace,
    dataset: Any,
    consumed_samples: int,
) -> Iterator[Any]:
    """Open this rank's microbatches of a data set.

    Every model chunk has its own iterator, as virtual stages read the same microbatches at
    different times. The iterators are closed at the end: after an error their frames would keep the
    workers of the data loader alive, and the exit of the program would wait for them.

    Args:
        args: arguments of the run.
        dataset: samples as GPTDataset returns them.
        consumed_samples: position at which to start, in samples of all ranks.

    Yields:
        An iterator, or a list with one for each virtual stage.
    """
    with ExitStack() as stack:
        iterators = []
        for _ in range(args.virtual_pipeline_model_parallel_size or 1):
            sampler = MicrobatchSampler(
                num_samples=len(dataset),
                consumed_samples=consumed_samples,
                micro_batch_size=args.micro_batch_size,
                rank=parallel_state.get_data_parallel_rank(),
                num_ranks=args.data_parallel_size,
                shuffle_seed=args.seed if args.dataloader_type == "cyclic" else None,
            )
            iterator = build_iterator(dataset, sampler, args.seed, args.num_workers)
            iterators.append(stack.enter_context(closing(iterator)))
        yield one_or_list(iterators)


def one_or_list(items: list[Any]) -> Any:
    """Return the only item, or the list of several, as schedules expect model chunks."""
    if len(items) == 1:
        return items[0]
    return items


class MicrobatchSampler:
    """The sample indices of one rank's microbatches, in reading order.

    All ranks together read one sequence of samples, from which they take microbatches in turns.
    Microbatch m of rank r has the `micro_batch_size` samples from position `consumed_samples +
    (m * num_ranks + r) * micro_batch_size` on. So a run that resumes on another number of ranks
    sees the same global batches. For example, with `micro_batch_size` 2 and 2 ranks, rank 1 reads
    positions 2 and 3, then 6 and 7, then 10 and 11.

    Args:
        num_samples: length of the dataset.
        consumed_samples: position in the sequence at which to start.
        micro_batch_size: samples per microbatch.
        rank: this data-parallel rank.
        num_ranks: number of data-parallel ranks.
        shuffle_seed: None for one pass in the dataset's order; a number for endless epochs, each
            with a permutation that follows from the seed and the number of the epoch.

    Raises:
        ValueError: the dataset is empty.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        rank: int,
        num_ranks: int,
        shuffle_seed: int | None,
    ) -> None:
        if not num_samples:
            raise ValueError("the dataset is empty")
        self.num_samples = num_samples
        self.consumed_samples = consumed_samples
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._num_ranks = num_ranks
        self._shuffle_seed = shuffle_seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        stride = self._micro_batch_size * self._num_ranks
        start = self.consumed_samples
        # A last stride that is not full would leave ranks with different numbers of microbatches.
        while self._shuffle_seed is not None or start + stride <= self.num_samples:
            first = start + self._rank * self._micro_batch_size
            positions = range(first, first + self._micro_batch_size)
            yield [self._sample_at(position) for position in positions]
            start += stride

    def _sample_at(self, position: int) -> int:
        if self._shuffle_seed is None:
            return position
        epoch, offset = divmod(position, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._shuffle_seed + epoch)
            self._permutation = torch.randperm(self.num_samples, generator=generator)
            self._epoch = epoch
        return int(self._permutation[offset])


def build_iterator(
    dataset: Dataset,
    sampler: MicrobatchSampler,
    seed: int,
    num_workers: int,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Iterate over the microbatches of a sampler.

    Worker processes change neither the order nor any random state.

    Args:
        dataset: a map-style dataset of samples as GPTDataset gives them.
        sampler: the samples of this rank's microbatches.
        seed: seed of the loader's own generator.
        num_workers: number of loader processes; 0 reads in this process.

    Yields:
        Dictionaries of `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each
        of shape `[micro_batch_size, seq_length]`, and, if the dataset has it, `attention_mask`
        (bool, `[micro_batch_size, 1, seq_length, seq_length]`, True where attention is forbidden).
        With CUDA they are in pinned memory.

    Raises:
        RunError: the samples are used up.
    """
    yield from DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_collate,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_ignore_signals,
        # Its own generator: otherwise starting the loader draws from the global one, and dropout
        # would differ between a run that stopped and resumed and one that did not.
        generator=torch.Generator().manual_seed(seed),
    )
    raise RunError(
        f"the data is used up: the dataset has {sampler.num_samples} samples and this run began"
        f" after {sampler.consumed_samples}; train for fewer iterations, give more data, or use"
        " --dataloader-type cyclic"
    )


def _ignore_signals(worker: int) -> None:
    """Make a loader process outlive signals that go to the whole process group.

    The run still needs its data while it finishes the step and saves; then it ends the process.
    """
    signal.set_wakeup_fd(-1)  # otherwise the run would get the signal as one to itself
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    # Blended datasets add the number of the dataset to each sample; a model has no use for it.
    batch = {}
    for name in BATCH_KEYS:
        if name in samples[0]:
            batch[name] = default_collate([sample[name] for sample in samples])
    return batch

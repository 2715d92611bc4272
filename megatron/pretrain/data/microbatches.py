# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a dataset: which samples each rank reads, in which order."""

import argparse
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.pretrain.errors import RunError
from megatron.pretrain.ranks import data_parallel_rank, data_parallel_size

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


@contextmanager
def batches(args: argparse.Namespace, dataset: Any, consumed_samples: int) -> Iterator[Any]:
    """Open this rank's microbatches of ``dataset``, from ``consumed_samples`` on.

    Every model chunk has an iterator of its own, as virtual stages read the same microbatches at
    different times. The iterators are closed at the end: after an error their frames would keep the
    workers of the data loader alive, and the exit of the program would wait for them.
    """
    with ExitStack() as stack:
        iterators = []
        for _ in range(args.virtual_pipeline_model_parallel_size or 1):
            iterator = build_iterator(
                dataset,
                micro_batch_size=args.micro_batch_size,
                dataloader_type=args.dataloader_type,
                seed=args.seed,
                num_workers=args.num_workers,
                consumed_samples=consumed_samples,
                data_parallel_rank=data_parallel_rank(),
                data_parallel_size=data_parallel_size(),
            )
            iterators.append(stack.enter_context(closing(iterator)))
        yield one_or_list(iterators)


def one_or_list(items: list[Any]) -> Any:
    """Return the only item, or the list of several, as schedules expect model chunks."""
    return items[0] if len(items) == 1 else items


def build_iterator(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    dataloader_type: str | None,
    seed: int,
    num_workers: int,
    consumed_samples: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Iterate over this rank's microbatches, from the sample after `consumed_samples` on.

    All ranks together read one sequence of samples; see `MicrobatchSampler` for its order. Worker
    processes change neither the order nor any random state.

    Args:
        dataset: a map-style dataset of samples as GPTDataset gives them.
        micro_batch_size: samples in a microbatch.
        dataloader_type: single (or None) reads the dataset in its order until it ends; cyclic reads
            it for ever, shuffled anew in every epoch.
        seed: decides the order of cyclic reading.
        num_workers: number of loader processes; 0 reads in this process.
        consumed_samples: samples of the sequence that all ranks together have used before.
        data_parallel_rank: this rank among those that read different samples.
        data_parallel_size: number of ranks that read different samples.

    Returns:
        Dictionaries of `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each
        of shape `[micro_batch_size, seq_length]`, and, if the dataset has it, `attention_mask`
        (bool, `[micro_batch_size, 1, seq_length, seq_length]`, True where attention is forbidden).
        With CUDA they are in pinned memory. A single pass ends in a RunError.

    Raises:
        ValueError: a number is out of range, the dataset is empty, or the `dataloader_type` is
            unknown.
        NotImplementedError: `dataloader_type` is external.
    """
    num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no length
    sampler = MicrobatchSampler(
        num_samples=num_samples,
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        rank=data_parallel_rank,
        num_ranks=data_parallel_size,
        shuffle_seed=seed if dataloader_type == "cyclic" else None,
    )
    _check(dataloader_type, sampler)
    loader = DataLoader(
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
    return _until_exhausted(iter(loader), num_samples, consumed_samples)


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
        self.num_samples = num_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.num_ranks = num_ranks
        self.shuffle_seed = shuffle_seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.micro_batch_size * self.num_ranks
        start = self.consumed_samples
        # A last stride that is not full would leave ranks with different numbers of microbatches.
        while self.shuffle_seed is not None or start + stride <= self.num_samples:
            first = start + self.rank * self.micro_batch_size
            positions = range(first, first + self.micro_batch_size)
            yield [self._sample_at(position) for position in positions]
            start += stride

    def _sample_at(self, position: int) -> int:
        if self.shuffle_seed is None:
            return position
        epoch, offset = divmod(position, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.shuffle_seed + epoch)
            self._permutation = torch.randperm(self.num_samples, generator=generator)
            self._epoch = epoch
        return int(self._permutation[offset])


def _check(dataloader_type: str | None, sampler: MicrobatchSampler) -> None:
    """Refuse arguments of `build_iterator` that are out of range."""
    if dataloader_type == "external":
        raise NotImplementedError(
            "--dataloader-type external: pass your own iterator to the training loop instead"
        )
    problems = []
    if dataloader_type not in (None, "single", "cyclic"):
        problems.append(f"--dataloader-type expects single or cyclic, but got {dataloader_type}")
    if sampler.consumed_samples < 0:
        problems.append(
            f"consumed_samples expects a number from 0 on, but got {sampler.consumed_samples}"
        )
    if sampler.micro_batch_size < 1:
        problems.append(
            f"--micro-batch-size expects a positive number, but got {sampler.micro_batch_size}"
        )
    if not 0 <= sampler.rank < sampler.num_ranks:
        problems.append(
            f"data_parallel_rank expects 0 to {sampler.num_ranks - 1}, but got {sampler.rank}"
        )
    if sampler.num_samples == 0:
        problems.append("the dataset is empty")
    if problems:
        raise ValueError("; ".join(problems))


def _ignore_signals(worker: int) -> None:
    """Make a loader process outlive signals that go to the whole process group.

    The run still needs its data while it finishes the step and saves; then it ends the process.
    """
    signal.set_wakeup_fd(-1)  # the run's own, which would take the signal for one to itself
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    # Blended datasets add the number of the dataset to each sample; a model has no use for it.
    return default_collate([_batch_entries(sample) for sample in samples])


def _batch_entries(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: sample[key] for key in BATCH_KEYS if key in sample}


def _until_exhausted(
    batches: Iterator[dict[str, torch.Tensor]], num_samples: int, consumed_samples: int
) -> Generator[dict[str, torch.Tensor], None, None]:
    yield from batches
    raise RunError(
        f"the data is used up: the dataset has {num_samples} samples and this run began after"
        f" {consumed_samples}; train for fewer iterations, give more data, or use --dataloader-type"
        " cyclic"
    )

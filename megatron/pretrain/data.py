# SPDX-License-Identifier: Apache-2.0
"""Training data: Megatron-Core's GPT datasets from the command line, and iterators over their microbatches."""

import argparse
import logging
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.pretrain.corpus import standard_library_corpus
from megatron.pretrain.errors import RunError
from megatron.pretrain.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_SPLIT = "969,30,1"
DEFAULT_CORPUS_DIRECTORY = "data"
SPLIT_NAMES = ("training", "validation", "test")
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")

Blend = tuple[list[str], list[float] | None]
Bookends = tuple[float, float]
Result = TypeVar("Result")


@dataclass
class DataSource:
    """Where the samples come from: one blend cut by `bookends`, a blend per split, or neither (mock data).

    `bookends[i]` is the part of the documents, between 0 and 1, that split i (training, validation,
    test) takes, None for a split that is not built.
    """

    bookends: list[Bookends | None]
    split: str | None = None
    blend: Blend | None = None
    blend_per_split: list[Blend | None] | None = None


def build_datasets(
    args: argparse.Namespace, tokenizer: Tokenizer
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Build the training, validation and test datasets; None for one that is not wanted or has no documents.

    Every rank calls it and gets the same datasets. Rank 0 checks the data, writes the default
    corpus where no data is named, and builds the index caches that the other ranks then read, so
    all ranks must see the same file system.

    Args:
        args: one of `mock_data`, `data_path` (cut by `split`), or `train_data_path`,
            `valid_data_path` and `test_data_path`; without any, the Python standard library, in
            `data_cache_path` or the folder "data".
        tokenizer: must be the one the data was written with.

    Raises:
        ValueError: the data is missing, contradictory or too small; the same on every rank.
        OSError: the default corpus cannot be written; the same on every rank.
    """
    sizes = wanted_samples(args)
    if not any(sizes):
        return None, None, None
    source = _on_rank_zero(lambda: _find_source(args, tokenizer, sizes))
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=source.blend,
        blend_per_split=source.blend_per_split,
        split=source.split if source.blend else None,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    if source.blend_per_split is None:
        # The config derives these from the split alone (from a fixed one for mock data). A split
        # without documents must not be built: the number of epochs is found by adding its tokens up
        # until there are enough.
        config.split_matrix = source.bookends
        config.split = source.split
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(
        dataset_class, list(sizes), lambda: True, config
    ).build()
    return train, valid, test


def wanted_samples(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return how many samples the run takes from the training, validation and test data.

    Args:
        args: `train_samples` or `train_iters`, `global_batch_size`, `eval_iters` and
            `eval_interval` (None: never).
    """
    batch, eval_iters = args.global_batch_size, args.eval_iters or 0
    train = (
        args.train_samples if args.train_samples is not None else (args.train_iters or 0) * batch
    )
    iterations = args.train_iters if args.train_iters is not None else train // batch
    evaluations = iterations // args.eval_interval + 1 if args.eval_interval else 0
    return train, evaluations * eval_iters * batch, eval_iters * batch


def build_iterator(
    dataset: Dataset,
    args: argparse.Namespace,
    *,
    consumed_samples: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Iterate over this rank's microbatches, from the sample after `consumed_samples` on.

    All ranks together read one sequence of samples: microbatch m of rank r takes the
    `micro_batch_size` samples from position `consumed_samples + (m * data_parallel_size + r) *
    micro_batch_size` on. So a run that resumes on another number of ranks sees the same global
    batches. Worker processes change neither the order nor any random state.

    Args:
        dataset: a map-style dataset of samples as GPTDataset gives them.
        args: `micro_batch_size`, `num_workers` (0: read in this process), `seed` and
            `dataloader_type`: single (or None), in the dataset's order until it ends; cyclic, for
                ever, shuffled anew in every epoch.
        consumed_samples: number of samples of the sequence that were used before, by all ranks
            together.

    Returns:
        Dictionaries of `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each
        of shape `[micro_batch_size, seq_length]`, and, where the dataset makes it, `attention_mask`
        (bool, `[micro_batch_size, 1, seq_length, seq_length]`, True where attention is forbidden).
        In pinned memory where there is CUDA. A single pass that has used all samples up raises
        RunError.

    Raises:
        ValueError: a number out of range, an empty dataset, or an unknown `dataloader_type`.
        NotImplementedError: `dataloader_type` is external.
    """
    _check_iterator(dataset, args, consumed_samples, data_parallel_rank, data_parallel_size)
    sampler = MicrobatchSampler(
        num_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=args.micro_batch_size,
        rank=data_parallel_rank,
        num_ranks=data_parallel_size,
        shuffle_seed=args.seed if args.dataloader_type == "cyclic" else None,
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_collate,
        num_workers=args.num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_outlive_termination,
        # Its own generator: otherwise starting the loader draws from the global one, and dropout
        # would differ between a run that stopped and resumed and one that did not.
        generator=torch.Generator().manual_seed(args.seed),
    )
    return _until_exhausted(iter(loader), len(dataset), consumed_samples)


def _outlive_termination(worker: int) -> None:
    """SIGTERM goes to the whole process group; the run still needs its data while it ends in order and saves."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class MicrobatchSampler:
    """Yields the sample indices of one rank's microbatches; see `build_iterator` for the order.

    Args:
        num_samples: length of the dataset.
        consumed_samples: position in the sequence at which to start.
        micro_batch_size: samples per microbatch.
        rank, num_ranks: this data-parallel rank, and how many there are.
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
            yield [
                self._sample_at(position)
                for position in range(first, first + self.micro_batch_size)
            ]
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


def parse_blend(values: Sequence[str]) -> Blend:
    """Read a data path: prefixes, or pairs of weight and prefix.

    Returns:
        The prefixes and their weights, None where no weights are given.

    Raises:
        ValueError: weights on some prefixes only, or a weight that is not positive.
    """
    prefixes = [value.strip() for value in values]
    weights = [_as_number(value) for value in prefixes[::2]]
    if len(values) % 2 or all(weight is None for weight in weights):
        return prefixes, None
    numbers = [weight for weight in weights if weight is not None and 0 < weight < float("inf")]
    if len(numbers) < len(weights):
        raise ValueError(
            "a data path expects prefixes, or a positive weight before every prefix, but got"
            f" {' '.join(values)}"
        )
    return prefixes[1::2], numbers


def _on_rank_zero(action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and give its result, or raise its error, on every rank."""
    if not torch.distributed.is_initialized():
        return action()
    outcome: list[Result | Exception | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [action()]
        except (ValueError, OSError) as error:
            outcome = [error]
        except (
            Exception
        ) as error:  # the others wait, whatever went wrong; not every error can be pickled
            outcome = [RunError(f"{type(error).__name__}: {error}")]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return cast(Result, outcome[0])


def _find_source(
    args: argparse.Namespace, tokenizer: Tokenizer, sizes: Sequence[int]
) -> DataSource:
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    problems = _source_problems(args, per_split)
    if problems:
        raise ValueError("; ".join(problems))
    if any(per_split):
        whole: Bookends = (0.0, 1.0)
        blends = [
            parse_blend(values) if values and size else None
            for values, size in zip(per_split, sizes)
        ]
        source = DataSource([whole if blend else None for blend in blends], blend_per_split=blends)
        if sizes[0] and blends[0] is None:
            raise ValueError(
                "--valid-data-path and --test-data-path need --train-data-path too, or"
                " --train-iters 0"
            )
    else:
        split = args.split or ("1,1,1" if args.mock_data else DEFAULT_SPLIT)
        source = DataSource(_bookends(split, sizes), split)
        if not args.mock_data:
            directory = args.data_cache_path or DEFAULT_CORPUS_DIRECTORY
            source.blend = parse_blend(
                args.data_path or [standard_library_corpus(directory, tokenizer)]
            )
    _drop_or_refuse_empty_splits(source)
    return source


def _source_problems(args: argparse.Namespace, per_split: Sequence[list[str] | None]) -> list[str]:
    sources = {
        "--mock-data": bool(args.mock_data),
        "--data-path": bool(args.data_path),
        "--train-data-path, --valid-data-path, --test-data-path": any(per_split),
    }
    problems = []
    if sum(sources.values()) > 1:
        given = " and ".join(flag for flag, value in sources.items() if value)
        problems.append(f"only one source of data can be used, but got {given}")
    if any(per_split) and args.split is not None:
        problems.append("--split cuts --data-path; leave it out where every split has its own path")
    if args.reset_attention_mask and not args.create_attention_mask_in_dataloader:
        problems.append(
            "--reset-attention-mask has no effect with --no-create-attention-mask-in-dataloader"
        )
    return problems


def _bookends(split: str, sizes: Sequence[int]) -> list[Bookends | None]:
    weights = [_as_number(part) for part in split.split(",")]
    valid = [weight for weight in weights if weight is not None and 0 <= weight < float("inf")]
    if len(valid) < len(weights) or len(weights) > len(SPLIT_NAMES) or sum(valid) == 0:
        raise ValueError(
            f"--split expects up to three weights such as {DEFAULT_SPLIT} (training, validation,"
            f" test), but got {split}"
        )
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    if sizes[0] and matrix[0] is None:
        raise ValueError(f"--split {split} leaves nothing to train on")
    return [ends if size else None for ends, size in zip(matrix, sizes)]


def _drop_or_refuse_empty_splits(source: DataSource) -> None:
    """Check that every split that will be built has tokens in every dataset of its blend.

    An empty test split is dropped with a warning: small corpora have no thousandth part, and nobody
    asked for it.

    Raises:
        ValueError: listing the datasets that do not exist, or else the splits without documents.
    """
    blends = source.blend_per_split or [source.blend] * len(SPLIT_NAMES)
    prefixes = sorted(
        {
            prefix
            for blend, ends in zip(blends, source.bookends)
            if blend and ends
            for prefix in blend[0]
        }
    )
    missing = [prefix for prefix in prefixes if not IndexedDataset.exists(prefix)]
    if missing:
        raise ValueError(
            "no dataset at "
            + ", ".join(f"{prefix} (expects {prefix}.bin and {prefix}.idx)" for prefix in missing)
            + "; tools/preprocess_data.py makes one from text"
        )
    lengths = {prefix: _document_lengths(prefix) for prefix in prefixes}
    problems = []
    for i, (name, blend, ends) in enumerate(zip(SPLIT_NAMES, blends, source.bookends)):
        if blend is None or ends is None:
            continue
        for prefix in blend[0]:
            # The same rounding as the builder's, which cuts by document.
            first, last = (round(end * len(lengths[prefix])) for end in ends)
            if lengths[prefix][first:last].sum() == 0:
                total = len(lengths[prefix])
                problem = (
                    f"the {name} split of {prefix} is empty: it gets {last - first} of {total}"
                    " documents"
                )
                if name == "test":
                    logger.warning("%s; there will be no test", problem)
                    source.bookends[i] = None
                    if source.blend_per_split is not None:
                        source.blend_per_split[i] = None
                else:
                    problems.append(problem)
    if problems:
        raise ValueError(
            "; ".join(problems) + f"; give more documents or another --split than {source.split}"
        )


def _document_lengths(prefix: str) -> np.ndarray:
    dataset = IndexedDataset(prefix)
    # A copy: the lengths lie in the mapped index file, and the mapping ends with the dataset
    # object.
    return dataset.sequence_lengths.copy()


def _check_iterator(
    dataset: Dataset, args: argparse.Namespace, consumed_samples: int, rank: int, num_ranks: int
) -> None:
    if args.dataloader_type == "external":
        raise NotImplementedError(
            "--dataloader-type external: pass your own iterator to the training loop instead"
        )
    problems = []
    if args.dataloader_type not in (None, "single", "cyclic"):
        problems.append(
            f"--dataloader-type expects single or cyclic, but got {args.dataloader_type}"
        )
    if consumed_samples < 0:
        problems.append(f"consumed_samples expects a number from 0 on, but got {consumed_samples}")
    if args.micro_batch_size < 1:
        problems.append(
            f"--micro-batch-size expects a positive number, but got {args.micro_batch_size}"
        )
    if not 0 <= rank < num_ranks:
        problems.append(f"data_parallel_rank expects 0 to {num_ranks - 1}, but got {rank}")
    if len(dataset) == 0:
        problems.append("the dataset is empty")
    if problems:
        raise ValueError("; ".join(problems))


def _collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    # Blended datasets add the number of the dataset to each sample; a model has no use for it.
    return default_collate(
        [{key: sample[key] for key in BATCH_KEYS if key in sample} for sample in samples]
    )


def _until_exhausted(
    batches: Iterator[dict[str, torch.Tensor]], num_samples: int, consumed_samples: int
) -> Generator[dict[str, torch.Tensor], None, None]:
    yield from batches
    raise RunError(
        f"the data is used up: the dataset has {num_samples} samples and this run began after"
        f" {consumed_samples}; train for fewer iterations, give more data, or use --dataloader-type"
        " cyclic"
    )


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

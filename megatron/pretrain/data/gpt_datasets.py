# SPDX-License-Identifier: Apache-2.0
"""Training data: Megatron-Core's GPT datasets, built from the files that the command line names."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch.utils.data import Dataset

from megatron.checkpoint.core.listing import some
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.first_rank import on_first_rank
from megatron.pretrain.data.corpus import standard_library_corpus
from megatron.pretrain.data.dataset_files import check_samples
from megatron.pretrain.data.splits import (
    DEFAULT_SPLIT,
    Blend,
    Bookends,
    DataSource,
    Sizes,
    check_splits,
    check_weights,
    parse_blend,
)
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizer_record import check_records, record_path
from megatron.pretrain.data.tokenizers import Tokenizer

DEFAULT_CORPUS_DIRECTORY = "data"
BuildDatasets = Callable[[argparse.Namespace, Tokenizer, DataSource | None], tuple[Any, Any, Any]]
"""A function like :func:`build_datasets`."""


def find_data(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    sizes: Sizes | None = None,
) -> DataSource | None:
    """Find the source of the data and check its files, before a run begins.

    A collective that returns the same on every rank, and None for a run without samples. Rank 0
    checks the data, and writes the default corpus if no data is named. All ranks must see the same
    file system. The tokenizer must be the one the data was written with.

    Data is named by one of `mock_data`, `data_path` (cut by `split`), or `train_data_path`,
    `valid_data_path` and `test_data_path`; without any, it is the Python standard library, in
    `data_cache_path` or the folder "data".

    Args:
        args: arguments of the run.
        tokenizer: tokenizer that the data was written with.
        sizes: samples of each split; without it those of :func:`wanted_samples`.

    Raises:
        ValueError: the data is missing, damaged or too small; the same on every rank.
        OSError: the data cannot be read, or the default corpus be written; the same on every rank.
    """
    sizes = sizes or wanted_samples(args)
    if not any(size != 0 for size in sizes):
        return None
    return on_first_rank(lambda: _find_source(args, tokenizer, sizes))


def wanted_samples(args: argparse.Namespace) -> Sizes:
    """Return how many samples the run takes from the training, validation and test data."""
    evaluation = (args.eval_iters or 0) * args.global_batch_size
    iterations = args.train_iters or 0
    train = iterations * args.global_batch_size
    if args.train_samples is not None:
        train = args.train_samples
        if args.train_iters is None:
            iterations = train // args.global_batch_size
    num_evaluations = 0
    if args.eval_interval:
        num_evaluations = iterations // args.eval_interval + 1
    return train, num_evaluations * evaluation, evaluation


def build_datasets(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    source: DataSource | None = None,
) -> tuple[Dataset | None, Dataset | list[Dataset] | None, Dataset | None]:
    """Build the training, validation and test datasets.

    A collective that returns the same datasets on every rank, and None for a split that is not
    wanted or has no documents; of several validation sets a list, where Megatron-LM's loop asks for
    it. Rank 0 builds the index caches that the other ranks then read.

    Args:
        args: arguments of the run.
        tokenizer: tokenizer that the data was written with.
        source: result of `find_data`, which is called without it, and may raise.
    """
    if find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise RunError("Megatron-Core's dataset functions are not compiled: install its wheel")
    if source is None:
        source = find_data(args, tokenizer)
    if source is None:
        return None, None, None
    settings = {}
    for declared in fields(GPTDatasetConfig):
        if declared.init and hasattr(args, declared.name):
            settings[declared.name] = getattr(args, declared.name)
    settings |= {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": source.blend,
        "blend_per_split": source.blend_per_split,
        "split": source.split if source.blend else None,
        "path_to_cache": source.cache,
        "tokenizer": tokenizer,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
    }
    config = GPTDatasetConfig(**settings)
    if source.blend_per_split is None:
        # The config derives these from the split alone (from a fixed one for mock data). A split
        # without documents must not be built: the number of epochs is found by adding its tokens up
        # until there are enough.
        config.split_matrix = source.bookends
        config.split = source.split
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    with damage_named(source):
        train, valid, test = BlendedMegatronDatasetBuilder(
            dataset_class, list(source.sizes), lambda: True, config
        ).build()
    if not args.mock_data:
        datasets = [train]
        datasets += valid if isinstance(valid, list) else [valid]
        datasets.append(test)
        on_first_rank(lambda: _check_caches(datasets))
    return train, valid, test


@contextmanager
def damage_named(source: DataSource) -> Iterator[None]:
    """Name the damaged index caches of the data where datasets cannot be made from them.

    Raises:
        ValueError: instead of the error that the first of them causes, which may not name it.
    """
    try:
        yield
    except (ValueError, OSError, EOFError) as error:
        damaged = []
        for folder in source.cache_folders():
            for path in sorted(folder.glob("**/*.npy")):
                if _is_cut(path):
                    damaged.append(path)
        if not damaged:
            raise
        raise ValueError(
            f"index caches in {damaged[0].parent} are cut off or damaged, as a kill leaves them:"
            f" {some([path.name for path in damaged])}; remove them ({error})"
        ) from error


def _is_cut(path: Path) -> bool:
    try:
        np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        return True
    return False


def _check_caches(datasets: Sequence[Dataset | None]) -> None:
    """Check that the index caches from which datasets were made are of the same data.

    Raises:
        ValueError: names the folder of the caches of another dataset.
    """
    for dataset in datasets:
        for part in getattr(dataset, "datasets", [dataset]):
            if not isinstance(part, GPTDataset):
                continue
            try:
                check_samples(
                    lengths=part.dataset.sequence_lengths,
                    split=part.indices,
                    documents=part.document_index,
                    samples=part.sample_index,
                    order=part.shuffle_index,
                    sequence_length=part.config.sequence_length,
                )
            except ValueError as error:
                raise ValueError(
                    f"the index cache of {part.dataset.path_prefix} in {part.config.path_to_cache}"
                    f" is of other data, or damaged: {error}; remove it"
                ) from error


def _find_source(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    sizes: Sizes,
) -> DataSource:
    """Return the checked source of the data, writing the default corpus if none is named."""
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if any(per_split):
        blends: list[Blend | None] = []
        bookends: list[Bookends | None] = []
        for values, size in zip(per_split, sizes):
            if values and size != 0:
                blends.append(parse_blend(values))
                bookends.append((0.0, 1.0))
            else:
                blends.append(None)
                bookends.append(None)
        source = DataSource(bookends, blend_per_split=blends)
    else:
        split = "1,1,1" if args.mock_data else DEFAULT_SPLIT
        if args.split:
            split = args.split
        source = DataSource(_bookends(split, sizes), split)
        if not args.mock_data:
            directory = args.data_cache_path or DEFAULT_CORPUS_DIRECTORY
            source.blend = parse_blend(
                args.data_path or [standard_library_corpus(directory, tokenizer)]
            )
    prefixes = source.prefixes()
    if any(record_path(prefix).is_file() for prefix in prefixes):
        check_records(prefixes, TokenizerChoice.of(args), tokenizer)
    source.lines = check_splits(source, tokenizer.vocab_size)
    source.cache = args.data_cache_path
    source.sizes = sizes
    for folder in source.cache_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{folder} cannot be made ({error}): give --data-cache-path") from error
    return source


def _bookends(split: str, sizes: Sizes) -> list[Bookends | None]:
    """Return the part of the documents for every split; None for one whose size is 0.

    For example, "80,20,0" is [(0.0, 0.8), (0.8, 1.0), None].
    """
    check_weights(split)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    if sizes[0] and matrix[0] is None:
        raise ValueError(f"--split {split} leaves nothing to train on")
    return [ends if size != 0 else None for ends, size in zip(matrix, sizes)]

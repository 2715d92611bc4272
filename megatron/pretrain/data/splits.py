# SPDX-License-Identifier: Apache-2.0
"""The splits of the data: which documents are for training, validation and test."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.pretrain.data.dataset_files import checked_lengths

logger = logging.getLogger(__name__)

SPLIT_NAMES = ("training", "validation", "test")
DEFAULT_SPLIT = "969,30,1"
WEIGHT = re.compile(r"[0-9]{1,18}\.?[0-9]*|\.[0-9]+")
"""Numbers that Megatron-Core reads as they are meant: not negative, infinite or NaN."""

Blend = tuple[list[str], list[float] | None]
Bookends = tuple[float, float]
MANY = 4
"""The most data sets of a split that are described in one line each."""


def parse_blend(values: Sequence[str]) -> Blend:
    """Read a data path: prefixes, or pairs of weight and prefix.

    Returns:
        The prefixes and their weights, None if no weights are given.

    Raises:
        ValueError: weights on some prefixes only, or a weight that is not positive.
    """
    words = [value.strip() for value in values]
    weights = [_as_number(word) for word in words[::2]]
    if len(words) % 2 or weights.count(None) == len(weights):
        return words, None
    numbers = []
    for weight in weights:
        if weight is None or not 0 < weight < float("inf"):
            raise ValueError(
                "a data path expects prefixes, or a positive weight before every prefix, but got"
                f" {' '.join(values)}"
            )
        numbers.append(weight)
    return words[1::2], numbers


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


Sizes = tuple[int, int | None, int]
"""Samples of the training, validation and test data; None for one epoch, each sample once."""


@dataclass
class DataSource:
    """The source of the samples: a blend of datasets, a blend per split, or neither (mock data)."""

    bookends: list[Bookends | None]
    """The part of the documents that each split (training, validation, test) takes: its first and
    last point between 0 and 1, None for a split that is not built."""
    split: str | None = None
    blend: Blend | None = None
    blend_per_split: list[Blend | None] | None = None
    cache: str | None = None
    """The folder of index caches; None for Megatron-Core's default, next to each dataset."""
    sizes: Sizes = (0, 0, 0)
    lines: list[str] = field(default_factory=list)
    """Lines for the log about the documents of each split."""

    def blends(self) -> list[Blend | None]:
        """Return the blend of each split, None for a split that is not built and for mock data."""
        blends = self.blend_per_split or [self.blend] * len(SPLIT_NAMES)
        return [blend if ends else None for blend, ends in zip(blends, self.bookends)]

    def prefixes(self) -> list[str]:
        """Return the prefixes of all datasets that are read, sorted."""
        prefixes: set[str] = set()
        for blend in self.blends():
            if blend is not None:
                prefixes.update(blend[0])
        return sorted(prefixes)

    def cache_folders(self) -> list[Path]:
        """Return the folders of index caches; none for mock data."""
        prefixes = self.prefixes()
        if prefixes and self.cache is not None:
            return [Path(self.cache)]
        return [Path(prefix, "cache") for prefix in prefixes]


def check_weights(split: str) -> None:
    """Check the weights of the splits, such as "969,30,1".

    Raises:
        ValueError: if they are not up to three numbers, some of them positive.
    """
    weights = []
    for part in split.split(","):
        if WEIGHT.fullmatch(part.strip()):
            weights.append(float(part))
    num_parts = split.count(",") + 1
    if len(weights) < num_parts or num_parts > len(SPLIT_NAMES) or sum(weights) == 0:
        raise ValueError(
            f"--split expects up to three weights such as {DEFAULT_SPLIT} (training, validation,"
            f" test), but got {split}"
        )


def check_splits(source: DataSource, vocab_size: int) -> list[str]:
    """Check that every split that will be built has tokens in every dataset of its blend.

    A small split is read several times. An empty test split is dropped with a warning, as small
    corpora have no thousandth part, which is its default.

    Returns:
        Lines for the log about the documents of each split.

    Raises:
        ValueError: lists the datasets that do not exist, or that are damaged, or else the splits
            without documents.
    """
    lengths = _lengths_of_documents(source.prefixes(), vocab_size)
    problems = []
    blends = source.blends()
    for number, name in enumerate(SPLIT_NAMES):
        blend = blends[number]
        ends = source.bookends[number]
        if blend is None or ends is None:
            continue
        for prefix in blend[0]:
            num_documents, num_tokens = _share(lengths[prefix], ends)
            if num_tokens:
                continue
            problem = (
                f"the {name} split of {prefix} is empty: it gets {num_documents} of"
                f" {len(lengths[prefix])} documents"
            )
            if name != "test":
                problems.append(problem)
                continue
            logger.warning("%s; there will be no test, for which give more documents", problem)
            source.bookends[number] = None
            if source.blend_per_split is not None:
                source.blend_per_split[number] = None
    if problems:
        raise ValueError(
            "; ".join(problems) + f"; give more documents or another --split than {source.split}"
        )
    return _described(source, lengths)


def _share(lengths: np.ndarray, ends: Bookends) -> tuple[int, int]:
    """Return the numbers of documents and tokens of a split of one dataset.

    Megatron-Core's builder cuts by document and rounds in this way.
    """
    start, end = ends
    first = round(start * len(lengths))
    last = round(end * len(lengths))
    return last - first, int(lengths[first:last].sum())


def _described(source: DataSource, lengths: dict[str, np.ndarray]) -> list[str]:
    """Return a line for each split and dataset, and a single one for a split of many datasets."""
    lines = []
    for name, blend, ends in zip(SPLIT_NAMES, source.blends(), source.bookends):
        if blend is None or ends is None:
            continue
        prefixes, weights = blend
        lines_of_datasets = []
        all_documents = 0
        all_tokens = 0
        for number, prefix in enumerate(prefixes):
            documents, tokens = _share(lengths[prefix], ends)
            all_documents += documents
            all_tokens += tokens
            line = (
                f"{name}: {documents:,} of {len(lengths[prefix]):,} documents of {prefix},"
                f" {tokens:,} tokens"
            )
            if weights:
                line += f", weight {weights[number]:g}"
            lines_of_datasets.append(line)
        if len(prefixes) > MANY:
            lines.append(
                f"{name}: {all_documents:,} documents of {len(prefixes)} data sets,"
                f" {all_tokens:,} tokens"
            )
        else:
            lines += lines_of_datasets
    return lines


def _lengths_of_documents(prefixes: list[str], vocab_size: int) -> dict[str, np.ndarray]:
    """Return the numbers of tokens of all documents, by the prefix of their dataset."""
    missing = []
    for prefix in prefixes:
        if not IndexedDataset.exists(prefix):
            missing.append(f"{prefix} (expects {prefix}.bin and {prefix}.idx)")
    if missing:
        raise ValueError(
            f"no dataset at {', '.join(missing)}; tools/preprocess_data.py makes one from text"
        )
    lengths = {}
    damage = []
    for prefix in prefixes:
        try:
            lengths[prefix] = checked_lengths(prefix, vocab_size)
        except ValueError as error:
            damage.append(str(error))
    if damage:
        raise ValueError("the data is damaged:\n  " + "\n  ".join(damage))
    return lengths

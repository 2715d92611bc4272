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
"""Data sets of a split up to which each is described in a line of its own."""


def parse_blend(values: Sequence[str]) -> Blend:
    """Read a data path: prefixes, or pairs of weight and prefix.

    Returns:
        The prefixes and their weights, None if no weights are given.

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
    """The folder of index caches; None for Megatron-Core's own, beside each dataset."""
    sizes: Sizes = (0, 0, 0)
    lines: list[str] = field(default_factory=list)
    """For the log: what each split gets."""

    def blends(self) -> list[Blend | None]:
        """Return the blend of each split, None for a split that is not built and for mock data."""
        blends = self.blend_per_split or [self.blend] * len(SPLIT_NAMES)
        return [blend if ends else None for blend, ends in zip(blends, self.bookends)]

    def prefixes(self) -> list[str]:
        """Return the prefixes of all datasets that are read, sorted."""
        prefixes: set[str] = set()
        for blend in self.blends():
            prefixes.update(blend[0] if blend else ())
        return sorted(prefixes)

    def cache_folders(self) -> list[Path]:
        """Return the folders of index caches; none for mock data."""
        prefixes = self.prefixes()
        if self.cache is not None:
            return [Path(self.cache)] if prefixes else []
        return [Path(prefix, "cache") for prefix in prefixes]


def check_weights(split: str) -> None:
    """Check the weights of the splits, such as "969,30,1".

    Raises:
        ValueError: if they are not up to three numbers that say how to divide the documents.
    """
    parts = [part.strip() for part in split.split(",")]
    are_weights = all(WEIGHT.fullmatch(part) for part in parts)
    if not are_weights or len(parts) > len(SPLIT_NAMES) or sum(map(float, parts)) == 0:
        raise ValueError(
            f"--split expects up to three weights such as {DEFAULT_SPLIT} (training, validation,"
            f" test), but got {split}"
        )


def check_splits(source: DataSource, vocab_size: int) -> list[str]:
    """Check that every split that will be built has tokens in every dataset of its blend.

    A small split is read several times. An empty test split is dropped with a warning, as small
    corpora have no thousandth part, which is its default.

    Returns:
        Lines that say which documents each split gets.

    Raises:
        ValueError: lists the datasets that do not exist, or that are damaged, or else the splits
            without documents.
    """
    lengths = _lengths_of_documents(source.prefixes(), vocab_size)
    problems = []
    for i, (name, blend, ends) in enumerate(zip(SPLIT_NAMES, source.blends(), source.bookends)):
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
            source.bookends[i] = None
            if source.blend_per_split is not None:
                source.blend_per_split[i] = None
    if problems:
        raise ValueError(
            "; ".join(problems) + f"; give more documents or another --split than {source.split}"
        )
    return _described(source, lengths)


def _share(lengths: np.ndarray, ends: Bookends) -> tuple[int, int]:
    """Return the numbers of documents and tokens of a split of one dataset.

    Megatron-Core's builder cuts by document and rounds in this way.
    """
    first, last = (round(end * len(lengths)) for end in ends)
    return last - first, int(lengths[first:last].sum())


def _described(source: DataSource, lengths: dict[str, np.ndarray]) -> list[str]:
    """Return a line for each split and dataset; for a split of many datasets it is one."""
    lines = []
    for name, blend, ends in zip(SPLIT_NAMES, source.blends(), source.bookends):
        if blend is None or ends is None:
            continue
        prefixes, weights = blend
        shares = [_share(lengths[prefix], ends) for prefix in prefixes]
        if len(prefixes) > MANY:
            documents, tokens = (sum(numbers) for numbers in zip(*shares))
            lines.append(
                f"{name}: {documents:,} documents of {len(prefixes)} data sets, {tokens:,} tokens"
            )
            continue
        for number, (prefix, (documents, tokens)) in enumerate(zip(prefixes, shares)):
            weight = f", weight {weights[number]:g}" if weights else ""
            lines.append(
                f"{name}: {documents:,} of {len(lengths[prefix]):,} documents of {prefix},"
                f" {tokens:,} tokens{weight}"
            )
    return lines


def _lengths_of_documents(prefixes: list[str], vocab_size: int) -> dict[str, np.ndarray]:
    """Return the numbers of tokens of all documents, by the prefix of their dataset."""
    missing = [prefix for prefix in prefixes if not IndexedDataset.exists(prefix)]
    if missing:
        raise ValueError(
            "no dataset at "
            + ", ".join(f"{prefix} (expects {prefix}.bin and {prefix}.idx)" for prefix in missing)
            + "; tools/preprocess_data.py makes one from text"
        )
    lengths, damage = {}, []
    for prefix in prefixes:
        try:
            lengths[prefix] = checked_lengths(prefix, vocab_size)
        except ValueError as error:
            damage.append(str(error))
    if damage:
        raise ValueError("the data is damaged:\n  " + "\n  ".join(damage))
    return lengths

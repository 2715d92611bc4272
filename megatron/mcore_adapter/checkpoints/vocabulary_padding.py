# SPDX-License-Identifier: Apache-2.0
"""Padding rows of the vocabulary, whose number may differ between a file and the model.

Embedding and output layer have one row for each token of the vocabulary, and rows of padding that
make their number divisible. Runs with other layouts or another divisor have other numbers of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.key_rules import VOCABULARY
from megatron.checkpoint.core.spelling import plain_name
from megatron.checkpoint.fsdp_dtensor.keys import STATE_PREFIX
from megatron.fsdp.dtensor.uneven_dtensor import dtensor_over
from megatron.fsdp.engine.collectives import agree


class VocabularyEntry(NamedTuple):
    """A tensor with one row per token in a dict, and its rows in the model and in the file."""

    entries: dict[str, DTensor]
    name: str
    rows: int
    rows_in_file: int


@dataclass(frozen=True)
class VocabularyArguments:
    """The arguments of a run that say how many rows its vocabulary has; None is not known."""

    vocab_size: int | None = None
    tokenizer_type: str | None = None
    make_vocab_size_divisible_by: int = 1
    tensor_model_parallel_size: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace | None) -> VocabularyArguments:
        """Take the fields from ``args``; those that it lacks keep their defaults."""
        names = [field.name for field in fields(cls) if hasattr(args, field.name)]
        return cls(**{name: getattr(args, name) for name in names})


def fit_padding(
    content: dict[str, Any],
    stored: Mapping[str, STORAGE_TYPES],
    arguments: VocabularyArguments,
    read_saved_arguments: Callable[[], VocabularyArguments],
) -> None:
    """Give entries of ``content`` the number of rows of the file, if only the padding differs.

    What they ask for are still the rows of this rank. Rows that the file does not have are not
    read, and are not changed. A collective.

    Args:
        content: what will be loaded, nested; changed in place.
        stored: metadata of the file's entries, by key.
        arguments: those of this run.
        read_saved_arguments: reads those of the run that wrote the file; a collective.
    """
    entries = vocabulary_entries(content, stored)
    padded = [entry for entry in entries if entry.rows != entry.rows_in_file]
    if not agree(entry.name for entry in padded):
        return
    saved_arguments = read_saved_arguments()
    for entry in padded:
        here = least_vocabulary(entry.rows, arguments)
        there = least_vocabulary(entry.rows_in_file, saved_arguments)
        if max(here, there) <= min(entry.rows, entry.rows_in_file):
            value = entry.entries[entry.name]
            shape = (entry.rows_in_file, *value.shape[1:])
            entry.entries[entry.name] = dtensor_over(
                value._local_tensor, value.device_mesh, value.placements, shape
            )


def vocabulary_entries(
    content: dict[str, Any], stored: Mapping[str, STORAGE_TYPES]
) -> Iterator[VocabularyEntry]:
    """Yield the entries of the model and the optimizer with one row a token that the file has."""
    model = content["model"]
    candidates = [("model.", model, name) for name in model if plain_name(name) in VOCABULARY]
    for name, slots in content.get("optimizer", {}).get("state", {}).items():
        if plain_name(name) in VOCABULARY:
            candidates += [(f"{STATE_PREFIX}{name}.", slots, slot) for slot in slots]
    for start, entries, name in candidates:
        entry = stored.get(start + name)
        if isinstance(entry, TensorStorageMetadata) and isinstance(entries[name], DTensor):
            yield VocabularyEntry(entries, name, entries[name].shape[0], entry.size[0])


def least_vocabulary(rows: int, arguments: VocabularyArguments) -> int:
    """Return the smallest vocabulary for which a run with ``arguments`` would make ``rows`` rows.

    If nothing is known about the run, that is one token a row.
    """
    if arguments.vocab_size is not None:
        # Its end of document lies beyond the vocabulary.
        return arguments.vocab_size + (arguments.tokenizer_type == "NullTokenizer")
    # Example: rows are a multiple of 128 * 2 = 256. A vocabulary of 257 to 512 tokens makes 512.
    multiple = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    return rows - multiple + 1

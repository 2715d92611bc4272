# SPDX-License-Identifier: Apache-2.0
"""Padding rows of the vocabulary, whose number may differ between a file and the model.

Embedding and output layer have one row for each token of the vocabulary, and padding rows that make
the total divisible by a divisor. Runs with another layout or divisor have another number of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.key_rules import VOCABULARY
from megatron.checkpoint.core.spelling import plain_name
from megatron.checkpoint.fsdp_dtensor.keys import STATE_PREFIX
from megatron.fsdp.dtensor.uneven_dtensor import dtensor_over
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints.saved_state import StateDict


class VocabularyEntry(NamedTuple):
    """A tensor with one row for each token.

    Attributes:
        entries: dict of the content that contains it.
        name: its key there.
        rows: number of rows in the model.
        rows_in_file: number of rows in the file.
    """

    entries: dict[str, DTensor]
    name: str
    rows: int
    rows_in_file: int


@dataclass(frozen=True)
class VocabularyArguments:
    """The arguments of a run that determine the rows of its vocabulary.

    Attributes:
        vocab_size: number of tokens; None if it is not known.
        tokenizer_type: type of the tokenizer; None if it is not known.
        make_vocab_size_divisible_by: divisor of the rows of each tensor-parallel rank.
        tensor_model_parallel_size: number of tensor-parallel ranks.
    """

    vocab_size: int | None = None
    tokenizer_type: str | None = None
    make_vocab_size_divisible_by: int = 1
    tensor_model_parallel_size: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace | None) -> VocabularyArguments:
        """Take the fields from ``args``; those that it lacks keep their defaults."""
        names = []
        for field in fields(cls):
            if hasattr(args, field.name):
                names.append(field.name)
        return cls(**{name: getattr(args, name) for name in names})


def fit_padding(
    content: StateDict,
    stored: Mapping[str, STORAGE_TYPES],
    arguments: VocabularyArguments,
    read_saved_arguments: Callable[[], VocabularyArguments],
) -> None:
    """Give entries of ``content`` the number of rows of the file, if only the padding differs.

    They still request the rows of this rank. Rows that the file lacks are not read, and keep their
    values. A collective.

    Args:
        content: nested state that will be loaded; changed in place.
        stored: metadata of the file's entries, by key.
        arguments: arguments of this run.
        read_saved_arguments: reads those of the run that wrote the file; a collective.
    """
    padded = []
    for entry in vocabulary_entries(content, stored):
        if entry.rows != entry.rows_in_file:
            padded.append(entry)
    if not agree(entry.name for entry in padded):
        return
    saved_arguments = read_saved_arguments()
    for entry in padded:
        num_tokens = least_vocabulary(entry.rows, arguments)
        num_saved_tokens = least_vocabulary(entry.rows_in_file, saved_arguments)
        if max(num_tokens, num_saved_tokens) <= min(entry.rows, entry.rows_in_file):
            value = entry.entries[entry.name]
            entry.entries[entry.name] = dtensor_over(
                value._local_tensor,
                value.device_mesh,
                value.placements,
                (entry.rows_in_file, *value.shape[1:]),
            )


def vocabulary_entries(
    content: StateDict,
    stored: Mapping[str, STORAGE_TYPES],
) -> Iterator[VocabularyEntry]:
    """Yield the entries of the model and the optimizer with one row a token that the file has."""
    for name in content["model"]:
        if plain_name(name) in VOCABULARY:
            yield from _entry_in_file(content["model"], name, stored.get(f"model.{name}"))
    for name, slots in content.get("optimizer", {}).get("state", {}).items():
        if plain_name(name) in VOCABULARY:
            for slot in slots:
                yield from _entry_in_file(slots, slot, stored.get(f"{STATE_PREFIX}{name}.{slot}"))


def _entry_in_file(
    entries: StateDict,
    name: str,
    metadata: STORAGE_TYPES | None,
) -> Iterator[VocabularyEntry]:
    value = entries[name]
    if isinstance(metadata, TensorStorageMetadata) and isinstance(value, DTensor):
        yield VocabularyEntry(entries, name, value.shape[0], metadata.size[0])


def least_vocabulary(rows: int, arguments: VocabularyArguments) -> int:
    """Return the smallest vocabulary for which a run with ``arguments`` would make ``rows`` rows.

    With the defaults of :class:`VocabularyArguments` there is one token a row.
    """
    if arguments.vocab_size is not None:
        # The end-of-document token of NullTokenizer comes after the vocabulary.
        return arguments.vocab_size + (arguments.tokenizer_type == "NullTokenizer")
    # Example: rows are a multiple of 128 * 2 = 256. A vocabulary of 257 to 512 tokens makes 512.
    multiple = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    return rows - multiple + 1

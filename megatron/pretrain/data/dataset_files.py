# SPDX-License-Identifier: Apache-2.0
"""The two files of an indexed dataset, checked against each other and against the vocabulary.

`<prefix>.bin` has the tokens. `<prefix>.idx` has a header, then the number of tokens of every
sequence (int32), its first byte in the other file (int64), and the number of sequences before each
document and in all (int64). Megatron-Core trusts both: a negative length makes it hang, and a wrong
offset or token fails in mid-run, or trains on other text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.checkpoint.store import durable

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the tokens' dtype, numbers of sequences and of document bounds."""
TOKEN_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code in the header -> dtype of the tokens."""
CODE_BYTE = 17
"""Position of that code."""

BLOCK = 1 << 20
"""Entries of the index that are compared at once."""
SAMPLES = 256
"""Parts of a large `.bin` whose tokens are read."""
SAMPLE_TOKENS = 1 << 14
"""Tokens of each of these parts."""


def checked_lengths(prefix: str, vocab_size: int) -> np.ndarray:
    """Return the lengths of all sequences of a dataset, after everything was checked.

    All of the index is read, and of the tokens 4 million at most: in a larger file 256 parts,
    evenly spaced, the first and the last among them.

    Args:
        prefix: path of the dataset without suffixes.
        vocab_size: tokens are from 0 to below it.

    Raises:
        ValueError: names the file and the position of the first damage.
        OSError: a file cannot be read.
    """
    index = _read_index(Path(f"{prefix}.idx"))
    data = Path(f"{prefix}.bin")
    num_bytes = _check_sequences(index)
    _check_bounds(index)
    if data.stat().st_size != num_bytes:
        raise ValueError(
            f"{data}: it has {data.stat().st_size} bytes, but the sequences of {index.path} take"
            f" {num_bytes}"
        )
    if not num_bytes:
        raise ValueError(f"{data}: it has no tokens")
    _check_tokens(np.memmap(data, index.dtype, mode="r"), data, vocab_size)
    return np.array(index.lengths)


@dataclass(frozen=True)
class DatasetIndex:
    """The content of an index file, mapped."""

    path: Path
    dtype: np.dtype
    """Dtype of the tokens."""
    lengths: np.memmap
    """Tokens of every sequence."""
    offsets: np.memmap
    """First byte of every sequence in the file of tokens."""
    bounds: np.memmap
    """Number of sequences before each document, and in all."""

    def position(self, array: np.memmap, number: int) -> str:
        """Name the entry of one of the arrays, in words."""
        kind = "document bound" if array is self.bounds else "sequence"
        return f"{self.path}: {kind} {number} (byte {array.offset + number * array.itemsize})"


def _read_index(path: Path) -> DatasetIndex:
    """Map an index file, whose size must follow from its header."""
    size = path.stat().st_size
    with durable.opened(durable.file_at(path)) as file:
        header = file.read(HEADER.size)
    if not header.startswith(MAGIC[: len(header)]) or not header:
        raise ValueError(f"{path}: no index of a dataset: it begins with {header[:9]!r}")
    if len(header) < HEADER.size:
        raise ValueError(f"{path}: cut off: {size} bytes, of which the header takes {HEADER.size}")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != 1 or code not in TOKEN_DTYPES:
        raise ValueError(
            f"{path}: version {version} (byte 9) with tokens of type {code} (byte {CODE_BYTE}) is"
            f" unknown; version 1 has the types {', '.join(str(code) for code in TOKEN_DTYPES)}"
        )
    needed = HEADER.size + num_sequences * 12 + num_bounds * 8
    # Datasets of text and images have one more byte for each sequence, its kind.
    if size not in (needed, needed + num_sequences):
        raise ValueError(
            f"{path}: it has {size} bytes, but its {num_sequences} sequences and {num_bounds}"
            f" document bounds (bytes 18 to {HEADER.size - 1}) take {needed}"
        )
    if not num_sequences or not num_bounds:
        raise ValueError(f"{path}: it has no sequences")

    def mapped(
        dtype: str,
        start: int,
        count: int,
    ) -> np.memmap:
        return np.memmap(path, dtype, mode="r", offset=start, shape=(count,))

    return DatasetIndex(
        path,
        dtype=np.dtype(TOKEN_DTYPES[code]),
        lengths=mapped("<i4", HEADER.size, num_sequences),
        offsets=mapped("<i8", HEADER.size + num_sequences * 4, num_sequences),
        bounds=mapped("<i8", HEADER.size + num_sequences * 12, num_bounds),
    )


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, BLOCK):
        yield slice(start, min(length, start + BLOCK))


def _check_sequences(index: DatasetIndex) -> int:
    """Check that every sequence begins where the one before it ends; return where the last does."""
    end = 0
    for block in _blocks(len(index.lengths)):
        lengths = index.lengths[block].astype(np.int64)
        negative = np.flatnonzero(lengths < 0)
        if negative.size:
            number = block.start + int(negative[0])
            raise ValueError(
                f"{index.position(index.lengths, number)} has the length {index.lengths[number]}"
            )
        ends = end + np.cumsum(lengths) * index.dtype.itemsize
        begins = ends - lengths * index.dtype.itemsize
        wrong = np.flatnonzero(index.offsets[block] != begins)
        if wrong.size:
            number = block.start + int(wrong[0])
            raise ValueError(
                f"{index.position(index.offsets, number)} begins at byte {index.offsets[number]} of"
                f" the tokens, but those before it end at {begins[wrong[0]]}"
            )
        end = int(ends[-1])
    return end


def _check_bounds(index: DatasetIndex) -> None:
    """Check that documents follow one another and cover all sequences."""
    bounds = index.bounds
    before = 0
    for block in _blocks(len(bounds)):
        values = np.concatenate([[before], bounds[block]])
        falling = np.flatnonzero(np.diff(values) < 0)
        if falling.size:
            number = block.start + int(falling[0])
            raise ValueError(
                f"{index.position(bounds, number)} is {bounds[number]}, less than"
                f" {values[falling[0]]} before it"
            )
        before = int(values[-1])
    last = len(bounds) - 1
    for name, number, expected in (("first", 0, 0), ("last", last, len(index.lengths))):
        if bounds[number] != expected:
            raise ValueError(
                f"{index.position(bounds, number)} is {bounds[number]}, not {expected}, though it"
                f" is the {name}"
            )


def _check_tokens(
    tokens: np.memmap,
    path: Path,
    vocab_size: int,
) -> None:
    """Check that a bounded number of tokens are ids of the vocabulary."""
    last = max(0, len(tokens) - SAMPLE_TOKENS)
    num_samples = min(SAMPLES, -(-len(tokens) // SAMPLE_TOKENS))
    for start in np.linspace(0, last, num_samples).astype(np.int64).tolist():
        values = tokens[start : start + SAMPLE_TOKENS]
        wrong = np.flatnonzero((values < 0) | (values >= vocab_size))
        if wrong.size:
            number = start + int(wrong[0])
            raise ValueError(
                f"{path}: token {number} (byte {number * tokens.itemsize}) is {tokens[number]}, but"
                f" the vocabulary has the ids 0 to {vocab_size - 1}: it was written with another"
                " tokenizer; give its --tokenizer-type and files"
            )


def check_samples(
    lengths: np.ndarray,
    split: np.ndarray,
    documents: np.ndarray,
    samples: np.ndarray,
    order: np.ndarray,
    sequence_length: int,
) -> None:
    """Check that cached positions of samples are those of this dataset.

    Caches are found by the name of a dataset, and may be of another one that had it before: reads
    would end in mid-run, or return other text.

    Args:
        lengths: lengths of the documents of the dataset.
        split: numbers of the documents that are used.
        documents: the same in the order of the training data, in several epochs several times.
        samples: place of the first document of every sample in `documents`, and the token at
            which it begins there; one more for the end of the last, `[samples + 1, 2]`.
        order: order in which samples are read.
        sequence_length: tokens from the beginning of a sample to that of the next one.

    Raises:
        ValueError: they are not.
    """
    if order.size and not 0 <= order.min() <= order.max() < len(samples) - 1:
        raise ValueError("it reads samples that it does not have")
    if len(documents) % len(split):
        raise ValueError(f"it has {len(documents)} documents, no multiple of {len(split)}")
    checked = 0
    end = 0
    for block in _blocks(len(documents)):
        numbers = documents[block]
        if not split[0] <= numbers.min() <= numbers.max() <= split[-1]:
            raise ValueError(f"it has documents other than {split[0]} to {split[-1]}")
        sizes = lengths[numbers].astype(np.int64)
        begins = end + np.cumsum(sizes) - sizes
        last = int(np.searchsorted(samples[:, 0], block.stop))
        places, tokens = samples[checked:last].T
        if places.size and not block.start <= places.min() <= places.max() < block.stop:
            raise ValueError("its samples are not in order")
        places = places - block.start
        # Every sample begins at a token of its document, and where the one before it ends.
        is_wrong = (tokens < 0) | ((tokens >= sizes[places]) & (tokens > 0))
        is_wrong |= begins[places] + tokens != np.arange(checked, last) * sequence_length
        if is_wrong.any():
            raise ValueError(f"its sample {checked + int(np.argmax(is_wrong))} begins elsewhere")
        checked = last
        end = int(begins[-1] + sizes[-1])
    if checked < len(samples):
        raise ValueError("its last samples are not inside of the documents")

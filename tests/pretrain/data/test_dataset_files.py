# SPDX-License-Identifier: Apache-2.0
"""Damage in the files of a dataset is found at start, and named with file and position."""

import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.pretrain import loop
from megatron.pretrain.data import dataset_files
from megatron.pretrain.data.dataset_files import checked_lengths
from tests.support.pretrain.training_runs import SMALL, error_of, refuse

LENGTHS = [40, 1, 0, 17, 30, 8]
VOCABULARY = 100
LENGTHS_AT, OFFSETS_AT, BOUNDS_AT = 34, 34 + 4 * 6, 34 + 12 * 6


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus")


def write(prefix: Path, dtype: type = np.uint16) -> Path:
    """Write six documents of tokens below the size of the vocabulary."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for number, length in enumerate(LENGTHS):
        builder.add_document((np.arange(length) + number) % VOCABULARY, [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def put(path: Path, position: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, position, value)
    path.write_bytes(data)


def message(prefix: Path, vocab_size: int = VOCABULARY) -> str:
    with pytest.raises(ValueError) as caught:
        checked_lengths(str(prefix), vocab_size)
    return str(caught.value).replace(f"{prefix}", "corpus")


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_a_sound_dataset_has_its_lengths(dtype: type, tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", dtype)
    assert checked_lengths(str(prefix), VOCABULARY).tolist() == LENGTHS


INDEX: list[tuple[str, int, str, int, str]] = [
    ("magic", 0, "<B", 7, "no index of a dataset"),
    ("version", 9, "<Q", 2, "version 2 (byte 9) with tokens of type 8 (byte 17) is unknown"),
    ("floats", 17, "<B", 7, "tokens of type 7 (byte 17) is unknown"),
    ("no_dtype", 17, "<B", 99, "tokens of type 99 (byte 17) is unknown"),
    ("more", 18, "<Q", 2**60, "it has 162 bytes, but its 1152921504606846976 sequences"),
    ("none", 18, "<Q", 0, "it has 162 bytes, but its 0 sequences"),
    ("negative", LENGTHS_AT + 12, "<i", -17, "sequence 3 (byte 46) has the length -17"),
    (
        "longer",
        LENGTHS_AT + 4,
        "<i",
        2,
        "sequence 2 (byte 74) begins at byte 82 of the tokens, but",
    ),
    ("last_longer", LENGTHS_AT + 20, "<i", 9, "corpus.bin: it has 192 bytes, but the sequences"),
    ("offset", OFFSETS_AT + 32, "<q", 118, "sequence 4 (byte 90) begins at byte 118 of the tokens"),
    (
        "behind",
        OFFSETS_AT + 40,
        "<q",
        2**50,
        "sequence 5 (byte 98) begins at byte 1125899906842624",
    ),
    ("before", OFFSETS_AT, "<q", -2, "sequence 0 (byte 58) begins at byte -2 of the tokens"),
    ("first_bound", BOUNDS_AT, "<q", 1, "document bound 0 (byte 106) is 1, not 0"),
    ("last_bound", BOUNDS_AT + 48, "<q", 9, "document bound 6 (byte 154) is 9, not 6"),
    ("falling_bound", BOUNDS_AT + 16, "<q", 0, "document bound 2 (byte 122) is 0, less than 1"),
]


@pytest.mark.parametrize(
    ("position", "form", "value", "words"),
    [row[1:] for row in INDEX],
    ids=[row[0] for row in INDEX],
)
@pytest.mark.parametrize("block", [2, 1 << 20])
def test_damage_of_the_index_is_named_with_its_position(
    block: int, position: int, form: str, value: int, words: str, prefix: Path
) -> None:
    put(Path(f"{prefix}.idx"), position, form, value)
    with patch.object(dataset_files, "BLOCK", block):
        found = message(prefix)
    assert words in found and found.startswith(("corpus.idx", "corpus.bin"))


def cut(suffix: str, num_bytes: int) -> Callable[[Path], object]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}{suffix}")
        path.write_bytes(path.read_bytes()[:num_bytes])

    return damage


def append_to_tokens(prefix: Path) -> None:
    with Path(f"{prefix}.bin").open("ab") as file:
        file.write(b"\0\0")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut(".idx", 0), "corpus.idx: no index of a dataset: it begins with b''"),
        (cut(".idx", 20), "corpus.idx: cut off: 20 bytes, of which the header takes 34"),
        (
            cut(".idx", 100),
            "corpus.idx: it has 100 bytes, but its 6 sequences and 7 document bound",
        ),
        (
            cut(".bin", 190),
            "corpus.bin: it has 190 bytes, but the sequences of corpus.idx take 192",
        ),
        (cut(".bin", 0), "corpus.bin: it has 0 bytes, but the sequences of corpus.idx take 192"),
        (
            append_to_tokens,
            "corpus.bin: it has 194 bytes, but the sequences of corpus.idx take 192",
        ),
    ],
    ids=["empty", "header_cut", "index_cut", "tokens_cut", "no_tokens", "more_tokens"],
)
def test_files_of_another_size_are_named(
    damage: Callable[[Path], object], words: str, prefix: Path
) -> None:
    damage(prefix)
    assert words in message(prefix)


@pytest.mark.exhaustive
def test_no_flipped_bit_before_the_documents_goes_unnoticed(prefix: Path) -> None:
    path = Path(f"{prefix}.idx")
    sound = path.read_bytes()
    for bit in range(8 * BOUNDS_AT):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        message(prefix)


@pytest.mark.parametrize(("dtype", "value"), [(np.uint16, 100), (np.uint16, 65535), (np.int32, -1)])
def test_a_token_outside_of_the_vocabulary_is_named(
    dtype: type, value: int, tmp_path: Path
) -> None:
    prefix = write(tmp_path / "corpus", dtype)
    size = np.dtype(dtype).itemsize
    put(Path(f"{prefix}.bin"), 95 * size, "<H" if size == 2 else "<i", value)
    expected = f"corpus.bin: token 95 (byte {95 * size}) is {value}, but the vocabulary has the ids"
    assert expected in message(prefix)
    assert message(write(tmp_path / "corpus", dtype), 39).startswith("corpus.bin: token 39 ")


def test_of_many_tokens_evenly_spaced_parts_are_read(prefix: Path) -> None:
    path = Path(f"{prefix}.bin")
    sound = path.read_bytes()
    noticed = []
    with patch.multiple(dataset_files, SAMPLES=4, SAMPLE_TOKENS=3):
        for number in range(96):
            put(path, 2 * number, "<H", 300)
            try:
                checked_lengths(str(prefix), VOCABULARY)
            except ValueError:
                noticed.append(number)
            path.write_bytes(sound)
    assert noticed == [0, 1, 2, 31, 32, 33, 62, 63, 64, 93, 94, 95]


def refuse_before_a_model(line: str) -> str:
    """Job: return the error of a run that must end before it builds a model."""
    with patch.object(loop, "build_model", side_effect=AssertionError("a model was built")):
        return refuse(line)


def test_damaged_data_ends_a_run_on_all_ranks_before_a_model_is_built(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / name) for name in ("one", "two")]
    put(Path(f"{prefixes[0]}.idx"), LENGTHS_AT, "<i", -40)  # would hang Megatron-Core
    put(Path(f"{prefixes[1]}.bin"), 0, "<H", 150)
    source = "--split 1,0,0 --tokenizer-type NullTokenizer --vocab-size 99 --eval-iters 0"
    line = SMALL[: SMALL.index("--data-path")] + source
    line = f"{line} --data-path {prefixes[0]} {prefixes[1]} --train-iters 1 --lr 1"
    assert error_of(line, job=refuse_before_a_model) == (
        f"ValueError: the data is damaged:\n  {prefixes[0]}.idx: sequence 0 (byte 34) has the"
        f" length -40\n  {prefixes[1]}.bin: token 0 (byte 0) is 150, but the vocabulary has the ids"
        " 0 to 99: it was written with another tokenizer; give its --tokenizer-type and files"
    )

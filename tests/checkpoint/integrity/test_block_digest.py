# SPDX-License-Identifier: Apache-2.0
"""The digest of a file from the CRC-32s of its blocks."""

from __future__ import annotations

import hashlib
import random
import zlib
from pathlib import Path

import pytest

from megatron.checkpoint.core import reading_threads
from megatron.checkpoint.integrity import block_digest
from megatron.checkpoint.integrity.block_digest import (
    BLOCK,
    BlockDigest,
    digest_of_blocks,
)
from megatron.checkpoint.integrity.manifest import BLOCKS, SHA256, FileDigest, Manifest, digest_of

CONTENT = random.Random(0).randbytes(10 * BLOCK + 12345)


def written_in(sizes: list[int], content: bytes = CONTENT) -> BlockDigest:
    """Return the digest of ``content``, appended in parts of these sizes and of all that is left.

    The CRC-32 that each part has is compared.
    """
    digest, position = BlockDigest(), 0
    for size in [*sizes, len(content)]:
        part = content[position : position + size]
        assert digest.update(part) == zlib.crc32(part)
        position += len(part)
    return digest


def test_it_is_the_sha256_of_the_checksums_of_blocks() -> None:
    checksums = b""
    for begin in range(0, len(CONTENT), BLOCK):
        checksums += zlib.crc32(CONTENT[begin : begin + BLOCK]).to_bytes(4, "little")
    assert written_in([]).hexdigest() == hashlib.sha256(checksums).hexdigest()


@pytest.mark.parametrize(
    "sizes",
    [[1], [BLOCK, 7], [0, BLOCK - 1, 2], [9 * BLOCK + 1], [100, 9 * BLOCK], [BLOCK // 2] * 9],
)
def test_it_does_not_depend_on_how_the_bytes_are_divided(sizes: list[int]) -> None:
    assert written_in(sizes).hexdigest() == written_in([]).hexdigest()


def test_whole_blocks_have_no_checksum_after_them() -> None:
    assert written_in([], CONTENT[: 2 * BLOCK]).hexdigest() != written_in([]).hexdigest()
    assert written_in([], b"").hexdigest() == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, BLOCK, 2 * BLOCK, len(CONTENT)])
def test_threads_that_read_a_file_find_the_same_digest(
    size: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_threads, "number_of_threads", lambda: number)
    monkeypatch.setattr(block_digest, "number_of_threads", lambda: number)
    monkeypatch.setattr(block_digest, "_BLOCKS_OF_THREAD", 1)
    path, content = tmp_path / "file", bytearray(CONTENT[:size])
    for _ in range(8):
        path.write_bytes(content)
        expected = written_in([], bytes(content)).hexdigest()
        assert digest_of_blocks(path) == (size, expected)
        if size:
            content[random.randrange(size)] ^= 1


def test_every_flipped_bit_changes_it() -> None:
    content = bytearray(CONTENT[: BLOCK + 9])
    sound = written_in([], bytes(content)).hexdigest()
    choose = random.Random(1)
    for _ in range(300):
        position, bit = choose.randrange(len(content)), 1 << choose.randrange(8)
        content[position] ^= bit
        assert written_in([], bytes(content)).hexdigest() != sound
        content[position] ^= bit


def test_exchanged_blocks_change_it() -> None:
    exchanged = CONTENT[BLOCK : 2 * BLOCK] + CONTENT[:BLOCK]
    assert written_in([], exchanged).hexdigest() != written_in([], CONTENT[: 2 * BLOCK]).hexdigest()


def test_a_manifest_of_sha256_digests_is_read_and_compared(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"content")
    old = FileDigest(7, hashlib.sha256(b"content").hexdigest(), SHA256)
    Manifest(tmp_path, {"old": old, "new": digest_of(tmp_path / "old")}).write()
    assert f'"{SHA256}": "{old.digest}"' in (tmp_path / "manifest.json").read_text()
    (tmp_path / "new").write_bytes(b"content")
    manifest = Manifest.read(tmp_path)
    assert manifest is not None
    assert [digest.algorithm for digest in manifest.files.values()] == [BLOCKS, SHA256]
    for name in ("old", "new"):
        assert not manifest.has_changed(name)
        (tmp_path / name).write_bytes(b"Content")
        assert manifest.has_changed(name)

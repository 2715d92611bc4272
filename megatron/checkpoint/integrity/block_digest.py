# SPDX-License-Identifier: Apache-2.0
"""The digest of a file as the SHA-256 over the CRC-32s of its blocks.

It takes about as long as one CRC-32 of the file, a fourth of a SHA-256. A CRC-32 finds every change
within 32 bits in a row, so that no single flipped bit is missed. Of wider damage in one block, one
case in 2^32 is missed. Damage is what it finds: somebody who changes a file on purpose can choose
bytes with the same digest, as he can write another manifest.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from megatron.checkpoint.core.reading_threads import in_threads, number_of_threads
from megatron.checkpoint.store import durable

try:  # with the processor's instructions for polynomials
    from zlib_ng.zlib_ng import crc32
except ImportError:  # an environment that somebody else has made
    from zlib import crc32

__all__ = ["BLOCK", "BlockDigest", "crc32", "digest_of_blocks"]

BLOCK = 1 << 17
"""Bytes of which one CRC-32 is taken: 128 KiB. A file ends with a shorter block, or with none."""

_BLOCKS_OF_THREAD = 64
"""Blocks that one thread reads at least: 8 MiB."""


class BlockDigest:
    """The digest of bytes that come one after another.

    Example: of 300,000 bytes it is the SHA-256 over three CRC-32s, each in four bytes, the lowest
    first: those of 131,072, of 131,072 and of 37,856 bytes.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._checksum = 0
        self._length = 0

    def update(self, data: Any) -> int:
        """Append bytes.

        Args:
            data: a bytes-like object.

        Returns:
            The CRC-32 of ``data`` alone.
        """
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            part = view[position : position + BLOCK - self._length]  # ends where the block does
            self._append(crc32(part, self._checksum), len(part))
            position += len(part)
        return crc32(view)

    def _append(self, checksum: int, length: int) -> None:
        self._checksum = checksum
        self._length += length
        if self._length == BLOCK:
            self._digest.update(checksum.to_bytes(4, "little"))
            self._checksum = self._length = 0

    def hexdigest(self) -> str:
        """Return the digest of all bytes until now, in hexadecimal digits."""
        digest = self._digest.copy()
        if self._length:
            digest.update(self._checksum.to_bytes(4, "little"))
        return digest.hexdigest()


# ---- files


def digest_of_blocks(path: Path) -> tuple[int, str]:
    """Read a file, parts of it at the same time, and return its size and its digest.

    The size is the number of bytes that were read.
    """
    with durable.opened(path, 0) as file:
        size = os.fstat(file.fileno()).st_size
        step = max(-(-size // (number_of_threads() * BLOCK)), _BLOCKS_OF_THREAD) * BLOCK

        def checksums(begin: int) -> tuple[int, bytes]:
            return _checksums_of(file.fileno(), begin, begin + step)

        parts = in_threads(checksums, range(0, size, step))
    digest = hashlib.sha256(b"".join(checksums for _, checksums in parts))
    return sum(num_bytes for num_bytes, _ in parts), digest.hexdigest()


def _checksums_of(
    descriptor: int,
    begin: int,
    end: int,
) -> tuple[int, bytes]:
    """Return the number of bytes of a file in a range, and the CRC-32s of the blocks in it."""
    checksums = bytearray()
    buffer = memoryview(bytearray(BLOCK))
    position = begin
    while position < end:
        done = 0
        while done < BLOCK:
            count = os.preadv(descriptor, [buffer[done:]], position + done)
            if not count:
                break
            done += count
        if done:
            checksums += crc32(buffer[:done]).to_bytes(4, "little")
        position += done
        if done < BLOCK:
            break
    return position - begin, bytes(checksums)

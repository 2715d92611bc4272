# SPDX-License-Identifier: Apache-2.0
"""The digest of a file as the SHA-256 over the CRC-32s of its blocks, and CRC-32s of joined bytes.

It takes about as long as one CRC-32 of the file, a fourth of a SHA-256. A CRC-32 finds every change
within 32 bits in a row, so that no single flipped bit is missed. Of wider damage in one block, one
case in 2^32 is missed. Damage is what it finds: somebody who changes a file on purpose can choose
bytes with the same digest, as he can write another manifest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megatron.checkpoint.dcp.reading_threads import in_threads, number_of_threads
from megatron.checkpoint.integrity.checksum import crc32

BLOCK = 1 << 17
"""Bytes of which one CRC-32 is taken: 128 KiB. A file ends with a shorter block, or with none."""

_JOINED = 8 * BLOCK
"""From this size on, the CRC-32 of bytes is joined from those of their blocks: that has a price."""
_BLOCKS_OF_THREAD = 64
"""Blocks that one thread reads at least: 8 MiB."""
_POLYNOMIAL = 0xEDB88320
"""That of CRC-32, with the coefficient of x^0 in the highest bit."""
_ONE = 1 << 31


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
        if len(view) < _JOINED:
            for part in self._parts(view):
                self._append(crc32(part, self._checksum), len(part))
            return crc32(view)
        whole = 0
        for part in self._parts(view):
            alone = crc32(part)
            is_begun = self._length > 0
            self._append(crc32(part, self._checksum) if is_begun else alone, len(part))
            whole = join_checksums(whole, alone, len(part))
        return whole

    def _parts(self, view: memoryview) -> Iterator[memoryview]:
        """Divide bytes where blocks end."""
        position = 0
        while position < len(view):
            part = view[position : position + BLOCK - self._length]
            position += len(part)
            yield part

    def _append(self, checksum: int, length: int) -> None:
        self._checksum, self._length = checksum, self._length + length
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
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        step = max(-(-size // (number_of_threads() * BLOCK)), _BLOCKS_OF_THREAD) * BLOCK

        def checksums(begin: int) -> tuple[int, bytes]:
            return _checksums_of(file.fileno(), begin, begin + step)

        parts = in_threads(checksums, range(0, size, step))
    digest = hashlib.sha256(b"".join(checksums for _, checksums in parts))
    return sum(num_bytes for num_bytes, _ in parts), digest.hexdigest()


def _checksums_of(descriptor: int, begin: int, end: int) -> tuple[int, bytes]:
    """Return the number of bytes of a file in a range, and the CRC-32s of the blocks in it.

    Args:
        descriptor: of the file.
        begin: of the range; the start of a block.
        end: of the range, which may be after that of the file.
    """
    checksums = bytearray()
    buffer = memoryview(bytearray(BLOCK))
    position = begin
    while position < end:
        done = 0
        while done < BLOCK and (count := os.preadv(descriptor, [buffer[done:]], position + done)):
            done += count
        if done:
            checksums += crc32(buffer[:done]).to_bytes(4, "little")
        position += done
        if done < BLOCK:
            break
    return position - begin, bytes(checksums)


# ---- CRC-32s of joined bytes


def join_checksums(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of bytes with the CRC-32 ``first`` that others with ``second`` follow.

    Args:
        first: of the bytes before.
        second: of the bytes that follow.
        length: number of the bytes that follow.
    """
    if not first:
        return second
    if length != BLOCK:
        return _product(first, _factor(length)) ^ second
    shifted = second
    for table, byte in zip(_block_tables(), first.to_bytes(4, "little")):
        shifted ^= table[byte]
    return shifted


def _factor(length: int) -> int:
    """Return x^(8 * length): a CRC-32 is multiplied by it when ``length`` zero bytes follow."""
    factor, square = _ONE, _ONE >> 8  # x^0, x^8
    while length:
        if length & 1:
            factor = _product(factor, square)
        square, length = _product(square, square), length >> 1
    return factor


@cache
def _block_tables() -> tuple[tuple[int, ...], ...]:
    """Return the products of each byte of a CRC-32 with the factor of a block."""
    factor, tables = _factor(BLOCK), []
    for byte in range(4):
        tables.append(tuple(_product(value << 8 * byte, factor) for value in range(256)))
    return tuple(tables)


def _product(first: int, second: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for power in range(32):  # the coefficient of x^power in the first one
        if first & (_ONE >> power):
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product

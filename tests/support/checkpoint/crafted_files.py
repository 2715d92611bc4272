# SPDX-License-Identifier: Apache-2.0
"""Files as an attacker would write them: pickles that call functions, in every kind of file."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CallOnLoad:
    """Unpickles as the result of a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def named(module: str, name: str) -> bytes:
    """Return the opcodes that push a global of any name, whether it exists or not."""
    return (
        b"\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
        + b"\x93"
    )


def text(content: str) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def call(module: str, name: str, *args: bytes) -> bytes:
    """Return a pickle that calls a global."""
    return (
        pickle.PROTO
        + b"\x04"
        + named(module, name)
        + pickle.MARK
        + b"".join(args)
        + pickle.TUPLE
        + pickle.REDUCE
        + pickle.STOP
    )


def touch(marker: Path) -> bytes:
    """Return a pickle that makes the file ``marker`` when it is trusted."""
    return pickle.dumps(CallOnLoad(__import__("os").system, f"touch {marker}"))


def archive(pickled: bytes, **records: bytes) -> bytes:
    """Wrap any pickle in an archive as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in {
            "data.pkl": pickled,
            "version": b"3\n",
            "byteorder": b"little",
            **records,
        }.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def two_faced_archive(shown: bytes, hidden: bytes) -> bytes:
    """Build an archive that Python's ``zipfile`` reads as ``shown`` and torch as ``hidden``.

    Both believe different fields of the archive's directory.
    """
    end = hidden.rindex(b"PK\x05\x06")
    size, offset = struct.unpack("<II", hidden[end + 12 : end + 20])
    shown_end = shown.rindex(b"PK\x05\x06")
    shown_size, shown_offset = struct.unpack("<II", shown[shown_end + 12 : shown_end + 20])
    directory = bytearray(shown[shown_offset : shown_offset + shown_size])
    comment = size - shown_size  # makes both directories equally long
    assert comment >= 0
    last = directory.rindex(b"PK\x01\x02")
    directory[last + 32 : last + 34] = struct.pack("<H", comment)
    head = hidden[:end]
    body = head + shown[:shown_offset]
    start = len(body) - offset  # Python adds what it takes for data before the archive
    position = 0
    while (position := directory.find(b"PK\x01\x02", position)) >= 0:
        local = struct.unpack("<I", directory[position + 42 : position + 46])[0]
        directory[position + 42 : position + 46] = struct.pack(
            "<I", (len(head) + local - start) & 0xFFFFFFFF
        )
        position += 4
    count = struct.unpack("<H", hidden[end + 8 : end + 10])[0]
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, offset, 0)
    return body + bytes(directory) + bytes(comment) + tail

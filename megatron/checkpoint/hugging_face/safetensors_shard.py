# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: its tensors as lazy ones, and writing it tensor by tensor.

The format, from https://github.com/huggingface/safetensors#format: eight bytes, the length of the
header as a little-endian number; the header, a JSON object from names to ``dtype``, ``shape`` and
``data_offsets`` (first byte and end, counted from the header's end), maybe with ``__metadata__`` of
strings and blanks at its end; then the values, little-endian and in row-major order, without holes.
The library writes tensors that are in memory all together, and reads from a mapping of the whole
file, or whole tensors; a conversion has to do with less memory than either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = {"format": "pt"}
"""Readers of model directories refuse files that do not say which library's tensors they hold."""


def stored_tensors(path: Path) -> dict[str, LazyTensor]:
    """Name -> tensor of a safetensors file; nothing but its header is read yet.

    Raises:
        ValueError: where the file is damaged, or has a tensor of a dtype that torch does not know.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8)) if 8 < start <= size else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{path} cannot be read as a safetensors file: it does not begin with a header"
        )
    header.pop("__metadata__", None)
    problems = [
        f"{name}: {problem}"
        for name, entry in header.items()
        if (problem := _problem(entry, size - start))
    ]
    if problems:
        raise ValueError(
            f"{path} cannot be read as a safetensors file:\n  " + "\n  ".join(problems)
        )
    return {name: _stored_tensor(path, start, entry) for name, entry in header.items()}


def _problem(entry: Any, num_bytes: int) -> str | None:
    """What is wrong with a tensor of a file that has so many bytes of values."""
    try:
        dtype, shape, (begin, end) = (
            entry["dtype"],
            torch.Size(entry["shape"]),
            entry["data_offsets"],
        )
    except (KeyError, TypeError, ValueError):
        return f"its description is damaged: {entry}"
    if dtype not in DTYPES:
        return f"torch does not know its dtype {dtype}"
    if not 0 <= begin <= end <= num_bytes or end - begin != shape.numel() * DTYPES[dtype].itemsize:
        return (
            f"{dtype} {tuple(shape)} is not what bytes {begin} to {end} of {num_bytes} can hold: is"
            " the file cut off?"
        )
    return None


def _stored_tensor(path: Path, start: int, entry: dict[str, Any]) -> LazyTensor:
    """The tensor whose bytes are counted from ``start``.

    Plain reads: the library needs address space for the whole file, or memory for the whole tensor.
    """
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    row = dtype.itemsize * torch.Size(shape[1:]).numel()

    def read_rows(first: int, last: int) -> torch.Tensor:
        values = torch.empty((last - first, *shape[1:]) if shape else (), dtype=dtype)
        with open(path, "rb") as file:
            file.seek(start + entry["data_offsets"][0] + first * row)
            if file.readinto(_bytes_of(values)) != values.nbytes:
                raise ValueError(f"{path} is shorter than it was")
        return values

    return LazyTensor(shape, dtype, read_rows)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_shard(
    path: Path, tensors: dict[str, LazyTensor], progress: Callable[[int], None]
) -> None:
    """Write a file of these tensors, one after another: never more than one of them is in memory.

    Args:
        path: of the file, which is replaced.
        tensors: name -> tensor, in the order in which values are written.
        progress: called with the number of bytes of every tensor that is written.

    Raises:
        ValueError: for a dtype that the format does not have.
        RuntimeError: where a tensor turns out to be another than it said.
    """
    with open(path, "wb") as file:
        file.write(_header(tensors))
        for name, tensor in tensors.items():
            values = tensor.read()
            if values.shape != tensor.shape or values.dtype != tensor.dtype:
                raise RuntimeError(
                    f"{name} should be {tensor.dtype} {tensor.shape} but was read as {values.dtype}"
                    f" {tuple(values.shape)}"
                )
            file.write(_bytes_of(values.contiguous()))
            progress(tensor.num_bytes)


def _header(tensors: dict[str, LazyTensor]) -> bytes:
    strange = sorted(
        f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in NAMES
    )
    if strange:
        raise ValueError(f"safetensors files have no such dtypes: {', '.join(strange)}")
    header: dict[str, Any] = {"__metadata__": METADATA}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned, as in the library's own files
    return len(text).to_bytes(8, "little") + text

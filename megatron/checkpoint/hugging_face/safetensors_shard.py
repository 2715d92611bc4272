# SPDX-License-Identifier: Apache-2.0
"""One safetensors file, read lazily and written tensor by tensor.

The format (https://github.com/huggingface/safetensors#format) has three parts:

1. eight bytes, the length of the header as a little-endian number;
2. the header, a JSON object from names to ``dtype``, ``shape`` and ``data_offsets`` (first byte and
   end, counted from the header's end). It may have ``__metadata__`` of strings, and blanks at its
   end;
3. the values, little-endian and in row-major order, without gaps.

The library writes tensors that are in memory all together, and it reads from a mapping of the whole
file, or whole tensors. A conversion has to do with less memory than either.
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
"""Readers of model directories refuse files that do not name the library of their tensors."""


def stored_tensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a safetensors file by name. Only its header is read at once.

    Raises:
        ValueError: if the file is damaged, or has a tensor of a dtype that torch does not know.
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
    problems = []
    for name, entry in header.items():
        problem = _problem(entry, size - start)
        if problem is not None:
            problems.append(f"{name}: {problem}")
    problems = problems or _gaps(header, size - start)
    if problems:
        raise ValueError(
            f"{path} cannot be read as a safetensors file:\n  " + "\n  ".join(problems)
        )
    return {name: _stored_tensor(path, start, entry) for name, entry in header.items()}


def _problem(entry: Any, num_bytes: int) -> str | None:
    """Return the problem of a tensor's entry in a file with ``num_bytes`` of values, or None."""
    try:
        dtype, shape = entry["dtype"], torch.Size(entry["shape"])
        begin, end = entry["data_offsets"]
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


def _gaps(header: dict[str, Any], num_bytes: int) -> list[str]:
    """Return where tensors overlap or leave some of ``num_bytes`` bytes of values to none."""
    problems, expected = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != expected:
            problems.append(
                f"{name} begins at byte {begin}, not at {expected}, where the tensor before it ends"
            )
        expected = end
    if expected != num_bytes:
        problems.append(f"its tensors end at byte {expected} of {num_bytes}")
    return problems


def _stored_tensor(path: Path, start: int, entry: dict[str, Any]) -> LazyTensor:
    """Return a tensor of the file; the values of the file begin at byte ``start``.

    It is read with plain reads: the library needs address space for the whole file, or memory for
    the whole tensor.
    """
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()

    def read_rows(first: int, last: int) -> torch.Tensor:
        values = torch.empty((last - first, *shape[1:]) if shape else (), dtype=dtype)
        with open(path, "rb") as file:
            file.seek(start + entry["data_offsets"][0] + first * row_bytes)
            if file.readinto(_bytes_of(values)) != values.nbytes:
                raise ValueError(f"{path} is shorter than it was")
        return values

    return LazyTensor(shape, dtype, read_rows)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_shard(
    path: Path, tensors: dict[str, LazyTensor], progress: Callable[[int], None]
) -> None:
    """Write a file of tensors, one after another. Never more than one of them is in memory.

    Args:
        path: of the file, which is replaced.
        tensors: name -> tensor, in the order in which values are written.
        progress: called with the size of every tensor when it is written.

    Raises:
        ValueError: for a dtype that the format does not have.
        RuntimeError: if a tensor has another shape or dtype when it is read than it has declared.
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

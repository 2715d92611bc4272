# SPDX-License-Identifier: Apache-2.0
"""Directory of a Hugging Face model: config.json, and safetensors files, read and written lazily.

A safetensors file (https://github.com/huggingface/safetensors#format) has three parts:

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
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Tensors, bytes_of, shape_of_rows
from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.integrity.block_digest import BlockDigest
from megatron.checkpoint.integrity.manifest import FileDigest
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.directory import METADATA

CONFIG = "config.json"
OF_A_RUN = "begins_after_iteration"
"""A key that only the ``config.json`` of a run of pretrain_gpt.py has."""
INDEX = "model.safetensors.index.json"
"""Name of every tensor -> its file, in a model of several files."""
SINGLE_FILE = "model.safetensors"


def is_model_directory(path: Path) -> bool:
    """Return True for the directory of a model.

    A checkpoint may have ``config.json`` too, and so has the folder of a run: that of its settings.
    """
    has_config = (path / CONFIG).is_file()
    is_checkpoint = (path / METADATA).is_file()
    if is_checkpoint or not has_config:
        return False
    try:
        return OF_A_RUN not in read_json(path / CONFIG)
    except ValueError:
        return True  # reading the model raises an error about the file


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: if the file cannot be read, or has anything else.
    """
    try:
        content = json.loads(durable.file_at(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold one JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, with keys in order."""
    text = json.dumps(content, indent=2, sort_keys=True)
    durable.write_text(path, text + "\n")


def read_tensors(directory: Path) -> Tensors:
    """Return all tensors of a model by name. Their values are read later, when they are needed.

    Raises:
        ValueError: if files are missing, damaged, or lack tensors that the index has.
    """
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(
                f"{directory} has neither {SINGLE_FILE} nor {INDEX}: save the model with"
                " safetensors"
            )
        return stored_tensors(directory / SINGLE_FILE)
    file_of = read_json(directory / INDEX).get("weight_map")
    if not isinstance(file_of, dict):
        raise ValueError(f"{directory / INDEX} has no weight_map")
    files = sorted(set(file_of.values()))
    absent = []
    for file in files:
        if not (directory / file).is_file():
            absent.append(file)
    refuse(f"{directory / INDEX} names files that are not there", absent)
    tensors_of = {file: stored_tensors(directory / file) for file in files}
    tensors = {}
    lost = []
    for name, file in file_of.items():
        if name in tensors_of[file]:
            tensors[name] = tensors_of[file][name]
        else:
            lost.append(f"{name}: not in {file}")
    refuse(f"{directory / INDEX} lists tensors that its files do not have", lost)
    return tensors


# ---- weights in FP8, with a scale for each block

SCALE = "_scale_inv"
"""Ending of the name of a weight's scales, after that of the weight."""
CODES = torch.float8_e4m3fn


def is_kept(name: str, quantization: Mapping[str, Any]) -> bool:
    """Return True for a weight of one of ``modules_to_not_convert``, as transformers finds them."""
    module = name.removesuffix(".weight")
    for pattern in quantization.get("modules_to_not_convert") or ():
        at_start = rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"
        if module.endswith(pattern) or re.match(at_start, module):
            return True
    return False


def dequantized(
    tensors: Tensors,
    quantization: Mapping[str, Any],
    where: Path,
) -> Tensors:
    """Return the tensors of a model with codes and scales multiplied, in fp32.

    Args:
        tensors: the stored tensors: codes, and under ``<name>_scale_inv`` one fp32 scale for each
            block.
        quantization: the ``quantization_config``; ``weight_block_size`` are rows and columns of a
            block.
        where: directory of the model, for the message.

    Raises:
        ValueError: with all weights that do not fit their scales.
    """
    block = quantization["weight_block_size"]
    found = {}
    problems = []
    for name, tensor in tensors.items():
        scales = tensors.get(name + SCALE)
        if scales is None and tensor.dtype != CODES:
            is_scale = name.endswith(SCALE) and name.removesuffix(SCALE) in tensors
            if not is_scale:
                found[name] = tensor
            continue
        num_blocks = []
        for size, length in zip(tensor.shape, block):
            num_blocks.append(math.ceil(size / length))
        wanted = tuple(num_blocks)
        given = "missing"
        if scales is not None:
            given = f"{scales.dtype} {scales.shape}"
        expected = f"{torch.float32} {wanted}"
        is_matrix_of_codes = tensor.dtype == CODES and len(tensor.shape) == 2
        if is_kept(name, quantization):
            problems.append(f"{name} has codes, and is one of modules_to_not_convert")
        elif scales is None or given != expected or not is_matrix_of_codes:
            codes = f"{name}: {tensor.dtype} {tensor.shape}"
            problems.append(f"{codes}, scales {given} instead of {expected} for {CODES}")
        else:
            found[name] = _product(tensor, scales, block)
    refuse(f"{where} has weights that do not fit scales of {block} elements each", problems)
    return found


def _product(
    codes: LazyTensor,
    scales: LazyTensor,
    block: Sequence[int],
) -> LazyTensor:
    def read_rows(start: int, stop: int) -> torch.Tensor:
        block_rows, block_columns = block
        first = start // block_rows
        last = math.ceil(stop / block_rows)
        factors = scales.read_rows(first, last)
        factors = factors.repeat_interleave(block_rows, 0)
        factors = factors.repeat_interleave(block_columns, 1)
        values = codes.read_rows(start, stop).float()
        skipped = start - first * block_rows
        num_rows, num_columns = values.shape
        return values * factors[skipped : skipped + num_rows, :num_columns]

    return LazyTensor(codes.shape, torch.float32, read_rows)


def quantized(
    tensor: LazyTensor,
    block: Sequence[int],
) -> tuple[LazyTensor, LazyTensor]:
    """Return the codes and the scales of a matrix: 448 stands for the largest value of a block."""
    rows, columns = tensor.shape
    block_rows, block_columns = block
    grid_rows = math.ceil(rows / block_rows)
    grid_columns = math.ceil(columns / block_columns)
    grid = (grid_rows, grid_columns)
    largest = torch.finfo(CODES).max

    def computed() -> tuple[torch.Tensor, torch.Tensor]:
        missing_rows = grid_rows * block_rows - rows
        missing_columns = grid_columns * block_columns - columns
        padding = (0, missing_columns, 0, missing_rows)
        exact = tensor.read().float()
        values = nn.functional.pad(exact, padding)
        blocks = values.view(grid_rows, block_rows, grid_columns, block_columns)
        maxima = blocks.abs().amax((1, 3), keepdim=True)
        scales = torch.where(maxima > 0, maxima, 1.0) / largest
        scaled = (blocks / scales).clamp(-largest, largest)
        padded_codes = scaled.view(values.shape)
        codes = padded_codes[:rows, :columns].to(CODES)
        return codes, scales.view(grid)

    def read_codes(start: int, stop: int) -> torch.Tensor:
        codes, _ = computed()
        return codes[start:stop]

    def read_scales(start: int, stop: int) -> torch.Tensor:
        _, scales = computed()
        return scales[start:stop]

    codes = LazyTensor(tensor.shape, CODES, read_codes)
    scales = LazyTensor(grid, torch.float32, read_scales)
    return codes, scales


# ---- one safetensors file

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
_FILE_METADATA = {"format": "pt"}
"""Readers of model directories refuse files that do not name the library of their tensors."""


def stored_tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file by name. Only its header is read at once.

    Raises:
        ValueError: if the file is damaged, or has a tensor of a dtype that torch does not know.
    """
    try:
        size = path.stat().st_size
        with durable.opened(durable.file_at(path)) as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = None
            if 8 < start <= size:
                header = json.loads(file.read(start - 8))
    except (OSError, ValueError, RecursionError) as error:
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
    refuse(f"{path} cannot be read as a safetensors file", problems)
    tensors = {}
    for name, entry in header.items():
        tensors[name] = _stored_tensor(path, start, entry)
    return tensors


def _problem(entry: Any, num_bytes: int) -> str | None:
    """Return the problem of a tensor's entry in a file with ``num_bytes`` of values, or None."""
    try:
        dtype = entry["dtype"]
        shape = torch.Size(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        return f"its description is damaged: {entry}"
    if dtype not in DTYPES:
        return f"torch does not know its dtype {dtype}"
    expected = shape.numel() * DTYPES[dtype].itemsize
    if not 0 <= begin <= end <= num_bytes or end - begin != expected:
        return (
            f"{dtype} {tuple(shape)} is not what bytes {begin} to {end} of {num_bytes} can hold: is"
            " the file cut off?"
        )
    return None


def _gaps(header: dict[str, Any], num_bytes: int) -> list[str]:
    """Report tensors that overlap, or gaps between them, in ``num_bytes`` bytes of values."""
    problems = []
    expected = 0
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


def _stored_tensor(
    path: Path,
    start: int,
    entry: dict[str, Any],
) -> LazyTensor:
    """Return a tensor of the file; the values of the file begin at byte ``start``.

    It is read with plain reads: the library needs address space for the whole file, or memory for
    the whole tensor.
    """
    shape = tuple(entry["shape"])
    dtype = DTYPES[entry["dtype"]]
    row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()

    def read_rows(first: int, last: int) -> torch.Tensor:
        values = torch.empty(shape_of_rows(shape, first, last), dtype=dtype)
        with durable.opened(path) as file:
            file.seek(start + entry["data_offsets"][0] + first * row_bytes)
            if file.readinto(bytes_of(values)) != values.nbytes:
                raise ValueError(f"{path} is shorter than it was")
        return values

    return LazyTensor(shape, dtype, read_rows)


def write_shard(
    path: Path,
    tensors: Tensors,
    progress: Callable[[int], None],
) -> FileDigest:
    """Write, or replace, a file of tensors, with one of them in memory at a time.

    The disk has the file afterwards.

    Args:
        path: path of the file.
        tensors: the tensors by name, in the order of the file.
        progress: called with the number of bytes of each tensor that was written.

    Returns:
        The size and the digest of the file.

    Raises:
        ValueError: for a dtype that the format does not have.
        RuntimeError: if a tensor has another shape or dtype when it is read than it has declared.
    """
    digest = BlockDigest()
    header = _header(tensors)
    with durable.written(path) as file:
        file.write(header)
        digest.update(header)
        for name, tensor in tensors.items():
            values = tensor.read()
            if values.shape != tensor.shape or values.dtype != tensor.dtype:
                raise RuntimeError(
                    f"{name} should be {tensor.dtype} {tensor.shape} but was read as {values.dtype}"
                    f" {tuple(values.shape)}"
                )
            content = bytes_of(values.contiguous())
            file.write(content)
            digest.update(content)
            progress(tensor.num_bytes)
    return FileDigest(path.stat().st_size, digest.hexdigest())


def _header(tensors: Tensors) -> bytes:
    header: dict[str, Any] = {"__metadata__": _FILE_METADATA}
    offset = 0
    strange = []
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            strange.append(f"{name} ({tensor.dtype})")
            continue
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    if strange:
        raise ValueError(f"safetensors files have no such dtypes: {', '.join(sorted(strange))}")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned, as in the library's own files
    return len(text).to_bytes(8, "little") + text

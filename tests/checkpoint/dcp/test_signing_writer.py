# SPDX-License-Identifier: Apache-2.0
"""Archives of tensors that are made once for a shape, compared with those of torch.save."""

from __future__ import annotations

import io
import re
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.checkpoint.dcp.save_planner import EvenPlanner
from megatron.checkpoint.dcp.signing_writer import SigningWriter, archive_of

TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(3.0),
    "bfloat16": torch.ones(5, dtype=torch.bfloat16),
    "float16": torch.ones(5, dtype=torch.float16),
    "float64": torch.ones(5, dtype=torch.float64),
    "int64": torch.arange(300).view(3, 4, 25),
    "int32": torch.arange(4, dtype=torch.int32),
    "int16": torch.arange(4, dtype=torch.int16),
    "int8": torch.arange(4, dtype=torch.int8),
    "uint8": torch.arange(4, dtype=torch.uint8),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "complex": torch.ones(4, dtype=torch.complex64),
    "bool": torch.tensor([[True, False]]),
    "large": torch.arange(600_000.0).view(2, 300_000),
    "six axes": torch.ones(1, 2, 1, 2, 1, 2),
}
"""Tensors of which an archive is made."""

LEFT_TO_TORCH = {
    "empty": torch.empty(0, 5),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "part of a storage": torch.arange(12.0)[:5],
    "negated": torch.ones(3, dtype=torch.complex64).conj().imag,
    "parameter": nn.Parameter(torch.ones(3)),
    "requires grad": torch.ones(3, requires_grad=True),
}


def without_identifier(content: bytes) -> bytes:
    """Return an archive with zeros for its identifier, and for the two CRC-32s of that."""
    found = re.search(rb"serialization_idFB..Z*(\d{40})", content, re.DOTALL)
    assert found is not None
    checksum = zlib.crc32(found[1]).to_bytes(4, "little")
    return content.replace(found[1], b"0" * 40).replace(checksum, b"\0\0\0\0")


def saved_by_torch(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.parametrize("name", TENSORS)
def test_an_archive_is_byte_for_byte_that_of_torch(name: str) -> None:
    tensor = TENSORS[name]
    archive = archive_of(tensor)
    assert archive is not None
    elements = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    made = archive.before + elements + archive.end(zlib.crc32(elements))
    assert without_identifier(made) == without_identifier(saved_by_torch(tensor))
    loaded = torch.load(io.BytesIO(made), weights_only=True)
    assert loaded.dtype == tensor.dtype and torch.equal(loaded.float(), tensor.float())


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_other_tensors_are_left_to_torch(name: str) -> None:
    assert archive_of(LEFT_TO_TORCH[name]) is None


def test_dcp_reads_all_of_them(tmp_path: Path) -> None:
    content = {**TENSORS, **{name: tensor.detach() for name, tensor in LEFT_TO_TORCH.items()}}
    del content["negated"]  # which torch.load does not take from DCP either
    dcp.save(content, storage_writer=SigningWriter(tmp_path), planner=EvenPlanner(), no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in content.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in content.items():
        assert torch.equal(loaded[name].float(), tensor.float()), name

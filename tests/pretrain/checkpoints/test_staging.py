# SPDX-License-Identifier: Apache-2.0
"""Staged content is the same in the other process, and lies in memory that is used again."""

import os
from threading import current_thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.checkpoint.core import reading_threads
from megatron.fsdp.dtensor.tensor_part import ChunkedTensor, TensorPart, as_chunked_tensor
from megatron.mcore_adapter.checkpoints import staging
from megatron.mcore_adapter.checkpoints.staging import StagingBuffer
from tests.support.rank_pool import run_ranks

CHUNKS = (((0, 2), (1, 1)), ((1, 0), (2, 3)))


def content() -> dict[str, Any]:
    base = torch.arange(7.0)
    return {
        "plain": torch.randn(5, 3),
        "transposed": torch.randn(5, 3).T,
        "cut": torch.randn(100)[3:90:2],
        "expanded": torch.ones(1).expand(4),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "nested": [{"bf16": torch.randn(9).bfloat16()}, (torch.tensor(True), None)],
        "integers": torch.arange(3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4, dtype=torch.float64),
        "chunked": as_chunked_tensor(base, TensorPart((3, 3), CHUNKS, is_flat=True)),
        "text": "words",
    }


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return []
    found = []
    for item in items:
        found += tensors_in(item)
    return found


def test_what_is_read_is_what_was_staged() -> None:
    buffer = StagingBuffer()
    original = content()
    other = StagingBuffer(os.dup(buffer.file_descriptor))
    staged = other.read(buffer.stage(original))
    assert staged["text"] == "words" and staged["nested"][1][1] is None
    pairs = list(zip(tensors_in(staged), tensors_in(original), strict=True))
    assert len(pairs) == 11
    for mine, expected in pairs:
        copy = expected.detach().clone()
        assert torch.equal(mine.detach(), copy)
        assert (mine.dtype, mine.stride()) == (copy.dtype, copy.stride())
        assert mine.requires_grad == expected.requires_grad
        assert mine.untyped_storage().nbytes() == mine.nbytes
    chunked = staged["chunked"]
    assert isinstance(chunked, ChunkedTensor)
    part = chunked.part
    assert (part.chunks, part.shape, part.is_flat) == (CHUNKS, (3, 3), True)


def test_the_copy_keeps_its_values_and_the_next_one_takes_its_memory() -> None:
    buffer = StagingBuffer()
    weight = torch.ones(1000)
    where = buffer.stage({"weight": weight})
    memory = buffer._memory
    weight.zero_()
    assert buffer.read(where)["weight"].sum() == 1000
    again = buffer.stage({"weight": weight})
    assert buffer._memory is memory and again == where
    assert not buffer.read(again)["weight"].any()


def test_memory_grows_with_the_content_and_is_given_back() -> None:
    buffer = StagingBuffer()
    small = buffer.stage(torch.ones(10))
    other = StagingBuffer(os.dup(buffer.file_descriptor))
    assert torch.equal(other.read(small), torch.ones(10))
    large = buffer.stage(torch.full((small.size,), 3.0))
    assert large.size > small.size
    assert torch.equal(other.read(large), torch.full((small.size,), 3.0))
    buffer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.file_descriptor)


def test_a_machine_without_memory_is_an_error_before_anything_is_copied() -> None:
    error = OSError(28, "No space left on device")
    with patch.object(os, "posix_fallocate", side_effect=error), pytest.raises(OSError):
        StagingBuffer().stage(torch.ones(1))


def test_memory_that_was_reserved_is_that_of_the_first_save_and_is_there_already() -> None:
    buffer, weight = StagingBuffer(), torch.randn(1 << 21)
    buffer.reserve({"weight": weight})
    where = buffer.stage({"weight": weight + 1})
    memory = buffer._memory
    assert memory is not None and where.size == len(memory) == buffer.num_bytes
    with patch.object(os, "posix_fallocate", side_effect=AssertionError("allocated again")):
        assert torch.equal(buffer.read(buffer.stage({"weight": weight}))["weight"], weight)
    assert buffer._memory is memory
    buffer.reserve({"weight": torch.ones(1 << 23)})
    buffer.close()  # waits for the thread, which has the descriptor


def test_memory_that_cannot_be_reserved_is_an_error_of_the_save_alone() -> None:
    buffer = StagingBuffer()
    error = OSError(28, "No space left on device")
    with patch.object(os, "posix_fallocate", side_effect=error):
        buffer.reserve(torch.ones(1))
        with pytest.raises(OSError):
            buffer.stage(torch.ones(1))
    assert torch.equal(buffer.read(buffer.stage(torch.ones(1))), torch.ones(1))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_tensor_of_this_process_is_copied_bit_for_bit(num_threads: int) -> None:
    """Also those whose bytes are not their values, in threads."""
    numbers = torch.randn(6, dtype=torch.complex64)
    tensors = [numbers.conj(), numbers.conj().imag, torch.tensor(True), torch.tensor([-0.0])]
    tensors += [torch.randint(256, (5, 7), dtype=torch.uint8).view(torch.float8_e4m3fn)]
    tensors += [torch.full((1,), float("nan"), dtype=torch.bfloat16), torch.randn(2, 3, 4)]
    buffer = StagingBuffer()
    with patch.object(reading_threads, "number_of_threads", return_value=num_threads):
        staged = buffer.read(buffer.stage(tensors))
    for mine, expected in zip(staged, tensors, strict=True):
        copy = expected.resolve_conj().resolve_neg().contiguous().reshape(-1)
        assert torch.equal(mine.reshape(-1).view(torch.uint8), copy.view(torch.uint8))
        assert mine.shape == expected.shape and mine.dtype == expected.dtype


def refused_dtensor() -> str:
    """Job: the error for a DTensor whose chunks are not known."""
    value = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Replicate()])
    with pytest.raises(TypeError) as caught:
        StagingBuffer().stage({"weight": value})
    return str(caught.value)


def test_a_dtensor_that_does_not_know_its_chunks_is_refused() -> None:
    assert "shape (2,) without known chunks" in run_ranks(2, refused_dtensor)[0]


def test_the_thread_of_copies_is_on_the_device_of_its_tensors() -> None:
    device = torch.device("cuda", 3)
    used: list[tuple[str, Any]] = []

    def set_device(chosen: torch.device) -> None:
        used.append((current_thread().name, chosen))

    copies: Any = [(SimpleNamespace(is_cuda=True, device=device), None)]
    with (
        patch.object(torch.cuda, "Stream", MagicMock()),
        patch.object(torch.cuda, "current_stream", MagicMock()),
        patch.object(torch.cuda, "stream", MagicMock()),
        patch.object(torch.cuda, "set_device", set_device),
        patch.object(staging, "_copy", lambda *args: used.append(("copy", args[0]))),
    ):
        staging._CopyingThread(copies, torch.empty(0), lambda: None).finish()
    assert used == [("copy to host memory", device), ("copy", copies)]

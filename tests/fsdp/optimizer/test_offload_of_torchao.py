# SPDX-License-Identifier: Apache-2.0
"""The optimizer of torchao that steps copies on the host, and its quantized ones on the host."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.fsdp.optimizer.test_quantized_state import (
    UNITS,
    LayersInBlocks,
    assert_same,
    optimizer_of,
    train,
    values_of,
    weights_of,
)
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.reference import on_ranks

logging.getLogger("torchao").setLevel(logging.ERROR)  # it says that it has no CUDA kernels here
pytest.importorskip("torchao", reason="torchao is not installed")


class NoStream:
    """A stream of a device on which everything happens at once."""

    def wait_stream(self, other: NoStream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> NoStream:
        return self


class TorchWithoutPinnedMemory(types.ModuleType):
    """The names of torch that torchao's optimizer reads, on a CPU that it takes for CUDA."""

    cuda = types.SimpleNamespace(
        Stream=NoStream, current_stream=NoStream, stream=lambda stream: contextlib.nullcontext()
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: torch.Tensor, device: str = "cpu", pin_memory: bool = True) -> Any:
        return torch.empty_like(tensor, device=device)


def offloaded(parameters: Iterable[nn.Parameter]) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, lr=0.01)


def seen_as_cuda() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.multiple(
        "torchao.optim.cpu_offload",
        torch=TorchWithoutPinnedMemory("torch"),
        get_available_devices=lambda: ["cuda"],
    )


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_copies_on_the_host_are_stepped_as_without_sharding(level: int) -> None:
    """Compare bits with AdamW, which needs no copies."""
    reference = LayersInBlocks()
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, fused=True)
    model = fully_shard_model(LayersInBlocks(), mesh_of("shard"), zero_dp_strategy=level, **UNITS)
    with seen_as_cuda():
        losses = train(model, offloaded(model.parameters()), range(4))
    assert losses == train(reference, expected, range(4))
    assert_same(weights_of(model), weights_of(reference))


@on_ranks(2)
def test_sharding_it_is_refused_with_what_to_do() -> None:
    module = LayersInBlocks()
    with seen_as_cuda(), pytest.raises(ValueError, match="offload_policy='host'"):
        fully_shard(module, offloaded(module.parameters()), mesh_of("shard"))
    model = fully_shard_model(module, mesh_of("shard"))
    with seen_as_cuda(), pytest.raises(ValueError, match="steps copies of its own"):
        fully_shard_optimizer(offloaded(model.parameters()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
@on_ranks(2)
def test_quantized_state_on_the_host_has_the_same_bits(kind: str) -> None:
    reference, module = LayersInBlocks(), LayersInBlocks()
    expected, optimizer = optimizer_of(kind, reference), optimizer_of(kind, module)
    model, optimizer = fully_shard(
        module, optimizer, mesh_of("shard"), offload_policy="host", **UNITS
    )
    assert train(model, optimizer, range(4)) == train(reference, expected, range(4))
    assert_same(values_of(optimizer, model), values_of(expected, reference))

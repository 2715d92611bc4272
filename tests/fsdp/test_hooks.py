# SPDX-License-Identifier: Apache-2.0
"""Hooks on tensors: what they keep alive, and what they find in outputs."""

import dataclasses
import gc
import weakref
from collections import OrderedDict

import torch
from torch import nn

from megatron.fsdp import fully_shard
from megatron.fsdp.engine.hooks import tensors_in


class Remembering(nn.Module):
    """A unit that keeps a weak reference to an activation which autograd saves."""

    def __init__(self, seen: list):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x))
        self.seen.append(weakref.ref(hidden))
        return x + hidden * hidden


def living_activations() -> int:
    seen: list = []
    net = nn.Sequential(*[Remembering(seen) for _ in range(3)])
    model, optimizer = fully_shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), fsdp_unit_modules=[Remembering]
    )
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(reference() is not None for reference in seen)
    finally:
        gc.enable()


def test_activations_die_with_their_backward_pass(ranks) -> None:
    assert ranks(2, living_activations) == [0, 0]


def test_tensors_are_found_in_any_nest() -> None:
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        extra: dict

    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    nest = (Output(one, {"hidden": [two]}), OrderedDict(last=three), "text", None)
    assert [tensor.numel() for tensor in tensors_in(nest)] == [1, 2, 3]

# SPDX-License-Identifier: Apache-2.0
"""State of one optimizer for another one: what is frozen has none, and SGD's is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.utils import state_of_other_optimizers
from tests.support.fsdp.reference import on_ranks


def stepped(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """Return a sharded optimizer after a step on two matrices, of which one is frozen."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
    model[1].weight.requires_grad_(False)
    model, optimizer = fully_shard(model, make(model.parameters()))
    model(torch.eye(8)).square().sum().backward()
    optimizer.step()
    return optimizer


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@on_ranks(2)
def test_frozen_parameters_have_no_state_and_sums_are_no_averages() -> None:
    adam, muon = stepped(torch.optim.AdamW), stepped(torch.optim.Muon)
    first = adam.state_dict()["state"][0]["exp_avg"].full_tensor()
    taken = state_of_other_optimizers(muon, [adam.state_dict()])
    assert [key for key, slots in taken["state"].items() if slots] == [0]
    muon.load_state_dict(taken)
    momentum = muon.state_dict()["state"][0]["momentum_buffer"].full_tensor()
    assert torch.equal(momentum, first)
    sums = stepped(sgd)
    for optimizer, other in ((adam, sums), (sums, adam)):
        with pytest.raises(ValueError, match="the momentum of SGD is a sum"):
            state_of_other_optimizers(optimizer, [other.state_dict()])

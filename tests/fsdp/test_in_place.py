# SPDX-License-Identifier: Apache-2.0
"""Modules that are sharded in place: what they are afterwards, and which of them are roots."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.fsdp import trace
from megatron_fsdp.experimental import (
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from tests.support.fsdp import models
from tests.support.fsdp.in_place import (
    SAME_DTYPE,
    compare_parts,
    on_one_axis,
    shard_in_place,
    train,
    whole_weights,
)
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import (
    batch,
    close,
    on_ranks,
    optimizer_over,
)
from tests.support.fsdp.side_by_side import mean_gradients, plain_backward
from tests.support.fsdp.state_dicts import assert_equal


@on_ranks(2)
def test_independent_roots_prefetch_in_the_order_of_their_calls() -> None:
    mesh = shard_mesh()
    first, second = build_stack(), nn.Sequential(ResidualBlock(), ResidualBlock()).double()
    with fully_shard_context() as context:
        for root in (first, second):
            for block in [one for one in root.modules() if isinstance(one, ResidualBlock)]:
                fully_shard(block, mesh, on_one_axis(mesh, 3).placements, SAME_DTYPE)
            fully_shard(root, mesh, on_one_axis(mesh, 3).placements, SAME_DTYPE)
    assert context.roots[0].module is first and context.roots[1].module is second
    contexts: list[Any] = [first.context, second[1].context]
    assert contexts == [context] * 2
    assert first.is_root() and not first.blocks[0].is_root()
    optimizer = fully_shard_optimizer(optimizer_over(nn.ModuleList([first, second])))
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    block = context.roots[1]._units[1]
    for step in range(2):
        hidden = first(x)
        assert bool(block.is_unsharded or "UNSHARDING" in str(block.groups[0].state)) == (step > 0)
        second(torch.cat([hidden, hidden], dim=1)[:, :WIDTH]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_work_on_weights_and_gradients_has_the_unit_of_the_larger_model() -> None:
    mesh = shard_mesh()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for module in (*model, model):
        fully_shard(module, mesh, on_one_axis(mesh, 3).placements)
    with trace.record() as recorded:
        model(torch.ones(1, 3)).sum().backward()
    units: dict[str, set[str]] = {}
    for entry in recorded.collectives:
        units.setdefault(entry.name, set()).add(entry.unit)
    assert units == {"all_gather": {"0", "1"}, "reduce_scatter": {"0", "1"}}


@on_ranks(2)
def test_modules_without_one_around_them_train_by_an_optimizer_of_torch() -> None:
    mesh = init_device_mesh("cpu", (2,))
    reference, model = build_stack(), build_stack()
    for module in (model.embed, *model.blocks, model.head):
        fully_shard(module, mesh, on_one_axis(mesh, 3).placements, SAME_DTYPE)
    optimizer, expected_optimizer = optimizer_over(model, "sgd"), optimizer_over(reference, "sgd")
    for step in range(2):
        mean_gradients(reference, plain_backward, step)
        plain_backward(model, step, dist.get_rank())
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
        weights = dict(model.named_parameters())
        assert all(isinstance(one, DTensor) for one in weights.values())
        compare_parts(model, weights, dict(reference.named_parameters()), f"weight in {step}")
    assert model.embed.is_root() and model.head.context is not model.embed.context


@on_ranks(2)
def test_a_module_stays_itself_and_its_class_is_extended() -> None:
    mesh, model = shard_mesh(), build_stack()
    blocks, names = list(model.blocks), [name for name, _ in model.named_parameters()]
    shard_in_place(model, on_one_axis(mesh, 3))
    assert list(model.blocks) == blocks and type(model).__name__ == "FSDPStack"
    assert isinstance(model, models.Stack) and type(blocks[0]) is type(blocks[1])
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError, match=r"state_dict\(\)"):
            copied(model)


class WithContext(nn.Module):
    """A module with attributes of the names that sharding adds."""

    is_root = False

    def __init__(self) -> None:
        super().__init__()
        self.context = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.context(x) if not self.is_root else x


@on_ranks(2)
def test_attributes_of_the_module_are_its_own() -> None:
    mesh, model = shard_mesh(), WithContext()
    inner = model.context
    fully_shard(model, mesh, on_one_axis(mesh, 3).placements)
    assert model.context is inner and model.is_root is False
    model(torch.ones(1, 3)).sum().backward()
    assert inner.weight.grad is not None


@on_ranks(2)
def test_torchs_functions_get_and_set_the_state() -> None:
    mesh, model = shard_mesh(), build_stack()
    shard_in_place(model, on_one_axis(mesh, 3))
    optimizer = fully_shard_optimizer(optimizer_over(model))
    train(model, optimizer, [batch(0, 0, 0)])
    weights, moments = copy.deepcopy(get_state_dict(model, optimizer))
    expected = whole_weights(model)
    assert weights.keys() == expected.keys() and moments["state"].keys() == expected.keys()
    train(model, optimizer, [batch(1, 0, 0)])
    after = whole_weights(model)
    train(model, optimizer, [batch(2, 0, 0)])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert_equal(whole_weights(model), expected)
    train(model, optimizer, [batch(1, 0, 0)])
    assert_equal(whole_weights(model), after)


@on_ranks(2)
def test_full_tensors_load_into_modules_and_assignment_is_refused() -> None:
    mesh, model = shard_mesh(), build_stack()
    around = nn.ModuleDict({"model": model})
    shard_in_place(model, on_one_axis(mesh, 3))
    other = {name: torch.randn_like(value) for name, value in build_stack().state_dict().items()}
    for value in other.values():
        dist.broadcast(value, 0)
    model.load_state_dict(other)
    for name, value in whole_weights(model).items():
        close(value, other[name], name)
    model.blocks[1].load_state_dict(build_stack().blocks[1].state_dict())
    close(model.blocks[1].up.weight.full_tensor(), build_stack().blocks[1].up.weight, "a layer")
    around.load_state_dict({f"model.{name}": value for name, value in other.items()})
    close(model.blocks[1].up.weight.full_tensor(), other["blocks.1.up.weight"], "around")
    prefixed = {f"model.{name}": value for name, value in other.items()}
    for module, state in ((model, other), (model.blocks[0], {}), (around, prefixed)):
        with pytest.raises(NotImplementedError, match="assign=True"):
            module.load_state_dict(state, assign=True)


@on_ranks(2)
def test_a_deleted_model_releases_its_memory() -> None:
    mesh, model = shard_mesh(), build_stack()
    context = shard_in_place(model, on_one_axis(mesh, 3))
    optimizer = fully_shard_optimizer(optimizer_over(model))
    train(model, optimizer, [batch(0, 0, 0)])
    buffers = [weakref.ref(group.compute.flat) for group in context.roots[0].groups]
    buffers += [weakref.ref(group.main_shard) for group in context.roots[0].groups]
    del model, optimizer, context
    gc.collect()
    assert [each() for each in buffers] == [None] * len(buffers)


def test_a_context_has_one_stream_or_two_of_its_device() -> None:
    for is_one in (False, True):
        with fully_shard_context("cuda", unify_communication_stream=is_one) as context:
            assert context.is_on(torch.device("cuda", 1)) and not context.is_on(torch.device("cpu"))
        assert context.streams(torch.device("cuda"))._has_one_stream is is_one
    with fully_shard_context("cuda:0") as context:
        assert not context.is_on(torch.device("cuda", 1))

# SPDX-License-Identifier: Apache-2.0
"""With memory slots, models train with the same numbers, and addresses never change."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.support.fsdp.models import TanhLayer
from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import Case, Ranks, compare_all, on_ranks, shard_with_sgd
from tests.support.fsdp.wrong_calls import message_of

SLOTS = {"fsdp_double_buffer": True}
NUM_LAYERS = 6


AT_LEVEL_1_TOO = ("several_units", "tied_across_units", "unit_unused_in_some_steps", "scalars")
NAMES = {
    "some": (*AT_LEVEL_1_TOO, "frozen_in_part", "checkpoint_reentrant"),
    "others": (
        *("nested_units", "unit_called_twice", "parallel_branches", "tied_weight_as_argument"),
        *("unused_parameters", "frozen_at_the_bottom", "view_edited_in_place", "leaf_input"),
        *("checkpoint_non_reentrant", "checkpoint_inside_reentrant", "called_under_no_grad"),
    ),
}
"""Models whose units come into use in different orders."""


@pytest.mark.always("some")
@pytest.mark.parametrize("names", NAMES)
def test_models_train_as_the_unsharded_ones(ranks: Ranks, names: str) -> None:
    cases = [Case(model=name, steps=3, settings=SLOTS) for name in NAMES[names]]
    at_level_1 = SLOTS | {"zero_dp_strategy": 1}
    cases += [replace(case, settings=at_level_1) for case in cases if case.model in AT_LEVEL_1_TOO]
    ranks(2, compare_all, cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"maxpool_double_buffer": True},
        {"cuda_graph_mode": True},
        SLOTS | {"overlap_param_gather": False, "overlap_grad_reduce": False},
        SLOTS | {"enable_fine_grained_param_gather": True},
        SLOTS | {"suggested_communication_unit_size": 2000},
        SLOTS | {"disable_bucketing": True},
    ],
    ids=str,
)
def test_settings_do_not_change_the_numbers(ranks: Ranks, settings: dict[str, Any]) -> None:
    case = Case(model="several_units", steps=3, microbatches=2, settings=settings, evaluate=True)
    ranks(2, compare_all, [replace(case, sync="step"), replace(case, model="nested_units")])


@pytest.mark.exhaustive
def test_experts_and_hybrid_sharding_train_as_the_unsharded_models(ranks: Ranks) -> None:
    experts = Drawn(layers=(DrawnLayer(hidden=7, num_experts=4), DrawnLayer(hidden=3)))
    case = Case(model=experts, mesh="ep2", steps=3, settings=SLOTS)
    hybrid = replace(case, model="several_units", mesh="outer2", microbatches=2)
    sharded = replace(hybrid, settings=SLOTS | {"outer_dp_sharding_strategy": 1})
    ranks(4, compare_all, [case, hybrid, sharded])


class Chain(nn.Module):
    """Equal layers, some of which a call may skip, and a layer that reads another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TanhLayer() for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor, used: Sequence[int] = range(NUM_LAYERS)) -> torch.Tensor:
        for number in used:
            x = self.layers[number](x)
        return x


def sharded_chain(
    chain_class: type[Chain] = Chain, **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    chain = chain_class()
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    return fully_shard(chain, optimizer, fsdp_unit_modules=[TanhLayer], **settings)


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, *used: Sequence[int]) -> None:
    """Train a step for each selection of layers."""
    for number, each in enumerate(used):
        torch.manual_seed(number)
        model(torch.randn(3, 8), each).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: MegatronFSDP) -> list[torch.Tensor]:
    return [full_tensor(parameter) for parameter in model.parameters()]


@on_ranks(2)
def test_weights_are_gathered_to_the_same_two_addresses_in_turn() -> None:
    """Note the addresses of each layer's weight in forwards."""
    model, optimizer = sharded_chain(**SLOTS)
    addresses: list[set[int]] = [set() for _ in range(NUM_LAYERS)]
    train(model, optimizer, range(NUM_LAYERS))
    for layer, seen in zip(model.module.layers, addresses):
        layer.linear.register_forward_pre_hook(
            lambda module, inputs, seen=seen: seen.add(module.weight.data_ptr())
        )
    train(model, optimizer, *[range(NUM_LAYERS)] * 3)
    with torch.no_grad():
        model(torch.randn(3, 8))
    assert [len(sizes) for sizes in model.memory_slots.values()] == [2, 1]
    assert all(len(each) == 1 for each in addresses)
    assert len(set().union(*addresses)) == 2
    assert all(left != right for left, right in itertools.pairwise(addresses))


Trained = tuple[dict[str, list[int]], list[torch.Tensor]]
"""The slots of a model, and its weights after training."""


def with_and_without_slots(train: Callable[..., Trained], **settings: Any) -> dict[str, list[int]]:
    """Train in both ways, whose weights have to be equal, and return the slots."""
    slots, weights = train(**settings, **SLOTS)
    _, expected = train(**settings)
    assert all(map(torch.equal, weights, expected))
    return slots


def skip_at_random(**settings: Any) -> Trained:
    choice = random.Random(3)
    used = [
        sorted(choice.sample(range(NUM_LAYERS), choice.randint(1, NUM_LAYERS))) for _ in range(12)
    ]
    model, optimizer = sharded_chain(**settings)
    train(model, optimizer, range(NUM_LAYERS), *used)
    return model.memory_slots, weights_of(model)


@pytest.mark.exhaustive
def test_layers_skipped_at_random_need_no_more_slots(ranks: Ranks) -> None:
    for slots in ranks(2, with_and_without_slots, skip_at_random):
        assert len(slots["weights"]) == 2


class Dropping(TanhLayer):
    """A layer that passes its input on when it is dropped."""

    is_dropped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_dropped else super().forward(x)


def drop_at_random(**settings: Any) -> Trained:
    choice = random.Random(3)
    torch.manual_seed(0)
    layers = nn.Sequential(*(Dropping() for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    model, optimizer = fully_shard(layers, optimizer, fsdp_unit_modules=[Dropping], **settings)
    for number in range(8):
        for layer in layers[1:]:
            layer.is_dropped = number > 0 and choice.random() < 0.5
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.memory_slots, weights_of(model)


def test_layers_that_pass_their_input_on_are_not_gathered_in_backward(ranks: Ranks) -> None:
    for slots in ranks(2, with_and_without_slots, drop_at_random):
        assert len(slots["weights"]) == 2


class ChainWithRoot(Chain):
    """A chain whose root has a parameter as large as a layer, used beside all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10, 8))

    def forward(self, x: torch.Tensor, used: Sequence[int] = range(NUM_LAYERS)) -> torch.Tensor:
        return super().forward(x * self.scale[0], used)


@pytest.mark.always("ChainWithRoot")
@pytest.mark.parametrize("chain", [Chain, ChainWithRoot])
@on_ranks(2)
def test_layers_that_first_come_into_use_later_get_slots_then(chain: type[Chain]) -> None:
    """Train parts of a chain first: the other layers get slots when they are used."""
    weights = []
    for settings in (SLOTS, {}):
        model, optimizer = sharded_chain(chain, **settings)
        model.install_optimized_model_weights()  # as after loading, before anything is used
        train(model, optimizer, (0, 1), (2, 3, 4), (5, 0, 5), range(NUM_LAYERS), (1, 3))
        weights.append(weights_of(model))
    assert all(map(torch.equal, *weights))


class Reading(Chain):
    """A chain whose second layer may read the weight of the fourth."""

    def forward(self, x: torch.Tensor, reads: bool = False) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == 1 and reads:
                layer.linear.register_forward_pre_hook(self._add_the_fourth)
            x = layer(x)
        return x

    def _add_the_fourth(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        inputs[0] + self.layers[3].linear.weight.sum()


@on_ranks(2)
def test_units_that_first_come_into_use_together_later_are_named() -> None:
    model, optimizer = shard_with_sgd(Reading(), fsdp_unit_modules=[TanhLayer], **SLOTS)
    x = torch.randn(3, 8)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    message = message_of(RuntimeError, model, x, reads=True)
    assert "'layers.3'" in message and "'layers.1'" in message, message
    assert "train without fsdp_double_buffer" in message, message


def accumulate_later(**settings: Any) -> Trained:
    """Train with one microbatch a step, and then with two, at level 1."""
    model, optimizer = sharded_chain(zero_dp_strategy=1, **settings)
    train(model, optimizer, range(NUM_LAYERS), range(NUM_LAYERS))
    with model.no_sync():
        model(torch.ones(3, 8)).sum().backward()
    train(model, optimizer, range(NUM_LAYERS), range(NUM_LAYERS))
    return model.memory_slots, weights_of(model)


def test_gradients_get_more_slots_when_they_accumulate(ranks: Ranks) -> None:
    for slots in ranks(2, with_and_without_slots, accumulate_later):
        assert slots["weights"] == [] and len(slots["gradients"]) == NUM_LAYERS


@on_ranks(2)
def test_held_addresses_do_not_change_for_accumulation() -> None:
    model, optimizer = sharded_chain(zero_dp_strategy=1, cuda_graph_mode=True)
    train(model, optimizer, range(NUM_LAYERS))
    with model.no_sync():
        message = message_of(RuntimeError, model(torch.ones(3, 8)).sum().backward)
    assert "local gradients of unit 'layers.4'" in message, message
    assert "share a memory slot" in message, message


class Towers(nn.Module):
    """Two chains beside each other, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Chain(), Chain()])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers]


def step_between_forward_and_backward(**settings: Any) -> tuple[str, list[torch.Tensor]]:
    """Step the first tower before the backward of the second; then train both."""
    torch.manual_seed(0)
    model = fully_shard_model(Towers(), fsdp_unit_modules=[TanhLayer], **settings)
    parameters = list(model.parameters())
    optimizers = []
    for own in parameters[: 2 * NUM_LAYERS], parameters[2 * NUM_LAYERS :]:
        optimizers.append(fully_shard_optimizer(torch.optim.SGD(own, lr=0.1)))
    first, second = model(torch.ones(3, 8))
    first.sum().backward()
    optimizers[0].step()
    message = ""
    try:
        second.sum().backward()
    except RuntimeError as error:
        message = str(error)
    for number in range(2):
        model.zero_grad()
        for output, optimizer in zip(model(torch.full((3, 8), 1.0 + number)), optimizers):
            output.sum().backward()
            optimizer.step()
    return message, weights_of(model)


def test_a_forward_from_before_the_slots_has_no_backward_after_them(ranks: Ranks) -> None:
    for (message, weights), (no_message, expected) in zip(
        ranks(2, step_between_forward_and_backward, **SLOTS),
        ranks(2, step_between_forward_and_backward),
    ):
        assert no_message == ""
        assert "unit 'towers.1.layers.5'" in message and "Run the backward before" in message
        assert all(map(torch.equal, weights, expected))


class TwoGroups(TanhLayer):
    """A layer with parameters of two dtypes, of which a rank may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor, uses_other: bool) -> torch.Tensor:
        return super().forward(x) + (self.other(x.double()).float() if uses_other else 0)


class ChainOfTwoGroups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoGroups() for _ in range(4))

    def forward(self, x: torch.Tensor, uses_other: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, uses_other)
        return x


def leave_a_group_out_on_rank_1(**settings: Any) -> Trained:
    torch.manual_seed(0)
    chain = ChainOfTwoGroups()
    model, optimizer = shard_with_sgd(
        chain,
        fsdp_unit_modules=[TwoGroups],
        mixed_precision_policy=MixedPrecisionPolicy(None),
        **settings,
    )
    for step in range(3):
        uses_other = dist.get_rank() == 0 or step > 0
        with model.no_sync():
            model(torch.randn(3, 8), uses_other).sum().backward()
        model(torch.randn(3, 8), uses_other).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.memory_slots, weights_of(model)


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [1, 2])
def test_ranks_that_leave_out_different_groups_assign_the_same_slots(
    ranks: Ranks, level: int
) -> None:
    settings = {"zero_dp_strategy": level, "overlap_grad_reduce": False}
    assert all(ranks(2, with_and_without_slots, leave_a_group_out_on_rank_1, **settings))


def reduce_in_another_dtype(**settings: Any) -> Trained:
    model, optimizer = sharded_chain(**settings)
    train(model, optimizer, range(NUM_LAYERS))
    with model.mixed_precision_context(MixedPrecisionPolicy(None, torch.float32, torch.bfloat16)):
        train(model, optimizer, range(NUM_LAYERS))
    train(model, optimizer, range(NUM_LAYERS))
    return model.memory_slots, weights_of(model)


def test_slots_serve_gradients_that_are_reduced_in_another_dtype(ranks: Ranks) -> None:
    for slots in ranks(2, with_and_without_slots, reduce_in_another_dtype):
        assert len(slots["gradients"]) == 1

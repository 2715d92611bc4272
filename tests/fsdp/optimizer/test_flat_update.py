# SPDX-License-Identifier: Apache-2.0
"""Updates on flat segments have the bits of updates of single parameters, and cost less."""

import copy
from collections.abc import Callable
from itertools import chain
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron.fsdp.optimizer import flat_segments
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.fsdp.test_host_time import shard_layers, train
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.optimizers import ONE_OF_EACH, OPTIMIZERS, two_groups
from tests.support.fsdp.reference import Ranks, on_ranks

Optimizer = torch.optim.Optimizer
Pair = list[tuple[nn.Module, Optimizer]]


class OddUnit(nn.Module):
    """Sizes that leave padding, and elements that fill no vector."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.up, self.norm, self.down = nn.Linear(5, 13), nn.LayerNorm(13), nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.norm(self.up(x)))


def sharded_models(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Shard the same model twice."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        # The last layer consists of whole blocks, which 16 bits and fused kernels need.
        layers = [nn.Linear(8, 5), OddUnit(), nn.Linear(5, 8), nn.Linear(8, 256)]
        module = nn.Sequential(*layers).to(dtype)
        precision = MixedPrecisionPolicy(main_params_dtype=None)
        settings = {"fsdp_unit_modules": [OddUnit], "mixed_precision_policy": precision}
        models.append(fully_shard_model(module, shard_mesh(), **settings))
    return models


def flat_and_single(models: list[nn.Module], name: str) -> Pair:
    """Make an optimizer for each of two models; the second steps on single parameters only."""
    pair = []
    for model in models:
        optimizer = OPTIMIZERS[name](two_groups(model))
        pair.append((model, fully_shard_optimizer(optimizer)))
    pair[1][1]._fsdp_update = None
    return pair


def backward(pair: Pair, step: int, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(3, 8, generator=generator).to(dtype)
    for model, optimizer in pair:
        optimizer.zero_grad()
        model(x).square().mean().backward()


def step_and_compare(pair: Pair, what: str) -> None:
    for _, optimizer in pair:
        optimizer.step()
    (model, optimizer), (other_model, other) = pair
    for (name, mine), theirs in zip(model.named_parameters(), other_model.parameters()):
        assert torch.equal(mine._local_tensor, theirs._local_tensor), f"{what}: {name}"
        slots, expected = optimizer.state.get(mine, {}), other.state.get(theirs, {})
        assert slots.keys() == expected.keys(), f"{what}: state of {name}"
        for slot, value in slots.items():
            assert type(value) is type(expected[slot])
            assert torch.equal(local(value), local(expected[slot])), f"{what}: {slot} of {name}"


def local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [*optimizer.param_groups[0]["params"], *optimizer.param_groups[1]["params"]]


def drop_a_gradient(optimizer: Optimizer) -> None:
    parameters_of(optimizer)[1].grad = None


def replace_a_gradient(optimizer: Optimizer) -> None:
    parameter = parameters_of(optimizer)[2]
    parameter.grad = parameter.grad * 2


def clip(optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.1)


def load_own_state(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def decay_rates(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


EVENTS = [
    *(None, None, drop_a_gradient, None, replace_a_gradient, None),
    *(clip, decay_rates, load_own_state, None),
]


FEW_EVENTS = [None, None, drop_a_gradient, None]
WITH_ALL_EVENTS = ("adamw", "sgd_dampening", "nadam_decoupled")


def compare_with_single_updates(names: tuple[str, ...], dtype: torch.dtype) -> None:
    """Compare optimizers one after the other on the same models."""
    models = sharded_models(dtype)
    for name in names:
        pair = flat_and_single(models, name)
        for step, event in enumerate(EVENTS if name in WITH_ALL_EVENTS else FEW_EVENTS):
            backward(pair, step, dtype)
            for _, optimizer in pair:
                if event is not None:
                    event(optimizer)
            step_and_compare(pair, f"{name} in {dtype}, step {step}")
        segments = pair[0][1]._fsdp_update._segments
        of_blocks = sharded_param_of(models[0].get_parameter("module.3.weight"))
        flat = chain.from_iterable(segment.members for segment in segments.all())
        assert of_blocks in [member.sharded_param for member in flat]
        if "fused" not in name and dtype != torch.bfloat16:
            assert not any(segments.others)
            assert max(len(segment.members) for segment in segments.all()) > 1


KINDS = ("adamw", "adamw_fused", "adam_amsgrad", "sgd_dampening", "adagrad", "nadam", "asgd")
"""Those with state of each kind."""
ALL = [*ONE_OF_EACH, "adamw_single", "adam_maximize", "nadam_decoupled", "rprop_foreach"]
NAMES = {"kinds": KINDS, "others": tuple(name for name in ALL if name not in KINDS)}


@pytest.mark.always("kinds")
@pytest.mark.parametrize("names", NAMES)
def test_updates_have_the_bits_of_single_updates(ranks: Ranks, names: str) -> None:
    ranks(2, compare_with_single_updates, NAMES[names], torch.float32)


@pytest.mark.exhaustive
@on_ranks(2)
def test_segments_are_bounded() -> None:
    """Compare with single updates where a unit (65 + 13 + 13 + 65 + 5 elements) is too large."""
    with patch.object(flat_segments, "LARGEST", 40):
        pair = flat_and_single(sharded_models(), "adamw")
        for step, event in enumerate(EVENTS):
            backward(pair, step)
            for _, optimizer in pair:
                if event is not None:
                    event(optimizer)
            step_and_compare(pair, f"step {step}")
    segments = pair[0][1]._fsdp_update._segments.all()
    assert all(len(each.members) == 1 or each.weight.numel() <= 40 for each in segments)
    assert max(len(each.members) for each in segments) > 1
    groups = {each.members[0].sharded_param.group for each in segments}
    assert len(segments) > 2 * len(groups)  # more than one for each param group of the optimizer


IN_16_BITS = ("adamw", "adamw_fused", "sgd_momentum")
"""Some of them round the last elements of a tensor in another way."""


@pytest.mark.exhaustive
def test_updates_in_16_bits_have_the_bits_of_single_updates(ranks: Ranks) -> None:
    ranks(2, compare_with_single_updates, IN_16_BITS, torch.bfloat16)


@pytest.mark.exhaustive
@on_ranks(2)
def test_states_are_those_of_single_updates() -> None:
    """Load the state of either optimizer into the other, after different numbers of steps."""
    models = sharded_models()
    for name in ("adamw", "sgd_momentum", "nadam", "asgd", "rprop"):
        pair = flat_and_single(models, name)
        for step in range(3):
            backward(pair, step)
            step_and_compare(pair, name)
        other_pair = flat_and_single(models, name)
        for (_, optimizer), (_, source) in zip(other_pair, reversed(pair)):
            optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
        for step in range(2):
            backward(other_pair, step)
            step_and_compare(other_pair, f"{name}, loaded")


def count_in_place(optimizer: Optimizer) -> None:
    optimizer.state[parameters_of(optimizer)[0]]["step"].fill_(9)


def replace_a_counter(optimizer: Optimizer) -> None:
    optimizer.state[parameters_of(optimizer)[1]]["step"] = torch.tensor(5.0)


def replace_a_moment(optimizer: Optimizer) -> None:
    slots = optimizer.state[parameters_of(optimizer)[3]]
    slots["exp_avg"] = slots["exp_avg"] * 3


def write_to_a_moment(optimizer: Optimizer) -> None:
    optimizer.state[parameters_of(optimizer)[0]]["exp_avg"].mul_(0.5)


def replace_a_state(optimizer: Optimizer) -> None:
    parameter = parameters_of(optimizer)[2]
    optimizer.state[parameter] = copy.deepcopy(optimizer.state[parameter])


def forget_a_state(optimizer: Optimizer) -> None:
    optimizer.state.pop(parameters_of(optimizer)[2])


def freeze(optimizer: Optimizer) -> None:
    parameters_of(optimizer)[0].requires_grad_(False)


def move_to_the_other_group(optimizer: Optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def turn_uphill(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["maximize"] = True


CHANGES = [
    *(count_in_place, replace_a_counter, replace_a_moment, write_to_a_moment, replace_a_state),
    *(forget_a_state, move_to_the_other_group, turn_uphill, freeze),
]


@on_ranks(2)
def test_changes_of_the_optimizer_between_steps_are_noticed() -> None:
    pair = flat_and_single(sharded_models(), "adamw")
    for step, change in enumerate([None, *CHANGES]):
        if change is not None:
            for _, optimizer in pair:
                change(optimizer)
        for again in range(2):
            backward(pair, step)
            step_and_compare(pair, f"{change and change.__name__}, step {again}")


@on_ranks(2)
def test_momentum_can_begin_and_end_later() -> None:
    pair = flat_and_single(sharded_models(), "sgd")
    for step, momentum in enumerate((0.0, 0.9, 0.9, 0.0, 0.5)):
        for _, optimizer in pair:
            for group in optimizer.param_groups:
                group["momentum"] = momentum
        backward(pair, step)
        step_and_compare(pair, f"momentum {momentum} at step {step}")


@on_ranks(1)
def test_every_parameter_has_a_counter_of_its_own() -> None:
    """An unsharded optimizer that loads counters which are one tensor would count several times."""
    (_, optimizer), _ = pair = flat_and_single(sharded_models(), "adamw")
    backward(pair, 0)
    step_and_compare(pair, "adamw")
    state = optimizer.state_dict()["state"]
    state[0]["step"].add_(1)
    assert [slots["step"].item() for slots in state.values()] == [2.0] + [1.0] * (len(state) - 1)


# ---- memory


def stored_gradients(model: nn.Module) -> list[int]:
    """Return the bytes of the gradient shards; a shard that was left to the user is none."""
    shards = [group.gradients._grad_sum._total for group in model.groups if group.requires_grad]
    return [0 if shard is None else shard.untyped_storage().nbytes() for shard in shards]


KEPT: dict[str, Callable[[Tensor], object] | None] = {
    "nothing": None,
    "gradient": lambda gradient: gradient,
    "local": lambda gradient: gradient.to_local(),
    "local_itself": lambda gradient: gradient._local_tensor,
    "numpy": lambda gradient: gradient._local_tensor.numpy(),
}


def watch_storage(kept: str) -> list[int]:
    """Return the bytes of gradient shards after clearing, and check that nothing else changes.

    One that the user has kept a part of is theirs.
    """
    model, optimizer = shard_layers(2)
    train(model, optimizer)
    expected = [parameter.grad._local_tensor.clone() for parameter in model.parameters()]
    keep = KEPT[kept]
    users_own = keep and keep(next(model.parameters()).grad)
    shards = [
        StorageWeakRef(group.gradients._grad_sum._total.untyped_storage())
        for group in model.groups
        if group.requires_grad
    ]
    optimizer.zero_grad()
    stored = stored_gradients(model)
    num_kept = sum(not shard.expired() for shard in shards)
    # The gradient itself, which the next step shows again, has no values meanwhile.
    assert num_kept == (0 if kept in ("nothing", "gradient") else 1)
    model(torch.ones(2, 8)).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected):
        assert torch.equal(parameter.grad._local_tensor, gradient)
    assert all(stored_gradients(model))
    del users_own
    return stored


@on_ranks(2)
def test_gradient_shards_have_no_storage_after_all_optimizers_cleared_theirs() -> None:
    """Look at gradient shards after each of two optimizers has cleared its own."""
    model, _ = shard_layers(2)
    parameters = list(model.parameters())
    first, second = (
        fully_shard_optimizer(torch.optim.SGD(part)) for part in (parameters[::2], parameters[1::2])
    )
    stored = []
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        expected = [parameter.grad._local_tensor.clone() for parameter in parameters]
        for optimizer in (first, second):
            optimizer.zero_grad()
            stored.append(stored_gradients(model))
    model(torch.ones(2, 8)).sum().backward()
    for parameter, gradient in zip(parameters, expected):
        assert torch.equal(parameter.grad._local_tensor, gradient)
    assert [any(sizes) for sizes in stored] == [True, False] * 2, stored


@on_ranks(2)
def test_gradient_shards_have_no_storage_after_clearing_but_the_one_left_to_the_user() -> None:
    stored = [watch_storage(kept) for kept in KEPT]
    assert not any(map(any, stored)), stored

# SPDX-License-Identifier: Apache-2.0
"""Deep copies of sharded models are sharded models of their own, also for torch's averages."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.support.fsdp import models
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.reference import LEVELS, Ranks, batch, evaluate, loss_of, on_ranks
from tests.support.fsdp.state_dicts import sharded, train, whole


@pytest.mark.always("tied_across_units-3", "frozen_in_part-1")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["tied_across_units", "frozen_in_part"])
@on_ranks(2)
def test_a_deep_copy_is_a_sharded_model_of_its_own(name: str, level: int) -> None:
    model, optimizer = sharded(name, level)
    train(model, optimizer, 1)
    copied = copy.deepcopy(model)
    before = whole(model.state_dict())
    assert all(torch.equal(before[key], value) for key, value in whole(copied.state_dict()).items())
    for left, right in zip(evaluate(model, 0), evaluate(copied, 0), strict=True):
        assert torch.equal(left, right)
    train(model, optimizer, 1)
    kept = whole(copied.state_dict())
    assert all(torch.equal(before[key], value) for key, value in kept.items())
    loss_of(copied(batch(0, 0, 0), step=0)).backward()
    assert all(each.grad is not None for each in copied.parameters() if each.requires_grad)


@on_ranks(2)
def test_a_copy_has_the_main_weights_in_their_own_precision() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    module = ResidualBlock().bfloat16()
    model = fully_shard_model(module, fsdp_unit_modules=[], mixed_precision_policy=policy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6)
    copied = copy.deepcopy(model)
    assert {each.dtype for each in copied.parameters()} == {torch.float32}
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    assert all(torch.equal(full_tensor(left), full_tensor(right)) for left, right in pairs)


@on_ranks(2)
def test_units_given_as_modules_are_units_of_the_copy() -> None:
    module = nn.Sequential(ResidualBlock(), ResidualBlock())
    model = fully_shard_model(module, fsdp_unit_modules=[module[0], module[1]])
    copied = copy.deepcopy(model)
    assert copied.module[0] is not module[0]
    found = [unit.name for unit in copied._units]
    assert found == ["", "0", "1"], found


def hook_counts(module: nn.Module) -> list[dict[str, int]]:
    return [
        {
            name: len(hooks)
            for name, hooks in vars(each).items()
            if name.endswith("_hooks") and hooks
        }
        for each in module.modules()
    ]


@on_ranks(2)
def test_a_copy_has_each_hook_once() -> None:
    model = fully_shard_model(nn.Sequential(ResidualBlock(), ResidualBlock()))
    model.module[0].register_forward_hook(lambda *unused: None)  # the user's, which is kept
    copied = copy.deepcopy(model)
    models_in_turn = (model, copied, copy.deepcopy(copied))
    original, first, again = (hook_counts(each.module) for each in models_in_turn)
    assert any("_load_state_dict_pre_hooks" in each for each in original)
    assert original == first == again


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_what_is_frozen_is_frozen_in_the_copy_and_thaws_there(level: int) -> None:
    model, _ = sharded("several_units", level)
    model.module.head.requires_grad_(False)
    copied = copy.deepcopy(model)
    flags = [each.requires_grad for each in copied.parameters()]
    assert flags == [each.requires_grad for each in model.parameters()] and not all(flags)
    copied.requires_grad_(True)
    loss_of(copied(batch(0, 0, 0), step=0)).backward()
    assert all(each.grad is not None for each in copied.parameters())


def average(level: int) -> list[float]:
    """Train with torch's average of a sharded model, and of the unsharded one."""
    results = []
    for is_sharded in (True, False):
        torch.manual_seed(4)
        model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_sharded:
            model, optimizer = fully_shard(
                model,
                optimizer,
                zero_dp_strategy=level,
                mixed_precision_policy=MixedPrecisionPolicy(None),
            )
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(3):
            output = model(batch(step, 0, 0))
            output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
        with torch.no_grad():
            results.append(averaged(batch(9, 0, 0)).sum().item())
    return results


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_averaged_model_of_torch_averages_a_sharded_model(ranks: Ranks, level: int) -> None:
    for ours, theirs in ranks(2, average, level):
        assert ours == pytest.approx(theirs, rel=1e-12)


def copy_by_pickle(module: nn.Module) -> Tensor:
    import pickle

    return pickle.loads(pickle.dumps(module))


@on_ranks(2)
def test_copies_of_the_module_inside_are_refused_with_the_call_to_use() -> None:
    model = fully_shard_model(models.build("scalars"))
    messages = []
    for attempt in (copy.deepcopy, copy_by_pickle):
        with pytest.raises(NotImplementedError) as error:
            attempt(model.module)
        messages.append(str(error.value))
    assert isinstance(copy.deepcopy(model), MegatronFSDP)
    assert all("copy.deepcopy(model)" in message for message in messages), messages

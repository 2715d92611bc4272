# SPDX-License-Identifier: Apache-2.0
"""Parameter groups, several optimizers of one model and several models of one optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.optimizers import (
    OPTIMIZERS,
    sharded_pair,
    sharded_step,
    sharding,
    unsharded_step,
    weights,
)
from tests.support.fsdp.reference import (
    TOLERANCE,
    Ranks,
    batch,
    compare_shards,
    loss_of,
    mean_loss,
    on_ranks,
)


def grow_by_a_group(name: str, named: bool) -> None:
    """Add half of the parameters after two steps, with settings of their own."""
    reference = models.build("several_units")
    model = fully_shard_model(models.build("several_units"), shard_mesh(), **sharding(reference))
    halves = [list(each.named_parameters()) for each in (reference, model)]
    halves = [
        (pairs[:7], pairs[7:]) if named else ([p for _, p in pairs[:7]], [p for _, p in pairs[7:]])
        for pairs in halves
    ]
    (first, second), (sharded_first, sharded_second) = halves
    expected = OPTIMIZERS[name](first)
    optimizer = fully_shard_optimizer(OPTIMIZERS[name](sharded_first))
    for step in range(4):
        if step == 2:
            expected.add_param_group({"params": second, "lr": 0.1})
            optimizer.add_param_group({"params": sharded_second, "lr": 0.1})
            assert len(optimizer.state) == len(list(model.parameters()))
            assert optimizer.state[optimizer.param_groups[1]["params"][0]]["step"].item() == 0
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
        reference.zero_grad()
        model.zero_grad()
        compare_shards(model, weights(model), weights(reference), f"weight after step {step}")
    first_group, second_group = optimizer.param_groups
    assert [*first_group["param_names"], *second_group["param_names"]] == list(weights(model))


@on_ranks(1)
def test_a_parameter_may_move_to_the_next_group() -> None:
    """Move the last parameter of the first group to the second one after two steps."""
    reference = models.build("several_units")
    model = fully_shard_model(models.build("several_units"), shard_mesh(), **sharding(reference))
    optimizers = []
    for each in (reference, model):
        own = list(each.parameters())
        groups = [{"params": own[:7]}, {"params": own[7:], "lr": 0.1}]
        optimizers.append(OPTIMIZERS["adamw"](groups))
    expected, optimizer = optimizers[0], fully_shard_optimizer(optimizers[1])
    for step in range(4):
        if step == 2:
            for first, second in (expected.param_groups, optimizer.param_groups):
                second["params"].insert(0, first["params"].pop())
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
        reference.zero_grad()
        model.zero_grad()
        compare_shards(model, weights(model), weights(reference), f"weight after step {step}")


def takes_new_groups(name: str) -> bool:
    """Return False for torch 2.10's Adagrad, which makes no state for parameters added later."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = OPTIMIZERS[name]([first])
    optimizer.add_param_group({"params": [second]})
    second.sum().backward()
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@pytest.mark.always("adamw-True")
@pytest.mark.parametrize(("name", "named"), [("adamw", True), ("adagrad", False)])
def test_param_groups_may_be_added_after_sharding(ranks: Ranks, name: str, named: bool) -> None:
    if not takes_new_groups(name):
        pytest.skip(f"torch {torch.__version__} cannot step {name} after add_param_group")
    ranks(2, grow_by_a_group, name, named)


@on_ranks(1)
def test_param_groups_of_other_parameters_are_refused() -> None:
    model, optimizer = sharded_pair("several_units")
    before = optimizer.state_dict()["param_groups"]
    messages = []
    for parameter in (
        nn.Parameter(torch.ones(2)),
        model.module.head.weight,
        next(model.parameters()),
    ):
        with pytest.raises(ValueError) as error:
            optimizer.add_param_group({"params": parameter})
        messages.append(str(error.value))
    assert optimizer.state_dict()["param_groups"] == before
    assert ["take them from model.parameters()" in message for message in messages] == [
        True,
        False,
        False,
    ]
    # The module shows the sharded parameter outside of forwards.
    assert all("more than one parameter group" in message for message in messages[1:])


@pytest.mark.always("1-gradients_in_fp32", "3-same_dtype")
@pytest.mark.parametrize(
    "main_grads", [None, torch.float32], ids=["same_dtype", "gradients_in_fp32"]
)
@pytest.mark.parametrize(
    ("level", "auto_sync"), [(1, True), (1, False), (3, True)], ids=["1", "1_in_step", "3"]
)
@on_ranks(2)
def test_one_model_may_have_several_optimizers(
    level: int, main_grads: torch.dtype | None, auto_sync: bool
) -> None:
    """Train by two optimizers, each of which clears its gradients right after its step.

    A third of the parameters is in neither, and their gradients add up.
    """
    precision = MixedPrecisionPolicy(None, main_grads)
    settings = {"mixed_precision_policy": precision, "sync_model_each_microbatch": auto_sync}
    reference, module = models.build("several_units"), models.build("several_units")
    model = fully_shard_model(module, shard_mesh(), **{**sharding(module, level), **settings})
    makers = (OPTIMIZERS["adamw"], OPTIMIZERS["sgd_momentum"])
    expected = [make(list(reference.parameters())[number::3]) for number, make in enumerate(makers)]
    optimizers = [
        fully_shard_optimizer(make(list(model.parameters())[number::3]))
        for number, make in enumerate(makers)
    ]
    tolerance = TOLERANCE if main_grads is None else 1e-5
    for step in range(4):
        mean_loss(reference, step).backward()
        loss_of(model(batch(step, dist.get_rank(), 0))).backward()
        for one, other in zip(optimizers, expected):
            one.step()
            one.zero_grad(set_to_none=step != 1)
            other.step()
            other.zero_grad()
        compare_shards(
            model, weights(model), weights(reference), f"weight after step {step}", tolerance
        )
        rest = list(reference.named_parameters())[2::3]
        gradients = {
            "module." + name: dict(model.named_parameters())["module." + name].grad
            for name, _ in rest
        }
        compare_shards(
            model,
            gradients,
            {name: p.grad for name, p in rest},
            "gradient in no optimizer",
            tolerance,
        )


@pytest.mark.always("3-adamw")
@pytest.mark.parametrize(("level", "name"), [(0, "adamw"), (1, "sgd_momentum"), (3, "adamw")])
@on_ranks(2)
def test_an_existing_optimizer_is_initialised_again_as_documented(name: str, level: int) -> None:
    """Put the parameters of the sharded model into the optimizer of the module, as documented."""
    reference, module = models.build("several_units"), models.build("several_units")
    expected, optimizer = (OPTIMIZERS[name](each.parameters()) for each in (reference, module))
    loss_of(module(batch(9, 0, 0))).backward()
    optimizer.step()  # it has state over the parameters of the module
    optimizer.zero_grad()
    module.load_state_dict(reference.state_dict())
    model = fully_shard_model(module, shard_mesh(), **sharding(reference, level))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    expected_scheduler = torch.optim.lr_scheduler.StepLR(expected, 1, 0.5)
    optimizer.param_groups.clear()
    optimizer.state.clear()
    optimizer.add_param_group({"params": model.parameters()})
    assert fully_shard_optimizer(optimizer) is optimizer
    assert optimizer.param_groups[0]["param_names"] == list(weights(model))
    for step in range(3):
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
        reference.zero_grad()
        model.zero_grad()
        scheduler.step()  # made before, over the group that was cleared
        expected_scheduler.step()
        compare_shards(model, weights(model), weights(reference), f"weight after step {step}")
    assert len(optimizer.state) == len(list(model.parameters()))

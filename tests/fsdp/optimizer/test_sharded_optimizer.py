# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch and others update sharded parameters as unsharded ones."""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from megatron.fsdp.optimizer.optimizer_state import elementwise_class
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.optimizers import (
    IN_ONE_GROUP,
    ONE_OF_EACH,
    OPTIMIZERS,
    Signs,
    assert_same_groups,
    sharded_pair,
    sharded_step,
    train_both,
    two_groups,
    unsharded_step,
    weights,
)
from tests.support.fsdp.reference import Ranks, batch, compare_shards, loss_of, on_ranks
from tests.support.fsdp.wrong_calls import Scene, WrongCall, check_refusals, sharded_linear


def step_one_after_the_other(names: Sequence[str]) -> None:
    """Train with one optimizer after the other, each from the first weights."""
    first = models.build("scalars").state_dict()
    reference = models.build("scalars")
    model = fully_shard_model(models.build("scalars"), shard_mesh(), **IN_ONE_GROUP)
    for name in names:
        for each in (reference, model):
            each.load_state_dict(first)
        expected = OPTIMIZERS[name](two_groups(reference))
        optimizer = fully_shard_optimizer(OPTIMIZERS[name](two_groups(model)))
        for step in range(4):
            unsharded_step(reference, expected, step)
            sharded_step(model, optimizer, step)
            what = f"{name}: weight after step {step}"
            compare_shards(model, weights(model), weights(reference), what)
        assert_same_groups(optimizer, expected)


def test_updates_match_the_unsharded_optimizer(ranks: Ranks) -> None:
    ranks(2, step_one_after_the_other, [*ONE_OF_EACH, "adam_maximize", "adadelta_foreach"])


@pytest.mark.always("adamw")
@pytest.mark.parametrize("name", ["adamw", "sgd_dampening", "nadam", "asgd", "rprop"])
def test_state_made_before_sharding_is_kept(ranks: Ranks, name: str) -> None:
    ranks(3, train_both, OPTIMIZERS[name], before=2, level=2)


@on_ranks(2)
def test_state_of_scalars_alone_is_kept() -> None:
    """Shard an optimizer of scalars alone: shapes do not tell moments from counters."""
    for name in ("adamw", "nadam", "asgd"):
        reference, module = models.build("scalars"), models.build("scalars")
        expected, optimizer = (
            OPTIMIZERS[name]([each.temperature, each.scaled.scale]) for each in (reference, module)
        )
        unsharded_step(reference, expected, 0)
        unsharded_step(module, optimizer, 0)
        reference.zero_grad()
        module.zero_grad()
        model, optimizer = fully_shard(module, optimizer, shard_mesh(), **IN_ONE_GROUP)
        for parameter, other in zip(
            optimizer.param_groups[0]["params"], expected.param_groups[0]["params"]
        ):
            slots = optimizer.state[parameter]
            moments = {slot for slot, value in slots.items() if isinstance(value, DTensor)}
            assert moments and moments <= {"exp_avg", "exp_avg_sq", "ax"}
            assert all(
                slots[slot].item() == value.item()
                for slot, value in expected.state[other].items()
                if slot not in moments
            )
        unsharded_step(reference, expected, 1)
        sharded_step(model, optimizer, 1)
        compare_shards(model, weights(model), weights(reference), f"{name}: weight")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
def test_optimizer_made_after_sharding(ranks: Ranks, level: int) -> None:
    ranks(2, train_both, OPTIMIZERS["adamw"], before=0, level=level, made_after=True)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_closures_run_inside_the_step(level: int) -> None:
    reference = models.build("several_units")
    expected = OPTIMIZERS["adamw"](reference.parameters())
    model, optimizer = sharded_pair("several_units", level, sync_model_each_microbatch=False)
    for step in range(3):
        unsharded_step(reference, expected, step)

        x = batch(step, dist.get_rank(), 0)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        before = loss_of(model(x)).detach()
        assert torch.equal(optimizer.step(closure), before)
        compare_shards(model, weights(model), weights(reference), f"weight after step {step}")


def in_sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Return a schedule that begins at a learning rate of nearly nothing."""
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=1e-6, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.5**epoch),
    "warm_up_from_zero": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: epoch / 5),
    "one_cycle": partial(
        lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=5
    ),  # cycles the momentum too
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, mode="max", factor=0.3),
    "sequence": in_sequence,
}


def train_with_scheduler(scheduler_name: str, optimizer_name: str, made_before: bool) -> None:
    """Train with a scheduler; any warning, even torch's about the order of calls, is an error."""
    reference, module = models.build("several_units"), models.build("several_units")
    make, schedule = OPTIMIZERS[optimizer_name], SCHEDULERS[scheduler_name]
    expected, optimizer = make(two_groups(reference)), make(two_groups(module))
    start = [group["lr"] for group in expected.param_groups]
    expected_scheduler = schedule(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter")  # SequentialLR's own
        scheduler = schedule(optimizer) if made_before else None
        model, optimizer = fully_shard(module, optimizer, shard_mesh(), **IN_ONE_GROUP)
        scheduler = scheduler or schedule(optimizer)
        for step in range(4):
            unsharded_step(reference, expected, step)
            sharded_step(model, optimizer, step)
            metric = [1.0] if scheduler_name == "plateau" else []
            expected_scheduler.step(*metric)
            scheduler.step(*metric)
            assert scheduler.get_last_lr() == expected_scheduler.get_last_lr()
            assert_same_groups(optimizer, expected)
            compare_shards(model, weights(model), weights(reference), f"weight after step {step}")
    assert scheduler.get_last_lr() != start


@pytest.mark.always("one_cycle-adamw-*", "sequence-*")
@pytest.mark.parametrize(
    ("scheduler", "optimizer", "made_before"),
    [
        ("lambda", "adamw", True),
        ("warm_up_from_zero", "adamw", False),
        ("one_cycle", "adamw", True),
        ("one_cycle", "sgd_momentum", False),
        ("plateau", "adamw", False),
        ("sequence", "adamw", True),
    ],
)
def test_learning_rate_schedulers_work_without_a_warning(
    ranks: Ranks, scheduler: str, optimizer: str, made_before: bool
) -> None:
    ranks(2, train_with_scheduler, scheduler, optimizer, made_before)


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@on_ranks(2)
def test_step_can_leave_out_reductions_and_installing(level: int) -> None:
    module = models.build("several_units", torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    settings = {
        "fsdp_unit_modules": [ResidualBlock],
        "zero_dp_strategy": level,
        "sync_model_each_microbatch": False,
    }
    model, optimizer = fully_shard(module, optimizer, shard_mesh(), **settings)
    x = batch(0, dist.get_rank(), 0).bfloat16()
    before = {
        key: value.float()
        for key, value in weights(models.build("several_units", torch.bfloat16)).items()
    }
    output = model(x).detach()

    loss_of(model(x)).backward()
    optimizer.step(sync_grad_before_optimizer_step=False)  # nothing is on `param.grad` yet
    compare_shards(model, weights(model), before, "weight without reduction", 0.0)

    optimizer.step(install_optimized_model_weights=False)
    for name, parameter in model.named_parameters():
        assert not torch.equal(
            uneven_dtensor_to_full_tensor(parameter), before[name.removeprefix("module.")]
        ), name
    assert torch.equal(model(x), output)  # the forward still uses the old ones
    model.install_optimized_model_weights()
    assert not torch.equal(model(x), output)


@on_ranks(2)
def test_step_hooks_run_once() -> None:
    model, optimizer = sharded_pair("several_units", sync_model_each_microbatch=False)
    calls = []

    def before(one: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        assert one is optimizer
        assert all(parameter.grad is not None for parameter in model.parameters())  # final
        calls.append("before")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *unused: calls.append("after"))
    sharded_step(model, optimizer, 0)
    assert calls == ["before", "after"]
    optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    )  # after which torch wraps the step of a class once more
    sharded_step(model, optimizer, 1)
    assert calls == ["before", "after"] * 2


@pytest.mark.always("2")
@pytest.mark.parametrize("before", [0, 2])
def test_other_elementwise_optimizers_match_too(ranks: Ranks, before: int) -> None:
    ranks(2, train_both, Signs, before=before, level=3)


@on_ranks(2)
def test_sparse_and_differentiable_updates_are_refused() -> None:
    messages = {}
    for kind in [torch.optim.SparseAdam, partial(torch.optim.AdamW, differentiable=True)]:
        module = models.build("several_units")
        before = list(module.parameters())
        optimizer = kind(module.parameters(), lr=0.1)
        user_class = type(optimizer)
        with pytest.raises(NotImplementedError) as error:
            fully_shard(module, optimizer)
        messages[user_class.__name__] = str(error.value)
        assert type(optimizer) is user_class
        assert all(
            left is right and left.numel() for left, right in zip(module.parameters(), before)
        )
        model = fully_shard_model(module)
        with pytest.raises(NotImplementedError):
            fully_shard_optimizer(kind(model.parameters(), lr=0.1))
    assert len(messages) == 2, messages
    assert all(message.startswith(name) for name, message in messages.items()), messages


def test_a_subclass_with_only_a_constructor_of_its_own_is_the_known_one() -> None:
    class Configured(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)

    class Changed(torch.optim.AdamW):
        def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
            return super().step(closure)

    # Torch wraps the step of a class when its first optimizer is made.
    Configured([nn.Parameter(torch.ones(2))])
    assert elementwise_class(Configured) is torch.optim.AdamW
    assert elementwise_class(Changed) is None
    assert elementwise_class(Signs) is None


def step_replaced(scene: Scene) -> None:
    scene.optimizer.step = lambda: None
    try:
        fully_shard(scene.module, scene.optimizer)
    finally:
        del scene.optimizer.step


WRONG_CALLS: dict[str, WrongCall] = {
    "optimizer is text": WrongCall(
        ("optimizer expects a torch.optim.Optimizer but got str",),
        lambda scene: fully_shard(scene.module, "adam"),
    ),
    "optimizer class": WrongCall(
        ("optimizer expects", "got type"),
        lambda scene: fully_shard(scene.module, torch.optim.AdamW),
    ),
    "optimizer None": WrongCall(
        ("optimizer expects", "NoneType"), lambda scene: fully_shard(scene.module, None)
    ),
    "fully_shard_optimizer given text": WrongCall(
        ("optimizer expects a torch.optim.Optimizer but got str",),
        lambda scene: fully_shard_optimizer("adam"),
    ),
    "optimizer of another model": WrongCall(
        ("2 parameters of the optimizer are none of the module's",),
        lambda scene: fully_shard(scene.module, torch.optim.SGD(nn.Linear(2, 2).parameters())),
    ),
    "optimizer over unsharded parameters": WrongCall(
        ("belong to no sharded model", "after fully_shard_model"),
        lambda scene: fully_shard_optimizer(scene.optimizer),
    ),
    "optimizer made before the model was sharded": WrongCall(
        ("belong to no sharded model", "hand both to fully_shard"),
        lambda scene: (
            lambda linear, optimizer: (fully_shard_model(linear), fully_shard_optimizer(optimizer))
        )(*(lambda linear: (linear, torch.optim.SGD(linear.parameters())))(nn.Linear(2, 2))),
    ),
    "optimizer sharded twice": WrongCall(
        ("sharded already",), lambda scene: fully_shard_optimizer(sharded_linear()[1])
    ),
    "optimizer with a step of its own": WrongCall(
        ("step was replaced", "before that"), step_replaced
    ),
    "param group of strangers": WrongCall(
        ("belong to no sharded model",),
        lambda scene: sharded_linear()[1].add_param_group(
            {"params": [nn.Parameter(torch.ones(2))]}
        ),
    ),
}


def test_wrong_calls_are_refused_alike_on_every_rank(ranks: Ranks) -> None:
    check_refusals(ranks, __name__)

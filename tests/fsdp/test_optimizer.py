# SPDX-License-Identifier: Apache-2.0
"""A sharded optimizer is the user's own: the same numbers, groups, hyper-parameters, state and manners."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from megatron.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron.fsdp.dtensor.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.fsdp import models
from tests.fsdp.models import Block
from tests.fsdp.reference import TOLERANCE, batch, close, compare_pieces, loss_of, shard_mesh

Ranks = Callable[..., list[Any]]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True, weight_decay=0.01),
    "adam_maximize": partial(torch.optim.Adam, lr=0.02, maximize=True),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd_foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "sgd_dampening": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01
    ),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "rmsprop_foreach": partial(torch.optim.RMSprop, lr=0.01, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=0.02),
    "nadam": partial(torch.optim.NAdam, lr=0.02),
    "radam": partial(torch.optim.RAdam, lr=0.02),
    "asgd": partial(torch.optim.ASGD, lr=0.01, t0=1),
    "adamw_single": partial(torch.optim.AdamW, lr=0.02, amsgrad=True, foreach=False),
    "adamw_tensor_rate": partial(torch.optim.AdamW, lr=torch.tensor(0.02)),
    "adamw_fused_tensor_rate": partial(
        torch.optim.AdamW, lr=torch.tensor(0.02), fused=True, amsgrad=True
    ),
    "adam_fused": partial(torch.optim.Adam, lr=0.02, fused=True, maximize=True, weight_decay=0.1),
    "sgd_fused": partial(torch.optim.SGD, lr=0.05, fused=True),
    "sgd_fused_nesterov": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, fused=True
    ),
    "sgd_single": partial(torch.optim.SGD, lr=0.05, momentum=0.9, maximize=True, foreach=False),
    "sgd_tensor_rate": partial(torch.optim.SGD, lr=torch.tensor(0.05), momentum=0.9),
    "adagrad_fused": partial(torch.optim.Adagrad, lr=0.05, fused=True),
    "adagrad_foreach": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.1, foreach=True),
    "rmsprop_tensor_rate": partial(
        torch.optim.RMSprop, lr=torch.tensor(0.01), momentum=0.5, foreach=False
    ),
    "adadelta_foreach": partial(torch.optim.Adadelta, lr=0.5, foreach=True, maximize=True),
    "adamax_foreach": partial(torch.optim.Adamax, lr=0.02, foreach=True),
    "nadam_decoupled": partial(
        torch.optim.NAdam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "radam_foreach": partial(torch.optim.RAdam, lr=0.02, foreach=True),
    "asgd_foreach": partial(torch.optim.ASGD, lr=0.01, foreach=True),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "rprop_foreach": partial(torch.optim.Rprop, lr=0.01, foreach=True),
}
FLOAT64 = MixedPrecisionPolicy(main_params_dtype=None)


def sharding(module: nn.Module, level: int = 3) -> dict[str, Any]:
    return {
        "fsdp_unit_modules": type(module).units,
        "zero_dp_strategy": level,
        "mixed_precision_policy": FLOAT64,
    }


IN_ONE_GROUP = {"disable_bucketing": True, "mixed_precision_policy": FLOAT64}
"""Quick, for tests that do not care how a model is divided into units."""


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with the optimizer's defaults, vectors with a learning rate of their own."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {
            "params": [parameter for parameter in parameters if parameter.dim() <= 1],
            "lr": 0.003,
            "mark": "vectors",
        },
    ]


def unsharded_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    world_size = dist.get_world_size()
    (
        sum(loss_of(model(batch(step, rank, 0))) for rank in range(world_size)) / world_size
    ).backward()
    optimizer.step()


def sharded_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = loss_of(model(batch(step, dist.get_rank(), 0)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_both(
    make: Callable[..., torch.optim.Optimizer],
    before: int,
    level: int | None,
    made_after: bool = False,
) -> None:
    """Four steps; the first `before` of them unsharded on both sides, so that state exists when the optimizer is sharded."""
    reference, module = models.build("scalars"), models.build("scalars")
    settings = IN_ONE_GROUP if level is None else sharding(module, level)
    expected = make(two_groups(reference))
    if made_after:
        model = fully_shard_model(module, shard_mesh(), **settings)
        optimizer = fully_shard_optimizer(make(two_groups(model)))
    else:
        optimizer = make(two_groups(module))
        for step in range(before):
            unsharded_step(reference, expected, step)
            unsharded_step(module, optimizer, step)
        optimizer.zero_grad()
        model, same = fully_shard(module, optimizer, shard_mesh(), **settings)
        assert same is optimizer
    for step in range(before, 4):
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
        compare_pieces(
            model, weights(model), weights(reference), f"weight after step {step}", TOLERANCE
        )
    assert_same_groups(optimizer, expected)


def assert_same_groups(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    assert len(actual.param_groups) == len(expected.param_groups)
    for mine, other in zip(actual.param_groups, expected.param_groups):
        settings = {key: value for key, value in other.items() if key != "params"}
        assert {key: mine[key] for key in settings} == settings
        assert len(mine["params"]) == len(other["params"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_match_the_unsharded_optimizer(ranks: Ranks, name: str) -> None:
    ranks(2, train_both, OPTIMIZERS[name], before=0, level=None)


KEPT = [
    "adamw",
    "sgd_momentum",
    "sgd_dampening",
    "adagrad",
    "adagrad_fused",
    "adadelta",
    "nadam",
    "asgd",
    "rprop",
]


@pytest.mark.parametrize("name", KEPT)
def test_state_made_before_sharding_is_kept(ranks: Ranks, name: str) -> None:
    ranks(3, train_both, OPTIMIZERS[name], before=2, level=2)


def keep_state_of_scalars() -> None:
    """An optimizer of nothing else: shapes do not tell moments from counters."""
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
        compare_pieces(model, weights(model), weights(reference), f"{name}: weight")


def test_state_of_scalars_alone_is_kept(ranks: Ranks) -> None:
    ranks(2, keep_state_of_scalars)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_optimizer_made_after_sharding(ranks: Ranks, level: int) -> None:
    ranks(2, train_both, OPTIMIZERS["adamw"], before=0, level=level, made_after=True)


def sharded_pair(
    name: str = "scalars", level: int = 3, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build(name)
    return fully_shard(
        module,
        OPTIMIZERS["adamw"](module.parameters()),
        shard_mesh(),
        **{**sharding(module, level), **settings},
    )


def clip_norms(name: str, level: int, max_norm: float, norms: list[float]) -> None:
    """Norm and clipped gradients, by torch's own function on both sides."""
    reference = models.build(name)
    model, _ = sharded_pair(name, level)
    world_size = dist.get_world_size()
    for kind in norms:
        reference.zero_grad()
        (
            sum(loss_of(reference(batch(0, rank, 0))) for rank in range(world_size)) / world_size
        ).backward()
        for parameter in reference.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        model.zero_grad()
        loss_of(model(batch(0, dist.get_rank(), 0))).backward()
        assert all(
            parameter.grad is not None
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type=kind)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=kind)
        close(
            norm.full_tensor() if isinstance(norm, DTensor) else norm,
            expected,
            f"norm {kind}",
            1e-6,
        )
        trainable = {
            key: parameter.grad
            for key, parameter in reference.named_parameters()
            if parameter.requires_grad
        }
        actual = {
            key: parameter.grad
            for key, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        compare_pieces(model, actual, trainable, "clipped gradient", 1e-6)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["scalars", "frozen_in_part", "unused_parameters"])
def test_clip_grad_norm_is_torchs_own(ranks: Ranks, name: str, level: int) -> None:
    """On four ranks, some of which own nothing of a parameter."""
    ranks(4, clip_norms, name, level, max_norm=0.05, norms=[2.0, 1.0, 3.0])


def step_with_closure(level: int) -> None:
    reference = models.build("several_units")
    expected = OPTIMIZERS["adamw"](reference.parameters())
    model, optimizer = sharded_pair("several_units", level, sync_model_each_microbatch=False)
    for step in range(3):
        unsharded_step(reference, expected, step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(batch(step, dist.get_rank(), 0)))
            loss.backward()
            return loss

        before = loss_of(model(batch(step, dist.get_rank(), 0))).detach()
        assert torch.equal(optimizer.step(closure), before)
        compare_pieces(model, weights(model), weights(reference), f"weight after step {step}")


@pytest.mark.parametrize("level", [1, 3])
def test_closures_run_inside_the_step(ranks: Ranks, level: int) -> None:
    ranks(2, step_with_closure, level)


def in_sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Begins at a learning rate of nearly nothing."""
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
    """Any warning, torch's about the order of calls included, is an error."""
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
            compare_pieces(model, weights(model), weights(reference), f"weight after step {step}")
    assert scheduler.get_last_lr() != start


@pytest.mark.parametrize("made_before", [True, False], ids=["before_sharding", "after_sharding"])
@pytest.mark.parametrize(
    ("scheduler", "optimizer"),
    [*((scheduler, "adamw") for scheduler in SCHEDULERS), ("one_cycle", "sgd_momentum")],
)
def test_learning_rate_schedulers_work_without_a_warning(
    ranks: Ranks, scheduler: str, optimizer: str, made_before: bool
) -> None:
    ranks(2, train_with_scheduler, scheduler, optimizer, made_before)


def replace_step() -> str:
    module = models.build("several_units")
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match="replaced on the instance") as error:
        fully_shard(module, optimizer)
    return str(error.value)


def test_a_step_replaced_on_the_instance_is_refused(ranks: Ranks) -> None:
    """It would never put new weights into the model."""
    ranks(1, replace_step)


def look_at_fresh_state(level: int) -> None:
    """State exists, is zero and says step 0; making it has moved no weight."""
    reference = weights(models.build("frozen_in_part"))
    model, optimizer = sharded_pair("frozen_in_part", level)
    compare_pieces(model, weights(model), reference, "weight", 0.0)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert list(optimizer.state) == trainable
    for parameter in trainable:
        slots = optimizer.state[parameter]
        assert sorted(slots) == ["exp_avg", "exp_avg_sq", "step"]
        assert slots["step"].item() == 0
        for name in ("exp_avg", "exp_avg_sq"):
            assert slots[name].shape == parameter.shape
            assert slots[name].to_local().shape == parameter.to_local().shape
            assert not slots[name].to_local().any()


@pytest.mark.parametrize("level", [0, 3])
def test_state_exists_at_once(ranks: Ranks, level: int) -> None:
    ranks(2, look_at_fresh_state, level)


def step_with_keywords(level: int) -> None:
    module = models.build("several_units", torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    settings = {
        "fsdp_unit_modules": [Block],
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
    compare_pieces(model, weights(model), before, "weight without reduction", 0.0)

    optimizer.step(install_optimized_model_weights=False)
    for name, parameter in model.named_parameters():
        assert not torch.equal(
            uneven_dtensor_to_full_tensor(parameter), before[name.removeprefix("module.")]
        ), name
    assert torch.equal(model(x), output)  # the forward still uses the old ones
    model.install_optimized_model_weights()
    assert not torch.equal(model(x), output)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_step_can_leave_out_reductions_and_installing(ranks: Ranks, level: int) -> None:
    ranks(2, step_with_keywords, level)


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    if way == "optimizer":
        optimizer.zero_grad()
    elif way == "zeros":
        optimizer.zero_grad(set_to_none=False)
    elif way == "model":
        model.zero_grad()
    elif way == "torch":
        torch.optim.Optimizer.zero_grad(optimizer)
    else:
        for parameter in model.parameters():
            parameter.grad = None


def backward_after_clearing(level: int, way: str) -> None:
    """A cleared gradient does not come back, one that was not cleared is added to; in fp32 for bf16 weights too."""
    for dtype in (torch.float64, torch.bfloat16):
        module = models.build("several_units", dtype)
        precision = MixedPrecisionPolicy(None if dtype == torch.float64 else torch.float32)
        optimizer = torch.optim.AdamW(module.parameters())
        model, optimizer = fully_shard(
            module,
            optimizer,
            shard_mesh(),
            **{**sharding(module, level), "mixed_precision_policy": precision},
        )
        x = batch(0, dist.get_rank(), 0).to(dtype)

        def gradients() -> dict[str, Tensor]:
            loss_of(model(x)).backward()
            return {
                name: parameter.grad.to_local().clone()
                for name, parameter in model.named_parameters()
            }

        once, twice = gradients(), gradients()
        clear_gradients(model, optimizer, way)
        again = gradients()
        for name, gradient in once.items():
            assert torch.equal(again[name], gradient), f"{dtype} {name} after {way}"
            assert torch.equal(twice[name], 2 * gradient), f"{dtype} {name}"


@pytest.mark.parametrize("way", ["optimizer", "zeros", "model", "torch", "by_hand"])
def test_cleared_gradients_do_not_come_back(ranks: Ranks, way: str) -> None:
    for level in (0, 2, 3):
        ranks(2, backward_after_clearing, level, way)


def keep_the_buffer(level: int) -> None:
    model, optimizer = sharded_pair("several_units", level, sync_model_each_microbatch=False)
    x = batch(0, dist.get_rank(), 0)
    loss_of(model(x)).backward()
    optimizer.zero_grad(zero_grad_buffer=False)
    model.finish_grad_sync()
    assert all(
        parameter.grad.to_local().any()
        for parameter in model.parameters()
        if parameter.to_local().numel()
    )
    loss_of(model(x)).backward()
    optimizer.zero_grad()
    model.finish_grad_sync()
    assert not any(parameter.grad.to_local().any() for parameter in model.parameters())


@pytest.mark.parametrize("level", [1, 3])
def test_zero_grad_clears_what_has_accumulated_unless_told_otherwise(
    ranks: Ranks, level: int
) -> None:
    ranks(2, keep_the_buffer, level)


def scale_gradients(level: int) -> None:
    for sync in (True, False):
        model, _ = sharded_pair("several_units", level, sync_model_each_microbatch=sync)
        x = batch(0, dist.get_rank(), 0)
        loss_of(model(x)).backward()
        model.finish_grad_sync()
        once = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        model.scale_gradients(0.25)
        for gradient, parameter in zip(once, model.parameters()):
            assert torch.equal(parameter.grad.to_local(), 0.25 * gradient)


@pytest.mark.parametrize("level", [0, 3])
def test_scale_gradients_multiplies_what_the_optimizer_sees(ranks: Ranks, level: int) -> None:
    ranks(2, scale_gradients, level)


def grow_by_a_group(name: str, named: bool) -> None:
    """Half of the parameters join after two steps, with settings of their own."""
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
        compare_pieces(model, weights(model), weights(reference), f"weight after step {step}")
    assert [name for group in optimizer.param_groups for name in group["param_names"]] == list(
        weights(model)
    )


@pytest.mark.parametrize(("name", "named"), [("adamw", True), ("adamw", False), ("adagrad", False)])
def test_param_groups_may_be_added_after_sharding(ranks: Ranks, name: str, named: bool) -> None:
    ranks(2, grow_by_a_group, name, named)


def add_what_does_not_belong() -> list[str]:
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
    return messages


def test_param_groups_of_other_parameters_are_refused(ranks: Ranks) -> None:
    (messages,) = ranks(1, add_what_does_not_belong)
    assert ["take them from model.parameters()" in message for message in messages] == [
        True,
        True,
        False,
    ]
    assert "more than one parameter group" in messages[2]


def train_two_models(level: int) -> None:
    """One optimizer over two models, with frozen parameters in its groups."""
    names = ("several_units", "frozen_in_part")
    references = [models.build(name) for name in names]
    mesh = shard_mesh()
    sharded = [
        fully_shard_model(models.build(name), mesh, **sharding(each, level))
        for name, each in zip(names, references)
    ]
    expected = OPTIMIZERS["adamw"](
        [parameter for each in references for parameter in each.parameters()]
    )
    optimizer = fully_shard_optimizer(
        OPTIMIZERS["adamw"]([parameter for each in sharded for parameter in each.parameters()])
    )
    for step in range(3):
        expected.zero_grad()
        for rank in range(dist.get_world_size()):
            loss = sum(loss_of(each(batch(step, rank, 0))) for each in references)
            (loss / dist.get_world_size()).backward()
        expected.step()
        sum(loss_of(each(batch(step, dist.get_rank(), 0))) for each in sharded).backward()
        optimizer.step()
        optimizer.zero_grad()
        for model, reference in zip(sharded, references):
            compare_pieces(model, weights(model), weights(reference), f"weight after step {step}")


@pytest.mark.parametrize("level", [1, 3])
def test_one_optimizer_may_have_several_models(ranks: Ranks, level: int) -> None:
    ranks(2, train_two_models, level)


def train_with_two_optimizers(level: int, main_grads: torch.dtype | None, auto_sync: bool) -> None:
    """Each clears its gradients right after its step; a third of the parameters is in neither, and theirs add up."""
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
        world_size = dist.get_world_size()
        (
            sum(loss_of(reference(batch(step, rank, 0))) for rank in range(world_size)) / world_size
        ).backward()
        loss_of(model(batch(step, dist.get_rank(), 0))).backward()
        for one, other in zip(optimizers, expected):
            one.step()
            one.zero_grad(set_to_none=step != 1)
            other.step()
            other.zero_grad()
        compare_pieces(
            model, weights(model), weights(reference), f"weight after step {step}", tolerance
        )
        rest = list(reference.named_parameters())[2::3]
        gradients = {
            "module." + name: dict(model.named_parameters())["module." + name].grad
            for name, _ in rest
        }
        compare_pieces(
            model,
            gradients,
            {name: p.grad for name, p in rest},
            "gradient in no optimizer",
            tolerance,
        )


@pytest.mark.parametrize(
    "main_grads", [None, torch.float32], ids=["same_dtype", "gradients_in_fp32"]
)
@pytest.mark.parametrize(
    ("level", "auto_sync"), [(1, True), (1, False), (3, True)], ids=["1", "1_in_step", "3"]
)
def test_one_model_may_have_several_optimizers(
    ranks: Ranks, level: int, auto_sync: bool, main_grads: torch.dtype | None
) -> None:
    ranks(2, train_with_two_optimizers, level, main_grads, auto_sync)


def scale_and_overflow(fused: bool) -> None:
    """Scaled losses train as plain ones; a step in which one rank overflows is left out by all."""
    reference, module = models.build("scalars"), models.build("scalars")
    expected = torch.optim.AdamW(reference.parameters(), lr=0.02)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.02, fused=fused),
        shard_mesh(),
        **sharding(module),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        scaler.scale(loss_of(model(batch(step, dist.get_rank(), 0)))).backward()
        if step == 1 and dist.get_rank() == 1:
            next(p.grad for p in model.parameters() if p.grad.to_local().numel()).to_local().fill_(
                torch.inf
            )
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        if step != 1:
            unsharded_step(reference, expected, step)
        compare_pieces(
            model, weights(model), weights(reference), f"weight after step {step}", TOLERANCE
        )


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_grad_scaler_skips_a_step_on_all_ranks(ranks: Ranks, fused: bool) -> None:
    ranks(2, scale_and_overflow, fused)


def count_hooks() -> None:
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


def test_step_hooks_run_once(ranks: Ranks) -> None:
    ranks(2, count_hooks)


class Signs(torch.optim.Optimizer):
    """A stranger: element-wise, assigns by mask, and counts in tensors."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["turns"], state["average"] = (
                        torch.tensor(0.0),
                        torch.zeros_like(parameter),
                    )
                state["turns"] += 1
                state["average"].lerp_(parameter.grad, 0.5)
                update = state["average"].sign() / state["turns"]
                update[update < 0] = 0.5
                parameter.sub_(group["lr"] * update)


@pytest.mark.parametrize("before", [0, 2])
def test_other_elementwise_optimizers_match_too(ranks: Ranks, before: int) -> None:
    ranks(2, train_both, Signs, before=before, level=3)


class TrustRatio(Signs):
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad * parameter.norm())


class Muon(torch.optim.SGD):
    """Known by its name: the real one orthogonalises matrices."""


def refusals() -> dict[str, str]:
    messages = {}
    kinds = [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, Muon, TrustRatio]
    for kind in [*kinds, partial(torch.optim.AdamW, differentiable=True)]:
        module = models.build("several_units")
        before = list(module.parameters())
        optimizer = kind(module.parameters(), lr=0.1)
        with pytest.raises(NotImplementedError) as error:
            fully_shard(module, optimizer)
        messages[type(optimizer).__name__] = str(error.value)
        assert all(
            left is right and left.numel() for left, right in zip(module.parameters(), before)
        )
        assert type(optimizer).__module__ in (
            __name__,
            kind.__module__ if isinstance(kind, type) else "torch.optim.adamw",
        )
        model = fully_shard_model(module)
        with pytest.raises(NotImplementedError):
            fully_shard_optimizer(kind(model.parameters(), lr=0.1))
    return messages


def test_optimizers_that_need_whole_matrices_are_refused(ranks: Ranks) -> None:
    for messages in ranks(2, refusals):
        assert len(messages) == 6
        assert all(message.startswith(name) for name, message in messages.items())


# The largest element: torch cannot take it of a piece of size zero; gradients must answer for
# themselves.
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["scalars", "frozen_in_part", "unused_parameters"])
def test_clip_grad_norm_by_the_largest_element(ranks: Ranks, name: str, level: int) -> None:
    """On four ranks, some of which own nothing of a parameter."""
    ranks(4, clip_norms, name, level, max_norm=0.05, norms=[torch.inf])

# SPDX-License-Identifier: Apache-2.0
"""A sharded optimizer is the user's own: the same numbers, groups, hyper-parameters, state and manners."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron.fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
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
    "sgd_dampening": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "rmsprop_foreach": partial(torch.optim.RMSprop, lr=0.01, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=0.02),
    "nadam": partial(torch.optim.NAdam, lr=0.02),
    "radam": partial(torch.optim.RAdam, lr=0.02),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
}
FLOAT64 = MixedPrecisionPolicy(main_params_dtype=None)


def sharding(module: nn.Module, level: int = 3) -> dict[str, Any]:
    return {"fsdp_unit_modules": type(module).units, "zero_dp_strategy": level, "mixed_precision_policy": FLOAT64}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with the optimizer's defaults, vectors with a learning rate of their own."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "lr": 0.003, "mark": "vectors"},
    ]


def unsharded_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    world_size = dist.get_world_size()
    (sum(loss_of(model(batch(step, rank, 0))) for rank in range(world_size)) / world_size).backward()
    optimizer.step()


def sharded_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = loss_of(model(batch(step, dist.get_rank(), 0)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_both(make: Callable[..., torch.optim.Optimizer], before: int, level: int, made_after: bool = False) -> None:
    """Five steps; the first `before` of them unsharded on both sides, so that state exists when the optimizer is sharded."""
    reference, module = models.build("scalars"), models.build("scalars")
    expected = make(two_groups(reference))
    if made_after:
        model = fully_shard_model(module, shard_mesh(), **sharding(module, level))
        optimizer = fully_shard_optimizer(make(two_groups(model)))
    else:
        optimizer = make(two_groups(module))
        for step in range(before):
            unsharded_step(reference, expected, step)
            unsharded_step(module, optimizer, step)
        optimizer.zero_grad()
        model, same = fully_shard(module, optimizer, shard_mesh(), **sharding(module, level))
        assert same is optimizer
    for step in range(before, 5):
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
        compare_pieces(model, weights(model), weights(reference), f"weight after step {step}", TOLERANCE)
    assert_same_groups(optimizer, expected)


def assert_same_groups(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    assert len(actual.param_groups) == len(expected.param_groups)
    for mine, other in zip(actual.param_groups, expected.param_groups):
        settings = {key: value for key, value in other.items() if key != "params"}
        assert {key: mine[key] for key in settings} == settings
        assert len(mine["params"]) == len(other["params"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_match_the_unsharded_optimizer(ranks: Ranks, name: str) -> None:
    ranks(2, train_both, OPTIMIZERS[name], before=0, level=3)


@pytest.mark.parametrize("name", ["adamw", "sgd_dampening", "adagrad", "adadelta"])
def test_state_made_before_sharding_is_kept(ranks: Ranks, name: str) -> None:
    ranks(3, train_both, OPTIMIZERS[name], before=2, level=2)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_optimizer_made_after_sharding(ranks: Ranks, level: int) -> None:
    ranks(2, train_both, OPTIMIZERS["adamw"], before=0, level=level, made_after=True)


def sharded_pair(name: str = "scalars", level: int = 3, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build(name)
    return fully_shard(module, OPTIMIZERS["adamw"](module.parameters()), shard_mesh(), **{**sharding(module, level), **settings})


def clip_norms(name: str, level: int, max_norm: float) -> None:
    """Norm and clipped gradients, by torch's own function on both sides."""
    reference = models.build(name)
    model, _ = sharded_pair(name, level)
    world_size = dist.get_world_size()
    for kind in (2.0, 1.0):  # torch refuses the largest element of a piece of size zero
        reference.zero_grad()
        (sum(loss_of(reference(batch(0, rank, 0))) for rank in range(world_size)) / world_size).backward()
        for parameter in reference.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        model.zero_grad()
        loss_of(model(batch(0, dist.get_rank(), 0))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type=kind)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=kind)
        close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected, f"norm {kind}", 1e-6)
        trainable = {key: parameter.grad for key, parameter in reference.named_parameters() if parameter.requires_grad}
        actual = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
        compare_pieces(model, actual, trainable, "clipped gradient", 1e-6)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["scalars", "frozen_in_part", "unused_parameters"])
def test_clip_grad_norm_is_torchs_own(ranks: Ranks, name: str, level: int) -> None:
    """On four ranks, some of which own nothing of a parameter."""
    ranks(4, clip_norms, name, level, max_norm=0.05)


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


def train_with_scheduler(made_before: bool) -> None:
    """Any warning, torch's about the order of calls included, is an error."""
    reference, module = models.build("several_units"), models.build("several_units")
    expected, optimizer = OPTIMIZERS["adamw"](reference.parameters()), OPTIMIZERS["adamw"](module.parameters())
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.5**epoch)
    expected_scheduler = schedule(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = schedule(optimizer) if made_before else None
        model, optimizer = fully_shard(module, optimizer, shard_mesh(), **sharding(module))
        scheduler = scheduler or schedule(optimizer)
        for step in range(4):
            unsharded_step(reference, expected, step)
            sharded_step(model, optimizer, step)
            expected_scheduler.step()
            scheduler.step()
            assert scheduler.get_last_lr() == expected_scheduler.get_last_lr()
            assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in expected.param_groups]
            compare_pieces(model, weights(model), weights(reference), f"weight after step {step}")


@pytest.mark.parametrize("made_before", [True, False], ids=["before_sharding", "after_sharding"])
def test_learning_rate_schedulers_work_without_a_warning(ranks: Ranks, made_before: bool) -> None:
    ranks(2, train_with_scheduler, made_before)


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
    settings = {"fsdp_unit_modules": [Block], "zero_dp_strategy": level, "sync_model_each_microbatch": False}
    model, optimizer = fully_shard(module, optimizer, shard_mesh(), **settings)
    x = batch(0, dist.get_rank(), 0).bfloat16()
    before = {key: value.float() for key, value in weights(models.build("several_units", torch.bfloat16)).items()}
    output = model(x).detach()

    loss_of(model(x)).backward()
    optimizer.step(sync_grad_before_optimizer_step=False)  # nothing is on `param.grad` yet
    compare_pieces(model, weights(model), before, "weight without reduction", 0.0)

    optimizer.step(install_optimized_model_weights=False)
    for name, parameter in model.named_parameters():
        assert not torch.equal(uneven_dtensor_to_full_tensor(parameter), before[name.removeprefix("module.")]), name
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
            module, optimizer, shard_mesh(), **{**sharding(module, level), "mixed_precision_policy": precision}
        )
        x = batch(0, dist.get_rank(), 0).to(dtype)

        def gradients() -> dict[str, Tensor]:
            loss_of(model(x)).backward()
            return {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}

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
    assert all(parameter.grad.to_local().any() for parameter in model.parameters() if parameter.to_local().numel())
    loss_of(model(x)).backward()
    optimizer.zero_grad()
    model.finish_grad_sync()
    assert not any(parameter.grad.to_local().any() for parameter in model.parameters())


@pytest.mark.parametrize("level", [1, 3])
def test_zero_grad_clears_what_has_accumulated_unless_told_otherwise(ranks: Ranks, level: int) -> None:
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


class Muon(torch.optim.SGD):
    """Known by its name: the real one orthogonalises matrices."""


def refusals() -> dict[str, str]:
    messages = {}
    kinds = {"Adafactor": torch.optim.Adafactor, "LBFGS": torch.optim.LBFGS, "Muon": Muon}
    for name, kind in kinds.items():
        module = models.build("several_units")
        before = list(module.parameters())
        with pytest.raises(NotImplementedError) as error:
            fully_shard(module, kind(module.parameters(), lr=0.1))
        messages[name] = str(error.value)
        assert all(left is right and left.numel() for left, right in zip(module.parameters(), before))
        with pytest.raises(NotImplementedError):
            model = fully_shard_model(module)
            fully_shard_optimizer(kind(model.parameters(), lr=0.1))
    return messages


def test_optimizers_that_need_whole_matrices_are_refused(ranks: Ranks) -> None:
    for messages in ranks(2, refusals):
        assert all(name in message for name, message in messages.items())

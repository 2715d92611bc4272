# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch train FullyShardedDataParallel; Megatron-Core's others are refused."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.mcore_adapter import FullyShardedDataParallel, core_optimizers
from megatron.mcore_adapter.precision_aware import unscaled_moments
from megatron.pretrain.arguments.configs import ddp_config
from tests.support.mcore_adapter.wrapped_models import assert_same, backward, make_module
from tests.support.pairwise import each_value
from tests.support.pretrain.parity import LEVELS
from tests.support.rank_pool import run_ranks


def wrapped(strategy: str) -> tuple[FullyShardedDataParallel, torch.nn.Module]:
    """Return a wrapper without use_distributed_optimizer, and an equal model without one."""
    args, config, module = make_module(f"--data-parallel-sharding-strategy {strategy}")
    _, _, plain = make_module()
    plain.load_state_dict(module.state_dict())
    settings = ddp_config(args)
    settings.use_distributed_optimizer = False
    return FullyShardedDataParallel(config=config, ddp_config=settings, module=module), plain


def train_with_torch(strategy: str) -> list[dict[str, torch.Tensor]]:
    """Job: weights after three steps of torch's Adam, sharded and on a plain copy."""
    model, plain = wrapped(strategy)
    ours = torch.optim.Adam(model.parameters(), lr=1e-2)
    theirs = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(3):
        model.zero_grad_buffer()
        backward(model, step)
        ours.step()
        theirs.zero_grad()
        backward(plain, step)
        average_gradients(plain)
        theirs.step()
    return weights_of_both(model, plain)


def average_gradients(plain: torch.nn.Module) -> None:
    for parameter in plain.parameters():
        torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)


def weights_of_both(
    model: FullyShardedDataParallel, plain: torch.nn.Module
) -> list[dict[str, torch.Tensor]]:
    """Return the weights of the sharded and of the plain model by the same names."""
    expected = {f"module.module.{name}": each.detach() for name, each in plain.named_parameters()}
    return [{name: full_tensor(each) for name, each in model.named_parameters()}, expected]


@pytest.mark.always("optim_grads_params")
@pytest.mark.parametrize("strategy", LEVELS)
def test_an_optimizer_of_torch_trains_like_an_unsharded_model(strategy: str) -> None:
    for found, expected in run_ranks(2, train_with_torch, strategy):
        # Adam divides by the root of small squares, so differences of gradients grow.
        assert_same(found, expected, relative=1e-4)


def take_steps(way: str, model: torch.nn.Module, reduce: Callable[[], None] = lambda: None) -> None:
    """Take two steps as programs of torch write them; `reduce` follows the backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(2):

        def closure(step: int = step) -> None:
            optimizer.zero_grad()
            if way == "accumulated":
                with getattr(model, "no_sync", nullcontext)():
                    backward(model, step + 10)
            backward(model, step)
            reduce()
            if way != "accumulated":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        if way == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def train_in_a_way(strategy: str, way: str) -> list[dict[str, torch.Tensor]]:
    """Job: weights after two steps, sharded and on a plain copy."""
    model, plain = wrapped(strategy)
    take_steps(way, model)
    take_steps(way, plain, lambda: average_gradients(plain))
    return weights_of_both(model, plain)


@pytest.mark.always("optim-clipped")
@pytest.mark.parametrize(
    ("strategy", "way"),
    each_value(
        always=[("optim_grads_params", "accumulated"), ("optim", "clipped")],
        strategy=LEVELS,
        way=["clipped", "closure", "accumulated"],
    ),
)
def test_gradients_are_final_after_backward_as_with_an_unsharded_model(
    strategy: str, way: str
) -> None:
    for found, expected in run_ranks(2, train_in_a_way, strategy, way):
        assert_same(found, expected, relative=1e-4)


def build_other_optimizer(precision: dict[str, Any]) -> str:
    """Job: the error of building Megatron-Core's optimizer without sharding."""
    model, _ = wrapped("optim_grads_params")
    settings = {"optimizer": "adam", "lr": 1e-3, "use_distributed_optimizer": False}
    try:
        get_megatron_optimizer(OptimizerConfig(**settings, **precision), [model])
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_optimizers_that_would_train_on_stale_weights_are_refused(
    precision: dict[str, Any],
) -> None:
    for message in run_ranks(2, build_other_optimizer, precision):
        assert "stale weights" in message
        assert "set use_distributed_optimizer in OptimizerConfig" in message


def test_an_optimizer_of_unsharded_weights_is_built_by_keyword() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    built = []

    def original(optimizer_of_core: Any, optimizer: Any, config: Any = None) -> None:
        built.append((optimizer_of_core, optimizer, config))

    init = core_optimizers._refusing_init(original)
    init("self", optimizer=inner, config="config")
    init("self", inner, "config")
    assert built == [("self", inner, "config")] * 2


def hook_of_a_model_that_is_gone() -> tuple[bool, bool]:
    """Job: whether torch's hook for a model is removed while it lives, and afterwards."""
    with patch.object(core_optimizers, "register_optimizer_step_post_hook") as register:
        model, _ = wrapped("optim_grads_params")
        before = register.return_value.remove.called
        del model
        gc.collect()
        return before, register.return_value.remove.called


def test_a_model_that_is_gone_is_not_followed() -> None:
    assert run_ranks(1, hook_of_a_model_that_is_gone) == [(False, True)]


def test_checkpoints_take_any_number_of_optimizers_in_a_chain() -> None:
    parts: list[Any] = [SimpleNamespace(config=None, optimizer=None)] * 2
    for number in range(3):
        with unscaled_moments(ChainedOptimizer(parts[:number])):
            pass


def test_fused_optimizers_without_state_before_a_step_count_steps_alone() -> None:
    inner = SimpleNamespace(param_groups=[{"betas": (0.9, 0.95)}, {}])
    part: Any = SimpleNamespace(optimizer=inner, init_state_fn=None, config=None)
    core_optimizers.make_optimizer_state(part)
    assert [group.get("step") for group in inner.param_groups] == [0, None]

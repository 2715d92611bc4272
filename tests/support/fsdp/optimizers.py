# SPDX-License-Identifier: Apache-2.0
"""Optimizers in many settings, stepped with and without sharding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.reference import TOLERANCE, batch, compare_shards, loss_of, mean_loss

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True, weight_decay=0.01),
    "adam_maximize": partial(torch.optim.Adam, lr=0.02, maximize=True),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
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
    "sgd_fused_nesterov": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, fused=True
    ),
    "adagrad_fused": partial(torch.optim.Adagrad, lr=0.05, fused=True),
    "adadelta_foreach": partial(torch.optim.Adadelta, lr=0.5, foreach=True, maximize=True),
    "nadam_decoupled": partial(
        torch.optim.NAdam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "rprop_foreach": partial(torch.optim.Rprop, lr=0.01, foreach=True),
}

ONE_OF_EACH = (
    *("adamw", "adamw_fused", "adamw_tensor_rate", "adam_amsgrad", "sgd", "sgd_dampening"),
    *("sgd_fused_nesterov", "rmsprop", "rmsprop_foreach", "adagrad", "adagrad_fused"),
    *("adadelta", "adamax", "nadam", "radam", "asgd", "rprop"),
)
"""Every class, and every kind of implementation and state; the others differ in a setting."""

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
    """Return a group of matrices, and one of vectors with a learning rate of their own."""
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
    mean_loss(model, step).backward()
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
    """Compare four steps, the first `before` of which are taken before sharding.

    State therefore exists when the optimizer is sharded.
    """
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
        compare_shards(
            model, weights(model), weights(reference), f"weight after step {step}", TOLERANCE
        )
    assert_same_groups(optimizer, expected)


def assert_same_groups(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    assert len(actual.param_groups) == len(expected.param_groups)
    for mine, other in zip(actual.param_groups, expected.param_groups):
        settings = {key: value for key, value in other.items() if key != "params"}
        assert {key: mine[key] for key in settings} == settings
        assert len(mine["params"]) == len(other["params"])


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


class Signs(torch.optim.Optimizer):
    """An element-wise optimizer of a user: it assigns by mask, and counts in tensors."""

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

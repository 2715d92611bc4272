# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is said once, in full, on every rank, and leaves things usable."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import MegatronFSDP, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron.fsdp.gradient_sync import GradientError
from tests.fsdp import models
from tests.fsdp.models import Block
from tests.fsdp.reference import batch, compare_pieces, loss_of, optimizer_over, shard_mesh

Ranks = Callable[..., list[Any]]


def message_of(
    kind: type[Exception], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    with pytest.raises(kind) as error:
        function(*args, **kwargs)
    assert error.type is kind
    return str(error.value)


def everything_wrong() -> str:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    return message_of(
        ValueError,
        fully_shard_model,
        nn.ReLU(),
        mesh,
        "dp_shard",
        zero_dp_strategy="zero3",
        fsdp_unit_modules=["nowhere.Block", int],
        calculate_per_token_loss=True,
        average_in_collective=True,
    )


def test_everything_wrong_is_listed_at_once_on_every_rank(ranks: Ranks) -> None:
    messages = ranks(2, everything_wrong)
    assert messages[0] == messages[1]
    for part in (
        "no parameters",
        "zero_dp_strategy",
        "'zero3'",
        "nowhere.Block",
        "int",
        "average_in_collective",
        "dp_shard",
        "('dp', 'cp')",
    ):
        assert part in messages[0]


def wrong_on_one_rank(wrong: str) -> str:
    rank = dist.get_rank()
    module = models.build("several_units")
    optimizer = optimizer_over(module)
    if rank == 1 and wrong == "strategy":
        return message_of(ValueError, fully_shard, module, optimizer, zero_dp_strategy=7)
    if rank == 1 and wrong == "optimizer":
        return message_of(
            ValueError, fully_shard, module, optimizer_over(models.build("several_units"))
        )
    message = message_of(ValueError, fully_shard, module, optimizer)
    assert all(
        parameter.numel() and not hasattr(parameter, "_fsdp_model")
        for parameter in module.parameters()
    )
    assert isinstance(
        fully_shard(module, optimizer)[0], MegatronFSDP
    )  # nothing has happened to them
    return message


def wrong_then_right(wrong: str) -> str:
    message = wrong_on_one_rank(wrong)
    if dist.get_rank() == 1:
        module = models.build("several_units")
        fully_shard(module, optimizer_over(module))
    return message


@pytest.mark.parametrize(
    ("wrong", "part"), [("strategy", "but got 7"), ("optimizer", "none of the module's")]
)
def test_what_one_rank_has_wrong_is_raised_on_all(ranks: Ranks, wrong: str, part: str) -> None:
    messages = ranks(3, wrong_then_right, wrong)
    assert len(set(messages)) == 1
    assert part in messages[0]


def bad_arguments() -> dict[str, str]:
    linear = nn.Linear(3, 3)
    sharded = fully_shard_model(nn.Linear(3, 3))
    unnamed = init_device_mesh("cpu", (dist.get_world_size(),))
    two_axes = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp"))
    return {
        "no module": message_of(ValueError, fully_shard_model, "linear"),
        "sharded twice": message_of(ValueError, fully_shard_model, sharded),
        "meta": message_of(ValueError, fully_shard_model, nn.Linear(3, 3, device="meta")),
        "unnamed mesh": message_of(ValueError, fully_shard_model, linear, unnamed),
        "axis missing": message_of(ValueError, fully_shard_model, linear, two_axes),
        "no optimizer": message_of(ValueError, fully_shard, linear, "adam"),
        "unsharded parameters": message_of(
            ValueError, fully_shard_optimizer, torch.optim.SGD(linear.parameters())
        ),
        "optimizer sharded twice": message_of(
            ValueError,
            fully_shard_optimizer,
            fully_shard_optimizer(torch.optim.SGD(sharded.parameters())),
        ),
    }


def test_bad_arguments_are_named(ranks: Ranks) -> None:
    (messages,) = ranks(1, bad_arguments)
    expected = {
        "no module": "module expects a torch.nn.Module but got str",
        "sharded twice": "sharded already",
        "meta": "weight, bias",
        "unnamed mesh": "mesh_dim_names",
        "axis missing": "dp_shard_dim is required",
        "no optimizer": "optimizer expects a torch.optim.Optimizer but got str",
        "unsharded parameters": "after fully_shard_model",
        "optimizer sharded twice": "sharded already",
    }
    assert messages.keys() == expected.keys()
    for name, part in expected.items():
        assert part in messages[name]


UNBUILT: dict[str, Any] = {
    "keep_fp8_transpose_cache": True,
    "nccl_ub": True,
    "fsdp_double_buffer": True,
    "fsdp_db_use_persist_buf_on_alloc_fail": True,
    "disable_symmetric_registration": True,
    "cuda_graph_mode": True,
    "maxpool_double_buffer": True,
}


def unbuilt_messages() -> dict[str, str]:
    return {
        name: message_of(NotImplementedError, fully_shard_model, nn.Linear(2, 2), **{name: value})
        for name, value in UNBUILT.items()
    }


def test_what_is_not_built_is_refused_by_name(ranks: Ranks) -> None:
    for messages in ranks(2, unbuilt_messages):
        assert all(name in message for name, message in messages.items())


def without_distributed() -> str:
    dist.destroy_process_group()
    del os.environ["RANK"]
    return message_of(RuntimeError, fully_shard_model, nn.Linear(2, 2))


def test_outside_torch_distributed_the_message_says_what_to_do(ranks: Ranks) -> None:
    (message,) = ranks(1, without_distributed)
    assert "torchrun" in message


def poison_one_gradient(level: int) -> str:
    module = models.build("several_units")
    weight = module.blocks[1].up.weight
    model, optimizer = fully_shard(
        module,
        optimizer_over(module),
        shard_mesh(),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=level,
        report_nan_in_param_grad=True,
    )
    loss_of(model(batch(0, dist.get_rank(), 0))).backward()  # a good one is let through
    optimizer.zero_grad()
    handle = weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    message = message_of(
        GradientError, lambda: loss_of(model(batch(0, dist.get_rank(), 0))).backward()
    )
    handle.remove()
    optimizer.zero_grad()
    loss_of(model(batch(0, dist.get_rank(), 0))).backward()
    return message


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_bad_gradient_is_reported_with_parameter_and_rank_on_all_ranks(
    ranks: Ranks, level: int
) -> None:
    messages = ranks(3, poison_one_gradient, level)
    assert len(set(messages)) == 1
    assert "rank " in messages[0]
    assert "blocks.1.up.weight" in messages[0]
    assert "blocks.0" not in messages[0]
    assert "down" not in messages[0]


class Failing(nn.Module):
    """Fails in forward or backward when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise OSError("told so")
        x = self.linear(x)
        if self.when == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, gradient: Tensor) -> None:
        raise OSError("told so")


def build_failing() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(models.WIDTH, models.WIDTH), Block(), Failing(), Block()
    ).double()


def recover(level: int, when: str) -> None:
    reference, module = build_failing(), build_failing()
    expected, optimizer = optimizer_over(reference), optimizer_over(module)
    model, optimizer = fully_shard(
        module,
        optimizer,
        shard_mesh(),
        fsdp_unit_modules=[Block, Failing],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
    )
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            module[2].when = when
            with pytest.raises(OSError, match="told so"):
                loss_of(model(batch(step, dist.get_rank(), 0))).backward()
            module[2].when = ""
            optimizer.zero_grad()
        loss_of(model(batch(step, dist.get_rank(), 0))).backward()
        expected.zero_grad()
        world_size = dist.get_world_size()
        (
            sum(loss_of(reference(batch(step, rank, 0))) for rank in range(world_size)) / world_size
        ).backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        compare_pieces(
            model,
            {name: parameter.grad for name, parameter in model.named_parameters()},
            gradients,
            f"step {step}",
        )
        expected.step()
        optimizer.step()


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_an_exception_is_followed_by_a_good_step(ranks: Ranks, level: int, when: str) -> None:
    ranks(2, recover, level, when)


def force_all_reduce() -> str:
    model = fully_shard_model(nn.Linear(3, 3))
    return message_of(NotImplementedError, model.finish_grad_sync, force_all_reduce=True)


def test_whole_gradients_of_a_sharded_strategy_are_refused(ranks: Ranks) -> None:
    assert all("force_all_reduce" in message for message in ranks(2, force_all_reduce))

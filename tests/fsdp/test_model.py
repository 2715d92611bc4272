# SPDX-License-Identifier: Apache-2.0
"""`MegatronFSDP` is used as any module: read, evaluated, copied, converted and loaded."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron.fsdp.module.gradient_sync import GradientError
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
)
from tests.support.fsdp import models
from tests.support.fsdp.meshes import mesh_of, shard_mesh
from tests.support.fsdp.models import WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import Ranks, batch, close, loss_of, on_ranks, optimizer_over
from tests.support.fsdp.side_by_side import (
    compare_outputs,
    plain_backward,
    shard,
    train_side_by_side,
)
from tests.support.fsdp.wrong_calls import (
    Scene,
    WrongCall,
    check_refusals,
    message_of,
    sharded_linear,
)


class Normalised(ResidualBlock):
    """A block with dropout and running statistics."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.statistics(x))
        return (
            checkpoint(self.dropout, x, use_reentrant=False)
            if self.recompute and self.training
            else self.dropout(x)
        )


def build_normalised() -> nn.Module:
    layers = [
        nn.Linear(WIDTH, WIDTH),
        Normalised(),
        Normalised(recompute=True),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, 3),
    ]
    return nn.Sequential(*layers).double()


def with_seed(model: nn.Module, step: int, rank: int) -> None:
    torch.manual_seed(100 * step + rank)
    plain_backward(model, step, rank)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_dropout_and_running_statistics_follow_the_mode(level: int) -> None:
    mesh = shard_mesh()
    train_side_by_side(build_normalised, with_seed, level, mesh=mesh)
    reference, model = train_side_by_side(build_normalised, with_seed, level, steps=1, mesh=mesh)
    torch.manual_seed(7)
    mine = build_normalised()  # the running statistics are each rank's own
    with_seed(mine, 0, dist.get_rank())
    for (name, expected), actual in zip(mine.named_buffers(), model.module.buffers(), strict=True):
        close(actual, expected, name)
    x = batch(9, 0, 0)
    model.eval()
    assert not any(module.training for module in model.modules())
    first, second = model(x).detach(), model(x).detach()
    assert torch.equal(first, second)
    reference.load_state_dict(dict(model.module.named_buffers()), strict=False)
    reference.eval()
    close(first, reference(x), "evaluation")
    model.train()
    assert all(module.training for module in model.modules())
    assert not torch.equal(model(x), first)
    assert {f"module.{name}" for name, _ in model.module.named_buffers()} <= set(model.state_dict())


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_weights_are_whole_inside_of_a_forward_and_sharded_outside_at_level_3(level: int) -> None:
    module = build_stack()
    expected = module.blocks[0].up.weight.detach().clone()
    model, optimizer = shard(module, level)
    weight, seen = dict(model.named_parameters())["module.blocks.0.up.weight"], []

    def look(each: nn.Module, args: Any, output: Any) -> None:
        seen.append(each.weight.detach().clone())
        assert not isinstance(each.weight, DTensor)

    model.module.blocks[0].up.register_forward_hook(look)
    for _ in range(2):
        outside = model.module.blocks[0].up.weight
        assert outside.shape == expected.shape
        if level == 3:
            assert (
                outside is weight
                and dict(model.module.named_parameters())["blocks.0.up.weight"] is weight
            )
            close(outside.full_tensor(), expected, "sharded weight")
        else:
            close(outside, expected, "whole weight")
        plain_backward(model, 0, dist.get_rank())
        assert torch.equal(seen[-1], expected)
    optimizer.step()
    assert not torch.equal(weight.full_tensor(), expected)
    if level == 3:
        assert model.module.blocks[0].up.weight is weight


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_shallow_copies_of_the_model_are_refused_and_of_its_state_dict_work(level: int) -> None:
    model, _ = shard(build_stack(), level)
    messages = []
    for attempt in (copy.copy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(NotImplementedError) as error:
            attempt(model)
        messages.append(str(error.value))
    kept = copy.deepcopy(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for state in (kept, torch.load(file)):
        model.load_state_dict(state)
    compare_outputs(model, build_stack(), batch(0, 0, 0), "after loading a copy")
    assert len(messages) == 3 and all("state_dict" in message for message in messages), messages


def convert(level: int) -> None:
    model, _ = shard(build_stack(), level)
    for same in (
        lambda: model.to("cpu"),
        lambda: model.cpu(),
        lambda: model.double(),
        lambda: model.to(torch.float64),
    ):
        assert same() is model
    conversions = (
        model.half,
        model.float,
        model.bfloat16,
        lambda: model.to(torch.float32),
        lambda: model.to("meta"),
    )
    for change in conversions:
        with pytest.raises(NotImplementedError, match="cannot be moved or converted"):
            change()
    compare_outputs(model, build_stack(), batch(0, 0, 0), "after refused conversions")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
def test_conversions_that_change_nothing_work_and_others_are_refused(
    ranks: Ranks, level: int
) -> None:
    ranks(2, convert, level)


@on_ranks(1)
def test_the_fields_of_the_config_are_used() -> None:
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim",
        check_for_nan_in_grad=True,
        megatron_fsdp_main_params_dtype=torch.bfloat16,
        megatron_fsdp_main_grads_dtype=torch.float32,
    )
    model = MegatronFSDP(nn.Linear(4, 4).bfloat16(), FSDPDistributedIndex(), config)
    other = MegatronFSDP(
        nn.Linear(4, 4),
        FSDPDistributedIndex(),
        config,
        MixedPrecisionPolicy(main_params_dtype=torch.float64),
    )
    precision = model.groups[0].precision
    found = (
        precision.main_param,
        precision.main_grad,
        model._gradients._report_nonfinite is not None,
        other.groups[0].precision.main_param,
    )
    assert found == (torch.bfloat16, torch.float32, True, torch.float64), found


def poison_one_gradient(level: int) -> str:
    module = models.build("several_units")
    weight = module.blocks[1].up.weight
    model, optimizer = fully_shard(
        module,
        optimizer_over(module),
        shard_mesh(),
        fsdp_unit_modules=[ResidualBlock],
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


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
def test_bad_gradient_is_reported_with_parameter_and_rank_on_all_ranks(
    ranks: Ranks, level: int
) -> None:
    messages = ranks(3, poison_one_gradient, level)
    assert len(set(messages)) == 1
    assert "rank " in messages[0]
    assert "blocks.1.up.weight" in messages[0]
    assert "blocks.0" not in messages[0]
    assert "down" not in messages[0]


def enter_context(scene: Scene) -> None:
    with sharded_linear()[0].mixed_precision_context("fp32"):
        pass


def load_other_optimizer(scene: Scene) -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    _, other = fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    sharded_linear()[1].load_state_dict(other.state_dict())


def load_wrong_shape_of_state(scene: Scene) -> None:
    _, optimizer = sharded_linear()
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.zeros(7)
    optimizer.load_state_dict(state)


def index_of(scene: Scene) -> FSDPDistributedIndex:
    return FSDPDistributedIndex(mesh_of("dp", "cp"), "dp")


WRONG_CALLS: dict[str, WrongCall] = {
    "context of text": WrongCall(("MixedPrecisionPolicy", "'fp32'"), enter_context),
    "policy reset to None": WrongCall(
        ("MixedPrecisionPolicy", "None"),
        lambda scene: sharded_linear()[0].reset_mixed_precision_policy(None),
    ),
    "weights of wrong shape": WrongCall(
        (
            "weight: expects shape (3, 3) but got (7,)",
            "missing keys: bias",
            "unexpected keys: scale",
        ),
        lambda scene: sharded_linear()[0].load_state_dict(
            {"weight": torch.zeros(7), "scale": torch.zeros(1)}
        ),
        RuntimeError,
    ),
    "weights that are no tensors": WrongCall(
        ("weight", "int"),
        lambda scene: sharded_linear()[0].load_state_dict({"weight": 3, "bias": 4}),
        RuntimeError,
    ),
    "state dict is text": WrongCall(
        ("state_dict", "str"),
        lambda scene: sharded_linear()[0].load_state_dict("file.pt"),
        TypeError,
    ),
    "optimizer state of other names": WrongCall(
        ("param_groups[0]", "module.0.weight", "module.weight"), load_other_optimizer
    ),
    "optimizer state of wrong shape": WrongCall(
        ("weight: expects shape (3, 3) but got (7,)",), load_wrong_shape_of_state
    ),
    "whole gradients": WrongCall(
        ("force_all_reduce",),
        lambda scene: sharded_linear()[0].finish_grad_sync(force_all_reduce=True),
        NotImplementedError,
    ),
    "submesh of unknown axis": WrongCall(
        ("('dp', 'cp')", "('pp',)"), lambda scene: index_of(scene).get_submesh("pp")
    ),
    "expert group without expert mesh": WrongCall(
        ("expt_device_mesh",), lambda scene: index_of(scene).get_fsdp_group(is_expert_parallel=True)
    ),
    "policy of an integer dtype": WrongCall(
        ("main_params_dtype expects", "torch.int8"), lambda scene: MixedPrecisionPolicy(torch.int8)
    ),
    "policy of a name": WrongCall(
        ("grad_comm_dtype expects", "'bf16'"),
        lambda scene: MixedPrecisionPolicy(grad_comm_dtype="bf16"),
    ),
}


def test_wrong_calls_are_refused_alike_on_every_rank(ranks: Ranks) -> None:
    check_refusals(ranks, __name__)

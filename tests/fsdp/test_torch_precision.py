# SPDX-License-Identifier: Apache-2.0
"""torch's own precision policy means here what it means to FSDP2."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron.fsdp import Mesh, Strategy
from megatron.fsdp import fully_shard as shard_by_settings
from megatron_fsdp import fully_shard, fully_shard_model
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp.meshes import mesh_of, shard_mesh
from tests.support.fsdp.models import BATCH, WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import Ranks, on_ranks, shard_with_sgd
from tests.support.fsdp.watched_communication import watching_dtypes
from tests.support.fsdp.wrong_calls import message_of

BF16, FP32 = torch.bfloat16, torch.float32
SINCE_2_15 = hasattr(TorchPrecision, "param_dtype_override_fn")

POLICIES = {
    "nothing": TorchPrecision(),
    "compute": TorchPrecision(param_dtype=BF16),
    "compute and reduce": TorchPrecision(param_dtype=BF16, reduce_dtype=FP32),
    "reduce": TorchPrecision(reduce_dtype=BF16),
    "output": TorchPrecision(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
}


class WatchedStack(nn.Module):
    """The stack, which notes the dtypes of its inputs and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = build_stack().float()
        self.dtypes: list[Any] = []

    def forward(self, x: Tensor, indices: Tensor, scale: Tensor) -> dict[str, Tensor]:
        self.dtypes = [x.dtype, indices.dtype, scale.dtype, self.stack.head.weight.dtype]
        return {"output": self.stack(x) * scale, "indices": indices}


def inputs(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, torch.arange(3), torch.tensor([1.5])


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.clone()
    is_ours = hasattr(value, "part")
    return (uneven_dtensor_to_full_tensor(value) if is_ours else value.full_tensor()).clone()


def train(
    model: nn.Module, module: WatchedStack, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Train three steps; return outputs, the gradients of the last step, weights and dtypes."""
    outputs = []
    for step in range(3):
        optimizer.zero_grad()
        x, indices, scale = inputs(step)
        result = model(x, indices, scale=scale)
        outputs.append(result["output"].detach().clone())
        (result["output"].float() ** 2).mean().backward()
        gradients = [whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
    parameters = list(model.parameters())
    return {
        "outputs": outputs,
        "gradients": gradients,
        "weights": [whole(parameter) for parameter in parameters],
        "dtypes": [module.dtypes, *{parameter.dtype for parameter in parameters}],
    }


def side_by_side(name: str, level: int, casts: bool) -> dict[str, bool]:
    """Compare a policy with FSDP2, every bit."""
    policy = POLICIES[name]
    if not casts:
        policy = TorchPrecision(FP32, BF16, None, False)
    of_units = TorchPrecision(
        policy.param_dtype, policy.reduce_dtype, None, policy.cast_forward_inputs
    )
    mesh = shard_mesh()
    theirs = WatchedStack()
    for block in theirs.stack.blocks:
        fsdp2_fully_shard(block, mesh=mesh, mp_policy=of_units)
    fsdp2_fully_shard(theirs, mesh=mesh, mp_policy=policy)
    expected = train(theirs, theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    module = WatchedStack()
    model, optimizer = shard_with_sgd(
        module,
        mesh,
        fsdp_unit_modules=[ResidualBlock],
        mixed_precision_policy=policy,
        zero_dp_strategy=level,
    )
    with watching_dtypes() as dtypes:
        actual = train(model, module, optimizer)
    travels = policy.reduce_dtype or (None if SINCE_2_15 else policy.param_dtype) or FP32
    is_seen = level == 0 or set(dtypes) == {travels}  # level 0 all-reduces
    same = {"travels": is_seen, "dtypes": actual["dtypes"] == expected["dtypes"]}
    for what in ("outputs", "gradients", "weights"):
        pairs = zip(actual[what], expected[what], strict=True)
        same[what] = all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)
    return same


@pytest.mark.always("output-3", "reduce-3")
@pytest.mark.parametrize(("name", "level"), [*product(POLICIES, [3]), *zip(POLICIES, [0, 1, 2])])
def test_a_policy_of_torch_gives_the_bits_of_fsdp2(ranks: Ranks, name: str, level: int) -> None:
    for same in ranks(2, side_by_side, name, level, True):
        assert all(same.values()), same


def test_inputs_are_not_cast_where_the_policy_says_so(ranks: Ranks) -> None:
    for same in ranks(2, side_by_side, "compute", 3, False):
        assert all(same.values()), same


@on_ranks(2)
def test_frozen_weights_keep_their_dtype_in_checkpoints() -> None:
    """Use the function of typed settings, with frozen weights and weights on meta."""
    module = WatchedStack()
    module.stack.embed.requires_grad_(False)
    before = module.stack.embed.weight.detach().clone()
    model = shard_by_settings(
        module,
        mesh=Mesh(device_mesh=shard_mesh()),
        units=[ResidualBlock],
        strategy=Strategy(level="optim_grads"),
        precision=TorchPrecision(param_dtype=BF16, reduce_dtype=FP32),
    )
    model(*inputs(0))["output"].float().sum().backward()
    state = model.state_dict()
    assert torch.equal(whole(state["module.stack.embed.weight"]), before)  # no bit is lost
    assert module.dtypes == [BF16, torch.int64, BF16, BF16], module.dtypes
    assert {value.dtype for value in state.values()} == {FP32}


@on_ranks(2)
def test_dtensors_of_tensor_parallelism_are_not_cast() -> None:
    mesh = mesh_of("dp", "tp", sizes=(1, 2))
    module = nn.Linear(4, 4)
    weight = distribute_tensor(module.weight.detach(), mesh["tp"], [Shard(0)])
    module.weight = nn.Parameter(weight)
    policy = TorchPrecision(param_dtype=BF16)
    arguments = {"tp_dim": "tp", "mixed_precision_policy": policy}
    message = message_of(NotImplementedError, fully_shard_model, module, mesh, "dp", **arguments)
    assert "weight is a DTensor" in message and "main_params_dtype" in message, message


@on_ranks(2)
def test_a_dtype_for_a_single_parameter_is_refused() -> None:
    policy = TorchPrecision(param_dtype=BF16)
    object.__setattr__(policy, "param_dtype_override_fn", lambda parameter: None)
    message = message_of(
        NotImplementedError, fully_shard_model, nn.Linear(2, 2), mixed_precision_policy=policy
    )
    assert "param_dtype_override_fn" in message, message


@on_ranks(1)
def test_what_is_no_dtype_of_a_policy_of_torch_is_refused() -> None:
    policy: Any = TorchPrecision(
        param_dtype="bfloat16",
        output_dtype=torch.int8,
        cast_forward_inputs="no",
    )
    message = message_of(
        ValueError, fully_shard_model, nn.Linear(2, 2), mixed_precision_policy=policy
    )
    assert "param_dtype expects a floating-point torch.dtype" in message and "'bfloat16'" in message
    assert "output_dtype" in message and "torch.int8" in message, message
    assert "cast_forward_inputs expects True or False but got 'no'" in message, message


@on_ranks(2)
def test_a_policy_of_torch_and_an_older_keyword_contradict() -> None:
    message = message_of(
        ValueError,
        fully_shard,
        module := nn.Linear(2, 2),
        torch.optim.SGD(module.parameters()),
        mixed_precision_policy=TorchPrecision(param_dtype=BF16),
        grad_reduce_in_fp32=True,
    )
    assert "mixed_precision_policy of torch" in message.replace("\n", " "), message

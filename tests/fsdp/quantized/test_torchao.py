# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao: trained as FSDP2 trains them, and 4-bit bases under adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as fully_shard_by_torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import fully_shard
from tests.support.fsdp.reference import Ranks, on_ranks
from tests.support.pairwise import each_value

logging.getLogger("torchao").setLevel(logging.ERROR)  # it says that it has no CUDA kernels here
pytest.importorskip("torchao", reason="torchao is not installed")

WIDTH = 32


def build(kind: str) -> nn.Sequential:
    """Return layers whose weights are of a class of torchao."""
    from torchao.prototype.quantized_training import (
        Int8MixedPrecisionTrainingConfig,
        bitnet_training,
        int8_mixed_precision_training,
    )
    from torchao.quantization.quant_api import quantize_

    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), block, nn.Linear(WIDTH, 16))
    if kind == "int8":
        quantize_(
            module,
            int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(module_swap=False)),
        )
    elif kind == "bitnet":
        quantize_(module, bitnet_training())
    elif kind == "mxfp8":
        convert_to_mxfp8(module)
    else:
        convert_to_float8(module, kind)
    return module


def convert_to_float8(module: nn.Module, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if recipe == "rowwise":  # its weights are plain and are gathered as they are
        config = Float8LinearConfig.from_recipe_name("rowwise")
        object.__setattr__(config, "emulate", True)
    else:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(module, config=config)


def convert_to_mxfp8(module: nn.Sequential) -> None:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    emulated = MXFP8TrainingOpConfig(
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=True,  # there are 16 rows of data, and blocks of 32
    )
    for layer in (module[0], *module[2]):
        if isinstance(layer, nn.Linear):
            values = MXFP8TrainingWeightWrapperTensor(layer.weight.detach(), emulated)
            layer.weight = nn.Parameter(values)
            layer.bias = None  # which the class leaves out


def data(step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(16, WIDTH, generator=generator).to(dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype
) -> tuple[list[float], list[Tensor]]:
    """Return the losses of three steps, and the weights after each."""
    losses, weights = [], []
    for step in range(3):
        loss = model(data(step, dtype)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        # Copies: on one rank they are the weights themselves.
        weights += [whole(parameter).clone() for parameter in model.parameters()]
    return losses, weights


def whole(parameter: Tensor) -> Tensor:
    """Return the values of a sharded parameter, of either library."""
    if isinstance(parameter, DTensor) and hasattr(parameter._local_tensor, "__tensor_flatten__"):
        (name,), _ = parameter._local_tensor.__tensor_flatten__()
        gathered = parameter.full_tensor()
        return getattr(gathered, name, gathered).detach()
    return full_tensor(parameter).detach()


def side_by_side(kind: str, level: int, compute: torch.dtype | None) -> None:
    policy = TorchPrecision(param_dtype=compute, reduce_dtype=torch.float32)
    dtype = compute or torch.float32
    theirs = build(kind)
    fully_shard_by_torch(theirs[2], mp_policy=policy)
    fully_shard_by_torch(theirs, mp_policy=policy)
    wanted = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), dtype)
    own = build(kind)
    model, optimizer = fully_shard(
        own,
        torch.optim.AdamW(own.parameters(), lr=0.01),
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy=level,
        mixed_precision_policy=policy,
    )
    losses, weights = train(model, optimizer, dtype)
    assert losses == wanted[0]
    for number, (mine, of_torch) in enumerate(zip(weights, wanted[1], strict=True)):
        assert torch.equal(mine, of_torch), number


@pytest.mark.always("tensorwise-num_ranks=2-level=3*", "bitnet-num_ranks=2-level=1-compute=None")
@pytest.mark.parametrize(
    ("kind", "num_ranks", "level", "compute"),
    each_value(
        [
            ("tensorwise", 2, 3, None),
            ("bitnet", 2, 1, None),
            ("tensorwise", 2, 2, torch.bfloat16),
            ("int8", 2, 3, torch.bfloat16),
        ],
        kind=["tensorwise", "rowwise", "int8", "bitnet"],
        num_ranks=[1, 2],  # more add up gradients in another order
        level=[1, 2, 3],
        compute=[None, torch.bfloat16],
    ),
)
def test_training_has_the_bits_of_fsdp2(
    ranks: Ranks, kind: str, num_ranks: int, level: int, compute: torch.dtype | None
) -> None:
    ranks(num_ranks, side_by_side, kind, level, compute)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_ranks", "level"), [(1, 2), (2, 3)])
def test_mxfp8_has_the_bits_of_fsdp2(ranks: Ranks, num_ranks: int, level: int) -> None:
    """Values travel in the dtype of compute, as the class says: codes are made at each use."""
    ranks(num_ranks, side_by_side, "mxfp8", level, torch.bfloat16)


class OnFourBits(nn.Module):
    """A linear layer on a frozen base of 4 bits, with an adapter of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

        self.linear: Callable[..., Tensor] = linear_nf4
        base = to_nf4(torch.randn(outputs, inputs) / inputs)
        self.weight = nn.Parameter(base, requires_grad=False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight) + self.up(self.down(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_a_frozen_base_of_four_bits_is_sharded_under_adapters(level: int) -> None:
    def build_base() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(OnFourBits(64, 256), nn.ReLU(), OnFourBits(256, 64))
        trained = [one for one in module.parameters() if one.requires_grad]
        return module, torch.optim.SGD(trained, lr=0.1)

    reference, plain = build_base()
    module, optimizer = build_base()
    model, optimizer = fully_shard(
        module, optimizer, fsdp_unit_modules=[OnFourBits], zero_dp_strategy=level
    )
    base: Any = dict(model.named_parameters())["module.0.weight"]
    assert base.dtype == torch.uint8 and not base.requires_grad
    assert base.numel() < 0.6 * 64 * 256  # four bits an element, and scales
    x = torch.randn(8, 64)
    for _ in range(3):
        expected, output = reference(x), model(x)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        expected.pow(2).mean().backward()
        output.pow(2).mean().backward()
        for one in (plain, optimizer):
            one.step()
            one.zero_grad()

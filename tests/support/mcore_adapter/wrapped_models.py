# SPDX-License-Identifier: Apache-2.0
"""A small GPT model inside FullyShardedDataParallel, and one step of it."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.mcore_adapter import FullyShardedDataParallel
from megatron.pretrain.arguments.configs import ddp_config, transformer_config
from megatron.pretrain.model import gpt_model
from tests.support.pretrain.training_runs import SMALL, prepare

LINE = f"{SMALL} --use-megatron-fsdp --untie-embeddings-and-output-weights --overlap-grad-reduce"
LAYERS = {f"decoder.layers.{number}." for number in (0, 1)}


def make_module(flags: str = "") -> tuple[Any, Any, torch.nn.Module]:
    """Arguments, config and the model before it is wrapped."""
    args, device = prepare(f"{LINE} {flags}")
    with patch.object(gpt_model, "wrap", lambda args, config, model, **settings: model):
        (module,) = gpt_model.build_model(args, 99, device)
    return args, transformer_config(args), module


def make_wrapper(flags: str = "", **arguments: Any) -> FullyShardedDataParallel:
    return wrap(*make_module(flags), **arguments)


def wrap(
    args: Any, config: Any, module: torch.nn.Module, **arguments: Any
) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        config=config, ddp_config=ddp_config(args), module=module, **arguments
    )


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Return the summed loss of one microbatch that no other rank has."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    tokens = torch.randint(99, (2, 33), generator=generator)
    mask = torch.ones(1, 1, 32, 32).triu(1).bool()
    positions = torch.arange(32).expand(2, 32)
    loss: torch.Tensor = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
    return loss.sum()


def backward(model: torch.nn.Module, seed: int) -> None:
    loss_of(model, seed).backward()


def gradients(model: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    return {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}


def step(model: FullyShardedDataParallel, context: Any = None) -> dict[str, torch.Tensor]:
    """Compute the gradients of two microbatches, the first inside `context` (default: no_sync)."""
    model.zero_grad_buffer()
    with model.no_sync() if context is None else context:
        backward(model, 1)
    backward(model, 2)
    model.finish_grad_sync(force_all_reduce=False)
    return gradients(model)


def assert_same(
    values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float = 1e-6
) -> None:
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            values[name], value, rtol=relative, atol=relative * float(value.abs().max()), msg=name
        )

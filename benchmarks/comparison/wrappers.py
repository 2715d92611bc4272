# SPDX-License-Identifier: Apache-2.0
"""The wrappers that are compared: each trains the same model by one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as PolicyOfTorch
from torch.distributed.fsdp import fully_shard as fully_shard_by_torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison.model import CausalLayer, Gpt, Workload
from megatron_fsdp import MixedPrecisionPolicy, fully_shard

Step = Callable[[list[torch.Tensor]], torch.Tensor]
"""Trains on microbatches of tokens (batch, length + 1) and returns the last loss."""

REFERENCE = "fsdp2"
"""The wrapper to which the others are compared."""


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens, in float32."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """Return a step in which all microbatches but the last are inside ``no_sync``."""

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        for number, tokens in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else no_sync():
                loss = loss_of(model, tokens)
                (loss / len(batches)).backward()
        optimizer.step()
        return loss.detach()

    return step


def bare(model: Gpt, workload: Workload) -> Step:
    """Train a model without any wrapper, on every rank alone."""
    return _step_of(model, _adamw(model))


def _ours(level: int, **settings: bool) -> Callable[[Gpt, Workload], Step]:
    def wrap(model: Gpt, workload: Workload) -> Step:
        # FSDP2 and this engine have fp32 main weights and reduce in the compute dtype.
        sharded, optimizer = fully_shard(
            model,
            _adamw(model),
            fsdp_unit_modules=[CausalLayer],
            zero_dp_strategy=level,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
            **settings,
        )
        return _step_of(sharded, optimizer, sharded.no_sync)

    return wrap


def _fsdp2(model: Gpt, workload: Workload) -> Step:
    policy = PolicyOfTorch(param_dtype=getattr(torch, workload.dtype))
    model = model.float()  # the main weights, which FSDP2 casts before every all-gather
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard_by_torch(layer, mesh=mesh, mp_policy=policy)
    fully_shard_by_torch(model, mesh=mesh, mp_policy=policy)
    return _step_of(model, _adamw(model))  # like level 3, it reduces after every backward


def _ddp(model: Gpt, workload: Workload) -> Step:
    """Torch's DDP, which has no fp32 main weights."""
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _step_of(replicated, _adamw(replicated), replicated.no_sync)


def _megatron_ddp(model: Gpt, workload: Workload) -> Step:
    """Megatron-Core's DDP with its distributed optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel as CoreDdp,
    )
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    is_bf16 = workload.dtype == "bfloat16"
    config = TransformerConfig(
        num_layers=workload.layers,
        hidden_size=workload.hidden,
        num_attention_heads=workload.hidden // 64,
        bf16=is_bf16,
    )
    replicated = CoreDdp(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True),
        model,
    )
    settings = OptimizerConfig(
        lr=1e-3,
        bf16=is_bf16,
        params_dtype=getattr(torch, workload.dtype),
        use_distributed_optimizer=True,
        clip_grad=0.0,
        weight_decay=0.01,
    )
    optimizer = get_megatron_optimizer(settings, [replicated])

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        replicated.zero_grad_buffer()
        optimizer.zero_grad()
        for number, tokens in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else replicated.no_sync():
                loss = loss_of(replicated, tokens)
                (loss / len(batches)).backward()
        replicated.finish_grad_sync()
        optimizer.step()
        return loss.detach()

    return step


WRAPPERS: dict[str, Callable[[Gpt, Workload], Step]] = {
    "fsdp2": _fsdp2,
    **{f"ours, level {level}": _ours(level) for level in (3, 2, 1, 0)},
    "ours, level 3, slots": _ours(3, fsdp_double_buffer=True),
    "ddp": _ddp,
    "megatron-core ddp": _megatron_ddp,
}


def prepare_megatron_core() -> None:
    """Make the process groups of Megatron-Core, and the replacements that it needs on a CPU.

    Raises:
        ImportError: without megatron-core.
    """
    from megatron.core import parallel_state

    from megatron.mcore_adapter import cpu

    cpu.install()
    parallel_state.initialize_model_parallel()

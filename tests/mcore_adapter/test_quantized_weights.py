# SPDX-License-Identifier: Apache-2.0
"""GPT models of Megatron-Core with weights that Transformer Engine stores in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.transformer_engine.core_gpt import make_gpt
from tests.support.transformer_engine.ranks import RunOnRanks, ranks
from tools import transformer_engine_on_cpu


@pytest.fixture(scope="module")
def engine_ranks() -> RunOnRanks:
    return ranks(2)


def train(recipe: str | None, strategy: str, num_steps: int = 4) -> dict[str, Any]:
    """Train a GPT with Megatron-Core's distributed optimizer, and FSDP or its own DDP."""
    transformer_engine_on_cpu.use()
    from megatron.mcore_adapter import cpu

    cpu.install()
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron.mcore_adapter import FullyShardedDataParallel

    config, module = make_gpt(recipe)
    is_sharded = strategy != "ddp"
    sharding = {"data_parallel_sharding_strategy": strategy} if is_sharded else {}
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=is_sharded,
        fp8_param_gather=recipe is not None,
        **sharding,
    )
    wrapper = FullyShardedDataParallel if is_sharded else DistributedDataParallel
    model = wrapper(config, ddp_config, module)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.01, bf16=True, use_distributed_optimizer=True, fp8_recipe=recipe),
        [model],
    )
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(num_steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(64, (4, 32), generator=generator)
        loss = model(tokens, torch.arange(32)[None], None, labels=tokens).float().mean()
        loss.backward()
        model.finish_grad_sync()
        _, norm, _ = optimizer.step()
        result["losses"].append(loss.item())
        result["norms"].append(float(norm))
    if is_sharded:
        result["stored"] = {group.compute.flat.dtype for group in model.module.groups}
    return result


STRATEGIES = {
    "tensorwise": ("optim", "optim_grads", "optim_grads_params"),
    "delayed": ("optim", "optim_grads_params"),
    "blockwise": ("optim_grads", "optim_grads_params"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", STRATEGIES)
def test_strategies_train_alike_and_begin_as_ddp(engine_ranks: RunOnRanks, recipe: str) -> None:
    first, *others = (engine_ranks(train, recipe, strategy) for strategy in STRATEGIES[recipe])
    assert all(other == first for other in others)
    plain = engine_ranks(train, None, "optim_grads_params")
    ddp = engine_ranks(train, recipe, "ddp", 1)
    for own, in_bf16, of_ddp in zip(first, plain, ddp):
        assert own["stored"] == {torch.uint8, torch.bfloat16}
        assert own["losses"][:1] == of_ddp["losses"]
        assert own["norms"][:1] == pytest.approx(of_ddp["norms"], rel=1e-6)
        # FP8 has other losses than bf16, and not much different ones.
        assert own["losses"] != in_bf16["losses"]
        assert own["losses"] == pytest.approx(in_bf16["losses"], rel=0.05)

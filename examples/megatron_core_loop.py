# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's minimal training loop with a fully sharded model, on CPU or GPU.

    torchrun --nproc_per_node 2 examples/megatron_core_loop.py

The parts are those of Megatron-Core's own example (`run_simple_mcore_train_loop.py`): process
groups, a GPTModel, a schedule of microbatches; and its distributed optimizer. Only the wrapper
differs: `FullyShardedDataParallel` instead of `DistributedDataParallel` (`--ddp`).
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.mcore_adapter import FullyShardedDataParallel, cpu

VOCABULARY, LENGTH, BATCH, MICROBATCHES = 64, 32, 8, 2


def build(device: torch.device, with_ddp: bool) -> torch.nn.Module:
    """Build a small GPT, and wrap it for data parallelism."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH).to(device)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=not with_ddp,
        data_parallel_sharding_strategy="optim_grads_params",  # which DDP does not read
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    wrapper = DistributedDataParallel if with_ddp else FullyShardedDataParallel
    model = wrapper(config=config, ddp_config=ddp_config, module=gpt)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    return model


def batches(device: torch.device) -> Iterator[Tensor]:
    """Yield sequences that count on in steps of one to three, int64 (batch, length + 1)."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        first, step = torch.randint(1, VOCABULARY, (2, BATCH, 1), generator=generator)
        yield ((first + torch.arange(LENGTH + 1) * (1 + step % 3)) % VOCABULARY).to(device)


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a microbatch, and what the schedule collects."""
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach()}


def forward_step(data: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Run the model on a microbatch; return its losses, and the function that reduces them."""
    tokens = next(data)
    positions = torch.arange(LENGTH, device=tokens.device).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, device=tokens.device).triu(1).bool()
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()), mean_loss


def main() -> None:
    """Train, and print losses and gradient norms."""
    parser = argparse.ArgumentParser(description="Train a small GPT of Megatron-Core.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ddp", action="store_true", help="Megatron-Core's data parallelism")
    args = parser.parse_args()
    cpu.install()  # does nothing on a machine with CUDA
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(0)
    model = build(device, args.ddp)
    settings = OptimizerConfig(lr=3e-3, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model])
    data, forward_backward = batches(device), get_forward_backward_func()
    for step in range(1, args.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss {reduced[-1]['lm loss'].item():.4f}  norm {norm:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

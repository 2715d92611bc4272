# SPDX-License-Identifier: Apache-2.0
"""A recipe in the form of Megatron-Bridge's, fully sharded: see docs/coming_from_megatron_lm.md."""

import argparse
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.mcore_adapter import cpu, drop_in
from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor


def fully_sharded(cfg: Any) -> Any:
    """Change what a recipe of Bridge returns: shard everything, and save as fsdp_dtensor."""
    cfg.ddp.use_megatron_fsdp = cfg.dist.use_megatron_fsdp = True
    cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    cfg.checkpoint.ckpt_format = "fsdp_dtensor"
    return cfg


def pretrain_config() -> SimpleNamespace:
    """Return a small recipe, whose fields have Bridge's names, with DDP as in Bridge's recipes."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return SimpleNamespace(
        model=TransformerConfig(**sizes, **dropout, use_cpu_initialization=True),
        optimizer=OptimizerConfig(lr=3e-3, use_distributed_optimizer=True),
        ddp=distributed.DistributedDataParallelConfig(use_distributed_optimizer=True),
        dist=SimpleNamespace(use_megatron_fsdp=False),
        checkpoint=SimpleNamespace(save="checkpoints/bridge", ckpt_format="torch_dist"),
    )


def pretrain(cfg: Any) -> None:
    """Do in small what Bridge does with a recipe: wrap the model, train, save."""
    class_name = f"{'FullySharded' if cfg.dist.use_megatron_fsdp else 'Distributed'}DataParallel"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpt = GPTModel(cfg.model, get_gpt_layer_local_spec(), 64, max_sequence_length=32).to(device)
    model = getattr(distributed, class_name)(config=cfg.model, ddp_config=cfg.ddp, module=gpt)
    optimizer = get_megatron_optimizer(cfg.optimizer, [model])
    positions = torch.arange(32, device=device)[None]
    for step in range(1, 21):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = ((torch.arange(33, device=device) + 7 * step + 3 * dist.get_rank()) % 64)[None]
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        distributed.finalize_model_grads([model])
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    if cfg.checkpoint.ckpt_format == "fsdp_dtensor":
        state: dict[str, Any] = {"model": model.state_dict_for_save_checkpoint()}
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        preprocess_state_dict_for_uneven_dtensor(state)
        dist.checkpoint.save(state, checkpoint_id=cfg.checkpoint.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small recipe.")
    parser.add_argument("--ddp", action="store_true", help="the recipe as it is")
    args = parser.parse_args()
    cpu.install()  # does nothing on a machine with CUDA
    drop_in.install()  # from here on, Core's FullyShardedDataParallel is this project's
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    pretrain(pretrain_config() if args.ddp else fully_sharded(pretrain_config()))
    dist.destroy_process_group()

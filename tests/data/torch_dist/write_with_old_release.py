# SPDX-License-Identifier: Apache-2.0
"""Writes the samples beside it with an old release of Megatron-Core; today's cannot do so any more.

    pip install --no-deps --target OLD megatron-core==0.15.3
    PYTHONPATH=OLD:. torchrun --nproc-per-node 4 tests/data/torch_dist/write_with_old_release.py
    dense FOLDER PYTHONPATH=OLD:. torchrun --nproc-per-node 4
    tests/data/torch_dist/write_with_old_release.py experts FOLDER

Two steps on random gradients; `expected.pt` is what the optimizer has then, gathered from its live
state.
"""

import argparse
import importlib.util
import sys
import zlib
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location(
    "cpu", ROOT / "megatron" / "mcore_adapter" / "cpu.py"
)
cpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cpu)  # alone: the package around it needs a newer release
cpu._repair_moe = lambda: None
cpu.install()
numpy.product = numpy.prod  # gone from numpy 2

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.serialization import (  # noqa: E402
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

sys.path.insert(0, str(ROOT))
from tests.support.checkpoint.written_by_megatron_core import live_state  # noqa: E402


def arguments(kind: str) -> argparse.Namespace:
    """Return the settings below under the names that Megatron-LM has for them."""
    experts = kind == "experts"
    return argparse.Namespace(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=2,
        group_query_attention=True,
        kv_channels=8,
        ffn_hidden_size=24,
        moe_ffn_hidden_size=12 if experts else None,
        num_experts=4 if experts else None,
        padded_vocab_size=32,
        max_position_embeddings=16,
        swiglu=True,
        multi_latent_attention=False,
        untie_embeddings_and_output_weights=True,
        transformer_impl="local",
        tensor_model_parallel_size=1 if experts else 2,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=2 if experts else 1,
        expert_tensor_parallel_size=1 if experts else 2,
    )


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    experts = {"num_moe_experts": args.num_experts, "moe_ffn_hidden_size": args.moe_ffn_hidden_size}
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        ffn_hidden_size=args.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **experts,
    )
    spec = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, settings, Float16Module(config, model))


def step(model: torch.nn.Module, optimizer: object) -> None:
    """One step; data ranks have the same gradients, as after a reduction."""
    for name, parameter in model.named_parameters():
        is_split = getattr(parameter, "tensor_model_parallel", False)
        slice_ = parallel_state.get_tensor_model_parallel_rank() if is_split else 0
        group = parallel_state.get_expert_model_parallel_rank() if ".experts." in name else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {slice_} {group}".encode()))
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    args = arguments(kind)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build_model(args)
    config = OptimizerConfig(lr=1e-2, bf16=True, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model])
    for _ in range(2):
        step(model, optimizer)
    # Without the metadata of later releases: experts get the prefix that files up to 0.13 have.
    metadata = (
        {"distrib_optim_sharding_type": "fully_sharded_model_space"} if kind == "dense" else None
    )
    weights = model.module.module.sharded_state_dict(metadata=metadata)
    options = {"metadata": metadata} if metadata else {}
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 2, "model": weights}
    content["optimizer"] = optimizer.sharded_state_dict(weights, **options)
    target = folder / "iter_0000002"
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"))
    dist_checkpointing.save(
        content, str(target), strategy, **({"content_metadata": metadata} if metadata else {})
    )
    state = live_state(args, [model], optimizer)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        torch.save(state, folder / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

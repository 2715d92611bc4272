# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Megatron-LM's training loop: the parts that touch the data-parallel class.

Loaded by `loaded()` under the names of the checkout's `megatron.training.training` and
`megatron.training.checkpointing`; its imports then run as theirs do, and see what stands under
Megatron-Core's names at that moment.
"""

import argparse
import importlib.util
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed import FullyShardedDataParallel as megatron_FSDP
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

uneven = import_module("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor")
entries = import_module("megatron.core.transformer.fsdp_dtensor_checkpoint")
preprocess_state_dict_for_uneven_dtensor = uneven.preprocess_state_dict_for_uneven_dtensor
print_diff_in_state_dicts = entries.print_diff_in_state_dicts
handle_fp8_extra_state_case = entries.handle_fp8_extra_state_case
handle_swiglu_in_state_dict = entries.handle_swiglu_in_state_dict
handle_experts_in_state_dict = entries.handle_experts_in_state_dict
del uneven, entries

NAMES = ("megatron.training.training", "megatron.training.checkpointing")


@contextmanager
def loaded() -> Iterator[ModuleType]:
    """Import this file under the name that the loop of a Megatron-LM checkout has."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_training(name)}
    sys.modules["megatron.training"] = ModuleType("megatron.training")
    spec = importlib.util.spec_from_file_location(NAMES[0], Path(__file__))
    loop = importlib.util.module_from_spec(spec)
    sys.modules.update(dict.fromkeys(NAMES, loop))
    try:
        spec.loader.exec_module(loop)
        yield loop
    finally:
        for name in [name for name in sys.modules if _is_training(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _is_training(name: str) -> bool:
    return name == "megatron.training" or name.startswith("megatron.training.")


def arguments(**changes: Any) -> argparse.Namespace:
    """Return the arguments of a tiny model, as the loop's command line would give them."""
    args = argparse.Namespace(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=None,
        vocab_size=64,
        seq_length=16,
        normalization="RMSNorm",
        swiglu=True,
        num_experts=None,
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        bf16=False,
        fp16=False,
        lr=5e-3,
        min_lr=5e-4,
        train_iters=20,
        adam_beta2=0.999,
        global_batch_size=8,
        micro_batch_size=2,
        data_parallel_sharding_strategy="optim_grads_params",
        seed=1234,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
        overlap_grad_reduce=True,
        strict_fsdp_dtensor_load=True,
        no_load_rng=True,
        no_load_optim=False,
        iteration=0,
    )
    unknown = changes.keys() - vars(args).keys()
    assert not unknown, f"no such arguments: {unknown}"
    vars(args).update(changes)
    return args


def get_model(args: argparse.Namespace) -> list[torch.nn.Module]:
    """Build the model in the run's precision and wrap it in the data-parallel class."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=False,
        num_moe_experts=args.num_experts,
        moe_router_load_balancing_type="none",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        batch_p2p_comm=False,
        expert_model_parallel_size=args.expert_model_parallel_size,
        moe_token_dispatcher_type="allgather",
    )
    num_chunks = args.virtual_pipeline_model_parallel_size
    chunks = [
        build_chunk(args, config, stage)
        for stage in (range(num_chunks) if num_chunks is not None else [None])
    ]
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=args.data_parallel_sharding_strategy,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_grad_reduce,
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = [
            megatron_FSDP(
                config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0
            )
            for number, chunk in enumerate(chunks)
        ]
    torch.cuda.current_stream().wait_stream(stream)
    return model


def build_chunk(
    args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None
) -> torch.nn.Module:
    """Build the layers of one (virtual) pipeline stage."""
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    model: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=args.num_experts, normalization=args.normalization),
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return Float16Module(config, model) if args.bf16 or args.fp16 else model


def setup(args: argparse.Namespace) -> tuple[list[torch.nn.Module], Any, OptimizerParamScheduler]:
    """Model, optimizer and schedule; the same initial weights on every rank."""
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    model = get_model(args)
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=0.1,
        adam_beta2=args.adam_beta2,
        clip_grad=1.0,
        bf16=args.bf16,
        fp16=args.fp16,
        initial_loss_scale=2.0**14,
        loss_scale_window=2.0,
        hysteresis=1,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, model)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=1e-3,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=2 * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )
    connect(args, model, optimizer)
    return model, optimizer, scheduler


def connect(args: argparse.Namespace, model: list[torch.nn.Module], optimizer: Any) -> None:
    """Set the functions that schedules call.

    Only a class that the loop knows gets to know which microbatch is the last.
    """
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    if isinstance(model[0], megatron_FSDP) and args.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in model]
        config.no_sync_func = functions if len(model) > 1 else functions[0]
    config.finalize_model_grads_func = finalize_model_grads


def microbatches(args: argparse.Namespace, step: int) -> Iterator[torch.Tensor]:
    """Yield this data rank's part of a batch that is the same under every layout."""
    first = torch.arange(args.global_batch_size) * 5 + 7 * step
    batch = (first[:, None] + torch.arange(args.seq_length + 1)) % args.vocab_size
    ranks = parallel_state.get_data_parallel_world_size()
    yield from batch.split(args.micro_batch_size)[parallel_state.get_data_parallel_rank() :: ranks]


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    length = tokens.shape[1] - 1
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    output = model(
        tokens[:, :-1],
        torch.arange(length).expand_as(tokens[:, 1:]),
        mask,
        labels=tokens[:, 1:].contiguous(),
    )
    return output, loss_func


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def train(
    args: argparse.Namespace,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: OptimizerParamScheduler,
    steps: int,
) -> list[float]:
    """Train and return the mean loss of every step."""
    losses = []
    for _ in range(steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        seen = run_schedule(args, model, forward_only=False)
        updated, _, _ = optimizer.step()
        if updated:
            scheduler.step(increment=args.global_batch_size)
        args.iteration += 1
        # Only the last stage computes losses.
        mean = torch.stack([each["lm loss"] for each in seen] or [torch.zeros(())]).mean()
        dist.all_reduce(mean)
        losses.append(mean.item() * args.pipeline_model_parallel_size / dist.get_world_size())
    return losses


def run_schedule(
    args: argparse.Namespace, model: list[torch.nn.Module], forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    """Run all microbatches of a step."""
    ranks = parallel_state.get_data_parallel_world_size()
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[microbatches(args, args.iteration) for _ in model],
        model=model,
        num_microbatches=args.global_batch_size // args.micro_batch_size // ranks,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )


def generate_state_dict(
    args: argparse.Namespace,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    is_loading: bool,
) -> dict[str, Any]:
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": args.iteration,
        "opt_param_scheduler": scheduler.state_dict(),
    }
    for number, chunk in enumerate(unwrap_model(model)):
        key = f"model{number}" if len(model) > 1 else "model"
        state[key] = chunk.state_dict_for_save_checkpoint()
    if not (is_loading and args.no_load_optim):
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
        )
    if not (is_loading and args.no_load_rng):
        state["rng_state"] = rng_state()
    return state


def rng_state() -> dict[str, list[dict[str, Any]]]:
    stage = (
        f"({parallel_state.get_pipeline_model_parallel_rank()},"
        f" {parallel_state.get_tensor_model_parallel_rank()})"
    )
    generators = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return {stage: [generators]}


def preprocess_fsdp_dtensor_state_dict(
    args: argparse.Namespace, raw_state_dict: dict[str, Any], model: torch.nn.Module
) -> dict[str, Any]:
    state = raw_state_dict.copy()
    handle_fp8_extra_state_case(state["model"])
    if args.swiglu:
        state["model"], optimizer = handle_swiglu_in_state_dict(
            model, state["model"], state.get("optimizer")
        )
        if optimizer is not None:
            state["optimizer"] = optimizer
    if args.num_experts:
        state["model"] = handle_experts_in_state_dict(state["model"], args.num_experts)
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def save_checkpoint(
    args: argparse.Namespace,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    path: str,
) -> None:
    state = generate_state_dict(args, model, optimizer, scheduler, is_loading=False)
    dcp.save(preprocess_fsdp_dtensor_state_dict(args, state, model[0]), checkpoint_id=path)


def load_checkpoint(
    args: argparse.Namespace,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    path: str,
) -> None:
    state = generate_state_dict(args, model, optimizer, scheduler, is_loading=True)
    kept = {key: state[key].copy() for key in ("model", "optimizer") if key in state}
    state = preprocess_fsdp_dtensor_state_dict(args, state, model[0])
    reader = dcp.FileSystemReader(path)
    if not args.strict_fsdp_dtensor_load:
        print_diff_in_state_dicts(reader.read_metadata().state_dict_metadata, state)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=not args.strict_fsdp_dtensor_load)
    dcp.load(state, storage_reader=reader, planner=planner)
    state.update(kept)
    for number, chunk in enumerate(model):
        key = f"model{number}" if len(model) > 1 else "model"
        if len(model) == 1 or key in state:
            load_model_state_dict(chunk, state[key])
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["opt_param_scheduler"])
    if "rng_state" in state:
        torch.set_rng_state(next(iter(state["rng_state"].values()))[0]["torch_rng_state"])
    args.iteration = state["iteration"]


def load_model_state_dict(
    model: torch.nn.Module, state: dict[str, Any], strict: bool = True
) -> None:
    """With a second try that takes what fits."""
    try:
        model.load_state_dict(state, strict=strict)
    except Exception:
        print(
            "load_state_dict failed, trying again with strict=False:",
            model.load_state_dict(state, strict=False),
        )

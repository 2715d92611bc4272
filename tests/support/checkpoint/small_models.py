# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every kind as a training run would have them, and checkpoints of them."""

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.core.spelling import choose_spelling
from megatron.checkpoint.core.training_state import SCHEDULE, OptimizerParamGroup, TrainingState
from megatron.checkpoint.fsdp_dtensor import dtensor_writer as fsdp_dtensor
from megatron.checkpoint.store.directory import new_checkpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist

HIDDEN, WIDTH, TOKENS, EXPERTS = 8, 12, 32, 2
ARGS = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": WIDTH,
    "num_attention_heads": 2,
    "kv_channels": 4,
    "group_query_attention": False,
    "num_query_groups": 1,
    "multi_latent_attention": False,
    "padded_vocab_size": TOKENS,
    "swiglu": True,
    "bf16": True,
    "fp16": False,
    "params_dtype": torch.bfloat16,
    "transformer_impl": "local",
    "num_experts": None,
    "moe_ffn_hidden_size": WIDTH,
    "moe_grouped_gemm": False,
    "consumed_train_samples": 24,
    "untie_embeddings_and_output_weights": True,
}
GROUP = {
    "is_expert_parallel": False,
    "lr_mult": 1.0,
    "lr": 0.25,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
GENERATORS = {
    "random_rng_state": (3, (1, 2), None),
    "torch_rng_state": torch.arange(16, dtype=torch.uint8),
    "rng_tracker_states": {"model-parallel-rng": torch.arange(8, dtype=torch.uint8)},
}


def layer(prefix: str, kind: str = "gated") -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer: ``gated``, ``gelu`` (with biases) or ``experts``."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN),
        "pre_mlp_layernorm.weight": (HIDDEN,),
    }
    rows = WIDTH if kind == "gelu" else 2 * WIDTH
    mlps = (
        [f"mlp.experts.local_experts.{number}" for number in range(EXPERTS)]
        if kind == "experts"
        else ["mlp"]
    )
    for mlp in mlps:
        shapes |= {
            f"{mlp}.linear_fc1.weight": (rows, HIDDEN),
            f"{mlp}.linear_fc2.weight": (HIDDEN, WIDTH),
        }
        if kind == "gelu":
            shapes |= {f"{mlp}.linear_fc1.bias": (rows,), f"{mlp}.linear_fc2.bias": (HIDDEN,)}
    if kind == "experts":
        shapes |= {"mlp.router.weight": (EXPERTS, HIDDEN), "mlp.router.expert_bias": (EXPERTS,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def shapes_of(
    layers: Sequence[str] = ("gated", "gated"), predicting: bool = False, tied: bool = False
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (TOKENS, HIDDEN)}
    for number, kind in enumerate(layers):
        shapes |= layer(f"decoder.layers.{number}.", kind)
    shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
    if predicting:
        norms = {
            f"mtp.layers.0.{norm}.weight": (HIDDEN,)
            for norm in ("enorm", "hnorm", "final_layernorm")
        }
        shapes |= {
            **norms,
            "mtp.layers.0.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
            **layer("mtp.layers.0.transformer_layer.", layers[0]),
        }
    return shapes if tied else {**shapes, "output_layer.weight": (TOKENS, HIDDEN)}


def values(name: str, shape: tuple[int, ...], slot: str = "weight") -> torch.Tensor:
    """Random, and the same whenever it is asked for."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{slot} of {name}".encode()))
    drawn = torch.randn(shape, generator=random)
    return drawn.square() if slot == "exp_avg_sq" else drawn


def state_of(
    shapes: dict[str, tuple[int, ...]], with_optimizer: bool = True, **args: Any
) -> TrainingState:
    """Return the state of a run after three steps."""
    buffers = {name: shape for name, shape in shapes.items() if name.endswith("expert_bias")}
    weights = {name: shape for name, shape in shapes.items() if name not in buffers}
    has_experts = bool(buffers)
    run = argparse.Namespace(**{**ARGS, "num_experts": EXPERTS if has_experts else None, **args})
    state = TrainingState(
        weights={name: in_memory(values(name, shape)) for name, shape in weights.items()},
        compute_dtype=dict.fromkeys(weights, run.params_dtype),
        buffers={name: in_memory(values(name, shape)) for name, shape in buffers.items()},
        args=run,
        iteration=3,
        operations=1e9,
        scheduler={**dict.fromkeys(SCHEDULE, 0), "max_lr": 0.5, "num_steps": 24},
        random_states={(0, 0): [GENERATORS]},
    )
    if with_optimizer:
        slots = ("exp_avg", "exp_avg_sq")
        state.moments = {
            name: {slot: in_memory(values(name, shape, slot)) for slot in slots}
            for name, shape in weights.items()
        }
        state.groups = _groups(weights, has_experts)
    return state


def _groups(weights: dict[str, tuple[int, ...]], has_experts: bool) -> list[OptimizerParamGroup]:
    groups = []
    for of_experts in (False, True) if has_experts else (False,):
        for decays in (True, False):
            names = [
                name
                for name, shape in weights.items()
                if (".experts." in name) == of_experts
                and (len(shape) > 1 and not name.endswith(".bias")) == decays
            ]
            if names:
                groups.append(
                    OptimizerParamGroup(
                        {
                            **GROUP,
                            "is_expert_parallel": of_experts,
                            "wd_mult": float(decays),
                            "step": 3.0,
                        },
                        names,
                    )
                )
    return groups


def write(state: TrainingState, path: Path, form: str = "torch_dist", **options: Any) -> Path:
    """Write the state and return the directory of its iteration."""
    spelling = choose_spelling(state, state.args.transformer_impl)
    make = torch_dist.target if form == "torch_dist" else fsdp_dtensor.target
    output = new_checkpoint(path, state.iteration)
    conversion.convert(make(state, spelling, **options), output, show_progress=False)
    return output.final


def read(path: Path, **options: Any) -> TrainingState:
    return open_checkpoint(path).state(**options)

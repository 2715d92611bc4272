# SPDX-License-Identifier: Apache-2.0
"""Settings of accelerate and transformers that sharded training does not support, by name."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron.huggingface.states import is_peft_model
from megatron_fsdp import fully_shard_model

OTHER_PLUGINS = (
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)
"""Arguments of accelerate's Accelerator that choose another way to distribute a model."""

OTHER_LAUNCHES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
"""Environment variables with which `accelerate launch` chooses them."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of transformers' `optim` with an element-wise update of torch."""

DDP_ARGUMENTS = (
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
)

COMPILE_HINT = "compile the layers before training instead: for layer in layers: layer.compile()"


def raise_problems(subject: str, problems: Sequence[str]) -> None:
    """Raise one ``ValueError`` that lists all ``problems``, if there are any."""
    if problems:
        lines = "".join(f"\n- {problem}" for problem in problems)
        raise ValueError(f"{subject}, for these reasons:{lines}")


def problems_of_sharding(sharding: Mapping[str, Any]) -> list[str]:
    """List the keys of ``sharding`` that are no arguments of ``fully_shard_model``."""
    _, *known = inspect.signature(fully_shard_model).parameters  # the first one is the module
    unknown = [name for name in sharding if name not in known]
    if not unknown:
        return []
    return [
        f"sharding has {', '.join(map(repr, unknown))}, which fully_shard_model does not take; it"
        f" takes {', '.join(known)}"
    ]


def problems_of_accelerator(arguments: Mapping[str, Any]) -> list[str]:
    """List what is not supported of the arguments of accelerate's Accelerator."""
    problems = []
    for name in OTHER_PLUGINS:
        if arguments.get(name) is not None:
            problems.append(f"{name}: the model would be distributed twice; leave it out")
    for name in OTHER_LAUNCHES:
        if os.environ.get(name, "false").lower() == "true":
            problems.append(
                f"the environment variable {name}: the model would be distributed twice; start the"
                " program with torchrun, or accelerate launch --multi_gpu"
            )
    precision = arguments.get("mixed_precision")
    if precision is None:
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(precision) not in ("no", "bf16"):
        problems.append(f"mixed_precision={str(precision)!r}: use 'bf16' or 'no'")
    if arguments.get("device_placement", True) is not True:
        problems.append("device_placement=False: sharding places the model; leave it out")
    backend = getattr(arguments.get("dynamo_plugin"), "backend", arguments.get("dynamo_backend"))
    if backend is None:
        backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if str(getattr(backend, "value", backend)).upper() != "NO":
        problems.append(f"torch.compile of the whole model: {COMPILE_HINT}")
    if not getattr(arguments.get("dataloader_config"), "even_batches", True):
        problems.append(_uneven("even_batches=False"))
    return problems


def problems_of_training_arguments(arguments: Any) -> list[str]:
    """List what is not supported of transformers' TrainingArguments."""
    problems = []
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(arguments, name, None):
            problems.append(f"{name}: the model would be distributed twice; leave it out")
    for name in DDP_ARGUMENTS:
        if getattr(arguments, name, None) is not None:
            problems.append(f"{name}: nothing is wrapped in DistributedDataParallel; leave it out")
    if arguments.fp16:
        problems.append("fp16: use bf16=True")
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(arguments, name):
            problems.append(f"{name}: a sharded model is not converted; leave it out")
    if arguments.torch_compile:
        problems.append(f"torch_compile: {COMPILE_HINT}")
    if arguments.auto_find_batch_size:
        problems.append("auto_find_batch_size: a model is sharded once; set the batch size")
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if optimizer not in OPTIMIZERS:
        problems.append(
            f"optim={optimizer!r}: ranks update parts of matrices; use one of"
            f" {', '.join(OPTIMIZERS)}, or hand another element-wise optimizer over as"
            " optimizer_cls_and_kwargs"
        )
    if not arguments.accelerator_config.even_batches:
        problems.append(_uneven("accelerator_config.even_batches=False"))
    return problems + _problems_of_saving(arguments)


def _problems_of_saving(arguments: Any) -> list[str]:
    problems = []
    if arguments.save_on_each_node:
        problems.append(
            "save_on_each_node: ranks save shards of one checkpoint; use shared storage"
        )
    if arguments.save_only_model and arguments.load_best_model_at_end:
        problems.append("save_only_model with load_best_model_at_end: leave save_only_model out")
    hub_strategy = str(getattr(arguments.hub_strategy, "value", arguments.hub_strategy))
    if arguments.push_to_hub and hub_strategy != "end":
        problems.append(
            "push_to_hub of checkpoints: their weights are shards; add hub_strategy='end'"
        )
    if getattr(arguments, "enable_jit_checkpoint", False):
        problems.append("enable_jit_checkpoint: ranks would save at different steps; leave it out")
    if not arguments.use_cpu and _num_launched() > 1 and arguments.world_size == 1:
        problems.append("torchrun has started several ranks, but there is no GPU: add use_cpu=True")
    return problems


def problems_of_model(module: nn.Module) -> list[str]:
    """List why a model cannot be sharded here; ``fully_shard_model`` checks the rest."""
    problems = []
    if getattr(module, "quantization_method", None) is not None:
        problems.append(
            f"it is quantized ({module.quantization_method}): load it without quantization_config"
        )
    if getattr(module, "is_distributed_loading_by_transformers", False):
        problems.append("it was sharded when it was loaded: leave distributed_config out")
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.PeftMixedModel):
        problems.append("PeftMixedModel cannot be saved: use PeftModel")
    if is_peft_model(module):
        adapters: Any = module.active_peft_config
        if adapters.is_prompt_learning:
            kind = str(getattr(adapters.peft_type, "value", "prompt learning"))
            problems.append(f"{kind}: PEFT reads prompts outside of the model's forward; use LoRA")
    return problems


def _uneven(name: str) -> str:
    return (
        f"{name}: every forward is a collective, so a rank with fewer batches would leave the"
        " others waiting; leave it out"
    )


def _num_launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))

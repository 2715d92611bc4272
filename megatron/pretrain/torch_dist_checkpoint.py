# SPDX-License-Identifier: Apache-2.0
"""Runs without FSDP: saved and loaded as torch_dist, through Megatron-Core's own dist_checkpointing.

Three defects of its DistributedOptimizer over torch's AdamW are worked around: saving, or loading
into, an optimizer without state fails, so it has state from the beginning
(``make_optimizer_state``); the state on disk has no ``step``, which is then looked for; and after a
load all parameters share one ``step`` tensor, so that a training step advances it once per
parameter.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.stored_metadata import read_metadata
from megatron.checkpoint.torch_dist.checkpoint import read_common
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain.gpt_model import unwrap


def save(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    target: Path,
) -> None:
    """Write into the empty directory ``target``."""
    metadata = content_metadata(args)
    with whole_weights(model), quiet():
        content = sharded_state(args, state, model, optimizer, metadata, is_loading=False)
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        dist_checkpointing.save(content, str(target), strategy, content_metadata=metadata)


def load(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    source: Path,
) -> dict[str, Any]:
    """Load ``source`` into the model and the optimizer; the rest of what it holds is returned.

    Raises:
        ValueError: where it does not fit this run.
    """
    _refuse_code(source)
    with whole_weights(model), quiet():
        metadata = dist_checkpointing.load_content_metadata(str(source)) or content_metadata(args)
        content = sharded_state(args, state, model, optimizer, metadata, is_loading=True)
        known = read_metadata(source).state_dict_metadata
        absent = (
            []
            if "rng_state" not in content or content["rng_state"].unique_key in known
            else ["no random state"]
        )
        if agree(absent):  # written under another layout; the caller says so
            content.pop("rng_state", None)
        try:
            loaded = dist_checkpointing.load(
                content, str(source), strict=StrictHandling(args.dist_ckpt_strictness)
            )
        except (CheckpointingException, KeyError, RuntimeError) as error:
            raise ValueError(
                f"{source} is a checkpoint of another model or run: {error}"
            ) from error
        if isinstance(loaded, tuple):  # return_unexpected and return_all give the differences too
            loaded = loaded[0]
        for key, chunk in named_chunks(model).items():
            unwrap(chunk).load_state_dict(loaded[key])
        if optimizer is not None:
            load_optimizer(optimizer, loaded["optimizer"])
    return loaded


def _refuse_code(source: Path) -> None:
    """Megatron-Core unpickles whatever is in a file, so everything in it is read as data before; a collective.

    Raises:
        ValueError: where a file is damaged, or names what checkpoints do not hold.
    """
    problems = []
    if dist.get_rank() == 0:
        try:
            stored = StoredCheckpoint(source)
            read_common(stored)
            for key in stored.objects:
                stored.read_object(key)
        except ValueError as error:
            problems = [str(error)]
    problems = agree(problems)
    if problems:
        raise ValueError(problems[0])


def content_metadata(args: argparse.Namespace) -> dict[str, Any]:
    """How the optimizer's state is laid out, which the file says too."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:
        reshardable = args.dist_ckpt_optim_fully_reshardable
        metadata["distrib_optim_sharding_type"] = (
            "fully_reshardable" if reshardable else "dp_reshardable"
        )
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def sharded_state(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    metadata: dict[str, Any],
    is_loading: bool,
) -> dict[str, Any]:
    """``state`` with the model, the optimizer and the random state in Megatron-Core's sharded form."""
    models = _sharded_models(model, metadata)
    content = {**state, **models}
    if optimizer is not None:
        weights = models["model"] if len(models) == 1 else models
        content["optimizer"] = optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=metadata
        )
    if "rng_state" in state:
        content["rng_state"] = random_state(args, state["rng_state"])
    return content


def _sharded_models(model: list[MegatronModule], metadata: dict[str, Any]) -> dict[str, Any]:
    """The chunks in Megatron-Core's sharded form, which it cannot make of some models on some stages; a collective.

    Raises:
        ValueError: on every rank, where any cannot: the others must not wait in a collective for
            it.
    """
    models, problems = {}, []
    try:
        models = {
            key: unwrap(chunk).sharded_state_dict(metadata=metadata)
            for key, chunk in named_chunks(model).items()
        }
    except Exception as error:  # assertions about layouts, for the most part
        problems = [
            f"Megatron-Core cannot save or load this model in torch_dist: {type(error).__name__}:"
            f" {error}"
        ]
    problems = agree(problems)
    if problems:
        raise ValueError(problems[0])
    return models


def random_state(args: argparse.Namespace, states: list[dict[str, Any]]) -> ShardedObject:
    """The generators of this rank: one entry for each pipeline stage and tensor-parallel rank, with experts for each data rank."""
    place = [
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    ]
    shape = [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    ]
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if args.expert_model_parallel_size == 1:
        return ShardedObject("rng_state", states, tuple(shape), tuple(place), replica_id=data_rank)
    place.append(data_rank)
    shape.append(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    return ShardedObject("rng_state", [states[data_rank % len(states)]], tuple(shape), tuple(place))


def named_chunks(model: list[MegatronModule]) -> dict[str, MegatronModule]:
    """``model``, or ``model0``, ``model1`` and so on where there are virtual pipeline stages."""
    return {
        "model" if len(model) == 1 else f"model{number}": chunk
        for number, chunk in enumerate(model)
    }


def distributed_optimizers(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    """The distributed optimizers inside a chain, or the optimizer itself if it is one."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner, DistributedOptimizer):
            yield inner


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Hand the state to the optimizer, around the defects named above."""
    for inner in distributed_optimizers(optimizer):
        original = inner._set_main_param_and_optimizer_states

        def without_step(
            model_param: torch.nn.Parameter, tensors: dict[str, Any], inner=inner, original=original
        ) -> None:
            group, order = inner.model_param_group_index_map[model_param]
            slots = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]
            # The group's step is in place already; bucket layouts bring back that of the empty
            # optimizer.
            original(
                model_param, {**tensors, **{name: slots[name] for name in slots if name == "step"}}
            )

        inner._set_main_param_and_optimizer_states = without_step
    try:
        with torch.no_grad():  # in fp32 runs main parameters are views of the model's
            optimizer.load_state_dict(state)
    finally:
        for inner in distributed_optimizers(optimizer):
            del inner._set_main_param_and_optimizer_states  # the method of the class again
            for slots in inner.optimizer.state.values():
                if isinstance(slots.get("step"), torch.Tensor):
                    slots["step"] = slots["step"].clone()


@contextmanager
def whole_weights(model: list[MegatronModule]) -> Iterator[None]:
    """With overlapped gathers, weights are whole only after a gather that the next forward would begin."""
    overlapped = [
        chunk
        for chunk in model
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather
    ]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


@contextmanager
def quiet() -> Iterator[None]:
    """Torch's checkpoint uses names that torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs without FSDP, in the format torch_dist of Megatron-Core's dist_checkpointing.

Three defects of its DistributedOptimizer over torch's AdamW are worked around. Saving, or loading
into, an optimizer without state fails, so it has state from the beginning
(``make_optimizer_state``). The state on disk has no ``step``, which a load then misses. After a
load all parameters share one ``step`` tensor, so that a training step advances it once per
parameter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.dcp.stored_metadata import read_metadata
from megatron.checkpoint.torch_dist.checkpoint import check_marker
from megatron.checkpoint.torch_dist.unsharded_state import COMMON_FILE, read_common
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.trace.failed_collectives import CollectiveError
from megatron.mcore_adapter.checkpoints.checkpoint_format import (
    attempt,
    sign,
    tell_of_partial_load,
    without_warnings,
)
from megatron.mcore_adapter.checkpoints.entered_together import PeerError
from megatron.mcore_adapter.checkpoints.torch_dist_saving import (
    SaveStrategies,
    error_of_disk,
    load_strategy,
    written_by_threads,
)
from megatron.mcore_adapter.releases.common_state import common_object_readable
from megatron.mcore_adapter.run.first_rank import Say, on_first_rank
from megatron.mcore_adapter.run.run_state import TrainedParts
from megatron.mcore_adapter.run.wrapped_model import unwrap

SHARDING_TYPE = "distrib_optim_sharding_type"
"""The field of the description that names the distributed optimizer's layout; absent without it."""
MEMORY_EFFICIENT = "distrib_optim_fully_reshardable_mem_efficient"
"""The field of the description that says how a save gathers the optimizer's state."""
EXPERT = "is_expert_parallel"
"""The field of a param group of weights of experts that ranks divide among them."""
LENIENT = ("log_", "return_", "ignore_")
"""Beginnings of the values of --dist-ckpt-strictness with which differences are no errors."""


class TorchDistFormat:
    """The format torch_dist of runs without FSDP, by Megatron-Core's dist_checkpointing."""

    def __init__(self) -> None:
        self._strategies = SaveStrategies()

    def collect(
        self, args: argparse.Namespace, state: dict[str, Any], parts: TrainedParts
    ) -> dict[str, Any]:
        """Return ``state``, the model and the optimizer in Megatron-Core's sharded form."""
        with gathered_weights(parts.model), without_warnings():
            content = sharded_state(state, parts, metadata_of(args), is_loading=False)
            apply_factories(content)  # they are functions, which no other process could be sent
        return content

    def write(self, args: argparse.Namespace, content: dict[str, Any], target: Path) -> list[str]:
        """Write content into the directory ``target``, and sign it; return all ranks' problems."""

        def save() -> None:
            metadata = metadata_of(args)
            with without_warnings(), written_by_threads():
                strategy = self._strategies.strategy(args, content)
                try:
                    dist_checkpointing.save(
                        content, str(target), strategy, content_metadata=metadata
                    )
                except RuntimeError as error:
                    found = error_of_disk(error, target)
                    if found is error:
                        raise
                    raise found from error

        problems = attempt(save)
        if problems:
            self._strategies.forget()
        return problems or sign(target)

    def load(
        self,
        args: argparse.Namespace,
        state: dict[str, Any],
        parts: TrainedParts,
        source: Path,
        say: Say,
    ) -> dict[str, Any]:
        """Load a torch_dist checkpoint into the model and the optimizer, and return the rest.

        Raises:
            ValueError: it does not fit this run, is damaged, or names what checkpoints do not hold.
        """
        model, optimizer = parts.model, parts.optimizer
        on_first_rank(lambda: _refuse_code(source))
        with gathered_weights(model), without_warnings(), _common_state_readable(source):
            described = dist_checkpointing.load_content_metadata(str(source))
            if described and optimizer is not None:
                _refuse_other_optimizer(args, described, source)
            metadata = described or metadata_of(args)
            # A load needs no gathering, and gloo groups only with it.
            metadata = {**metadata, MEMORY_EFFICIENT: False}
            content = sharded_state(state, parts, metadata, is_loading=True)
            _drop_absent_random_state(content, source)
            models = [content[key] for key in named_chunks(model)]
            own_keys = {entry.key for entry in nested_values(models) if hasattr(entry, "key")}
            not_asked = tuple({"optimizer", "rng_state"} - content.keys())
            loaded, *differences = _load_sharded(args, content, source)
            if differences:
                not_in_model, not_in_file = differences
                unused = [key for key in sorted(not_in_model) if not key.startswith(not_asked)]
                fits = bool(agree(["fits"] if own_keys - not_in_file else []))
                tell_of_partial_load(source, agree(not_in_file), unused, fits, say)
            for key, chunk in named_chunks(model).items():
                unwrap(chunk).load_state_dict(loaded[key], strict=not differences)
            if optimizer is not None:
                load_optimizer(optimizer, loaded["optimizer"])
        return loaded


def _load_sharded(
    args: argparse.Namespace, content: dict[str, Any], source: Path
) -> tuple[Any, ...]:
    """Load content in Megatron-Core's sharded form; a collective.

    A load that is not strict also returns the keys of the file that no rank asks for, and those
    that this rank asks for in vain.
    """
    is_lenient = args.dist_ckpt_strictness.startswith(LENIENT)
    strict = "return_all" if is_lenient else args.dist_ckpt_strictness
    try:
        loaded = dist_checkpointing.load(
            content,
            str(source),
            sharded_strategy=load_strategy(args),
            strict=StrictHandling(strict),
        )
    except (PeerError, CollectiveError):
        raise  # another rank has failed
    except (CheckpointingException, KeyError, RuntimeError) as error:
        raise ValueError(f"{source} is a checkpoint of another model or run: {error}") from error
    return loaded if isinstance(loaded, tuple) else (loaded,)


def _refuse_other_optimizer(
    args: argparse.Namespace, described: dict[str, Any], source: Path
) -> None:
    """Refuse optimizer state that Megatron-Core's optimizer of this run cannot read.

    ``described`` is the description in the file, as :func:`metadata_of` makes it.
    """
    is_distributed = SHARDING_TYPE in described
    if is_distributed == args.use_distributed_optimizer:
        return
    without, way = ("", "give") if is_distributed else ("out", "leave out")
    raise ValueError(
        f"{source} was written with{without} --use-distributed-optimizer, whose optimizer state is"
        f" another one: {way} --use-distributed-optimizer, or load the weights alone with"
        " --no-load-optim; runs with --use-megatron-fsdp load both"
    )


def _refuse_code(source: Path) -> None:
    """Read everything in the file as data first, because Megatron-Core unpickles any content."""
    check_marker(source)
    stored = StoredCheckpoint(source, verify=False)  # its files are verified already
    read_common(stored)
    for key in stored.objects:
        stored.read_object(key)


def _common_state_readable(source: Path) -> AbstractContextManager[None]:
    """Return the context in which Megatron-Core finds the common state, in either form."""
    if (source / COMMON_FILE).is_file():
        return nullcontext()
    return common_object_readable(lambda: read_common(StoredCheckpoint(source, verify=False)))


def _drop_absent_random_state(content: dict[str, Any], source: Path) -> None:
    """Request no random state on any rank if the file has none for some rank; a collective.

    It has none for some ranks where it was written under another layout, which the caller reports.
    """
    absent = []
    if "rng_state" in content:
        known = read_metadata(source).state_dict_metadata
        if content["rng_state"].unique_key not in known:
            absent.append("no random state")
    if agree(absent):
        content.pop("rng_state", None)


def metadata_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the description of the optimizer's layout in the files of a run.

    A layout that is fully reshardable has the state parameter by parameter. For that it is gathered
    on every rank, which writes its share; or, to need less memory, over gloo on the first
    data-parallel rank alone, which writes all of it.
    """
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if args.use_distributed_optimizer:
        is_whole = args.dist_ckpt_optim_fully_reshardable
        metadata[SHARDING_TYPE] = "fully_reshardable" if is_whole else "dp_reshardable"
        metadata[MEMORY_EFFICIENT] = is_whole and args.distrib_optim_fully_reshardable_mem_efficient
    return metadata


def sharded_state(
    state: dict[str, Any], parts: TrainedParts, metadata: dict[str, Any], is_loading: bool
) -> dict[str, Any]:
    """Return ``state`` with model, optimizer and random state in Megatron-Core's sharded form."""
    models = _sharded_models(parts.model, metadata)
    content = {**state, **models}
    if parts.optimizer is not None:
        weights = models["model"] if len(models) == 1 else models
        content["optimizer"] = parts.optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=metadata
        )
    if "rng_state" in state:
        content["rng_state"] = sharded_random_state(state["rng_state"])
    return content


def _sharded_models(model: list[MegatronModule], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the model chunks in Megatron-Core's sharded form; a collective.

    Raises:
        ValueError: on every rank, if Megatron-Core fails for the chunks of some stage. The other
            stages must not wait for it in a collective.
    """
    models: dict[str, Any] = {}

    def shard() -> None:
        for key, chunk in named_chunks(model).items():
            models[key] = unwrap(chunk).sharded_state_dict(metadata=metadata)

    problems = attempt(shard)  # assertions about layouts, for the most part
    if problems:
        raise ValueError(
            f"Megatron-Core cannot save or load this model in torch_dist: {problems[0]}"
        )
    return models


def sharded_random_state(states: list[dict[str, Any]]) -> ShardedObject:
    """Return the generators of this rank in Megatron-Core's sharded form.

    The file has one entry for each pipeline stage and tensor-parallel rank, and with expert
    parallelism for each data rank. ``states`` are those that
    :func:`~megatron.mcore_adapter.run.run_state.gather_random_state` returns.
    """
    offset = [
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    ]
    shape = [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    ]
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return ShardedObject("rng_state", states, tuple(shape), tuple(offset), replica_id=data_rank)
    offset.append(data_rank)
    shape.append(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    state = states[data_rank % len(states)]
    return ShardedObject("rng_state", [state], tuple(shape), tuple(offset))


def named_chunks(model: list[MegatronModule]) -> dict[str, MegatronModule]:
    """Return the chunks by their names in the file.

    The name is ``model``, or ``model0``, ``model1`` and so on with virtual stages.
    """
    if len(model) == 1:
        return {"model": model[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(model)}


def distributed_optimizers(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    """Yield the distributed optimizers inside a chain, or the optimizer itself if it is one."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner, DistributedOptimizer):
            yield inner


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load the state into the optimizer, around the defects that the module names."""
    for inner in distributed_optimizers(optimizer):
        inner._set_main_param_and_optimizer_states = _keeping_step(inner)
    try:
        with torch.no_grad():  # in fp32 runs main parameters are views of the model's
            optimizer.load_state_dict(_for_chain(optimizer, state))
    finally:
        for inner in distributed_optimizers(optimizer):
            del inner._set_main_param_and_optimizer_states  # the method of the class again
            for slots in inner.optimizer.state.values():
                if isinstance(slots.get("step"), torch.Tensor):
                    slots["step"] = slots["step"].clone()


def _for_chain(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    """Return loaded state with an entry for each distributed optimizer of this rank.

    Experts have an optimizer of their own where they are divided among ranks, so that a file of
    another layout may have one more or one less. Each is given the param groups of all. Param
    groups of experts and of other weights stand for each other where only one of them is there.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    numbers = sorted(key for key in state if isinstance(key, int))
    stored = [state] if "optimizer" in state else [state[number] for number in numbers]
    stored = [each for each in stored if "optimizer" in each]
    fits = ("optimizer" in state) == (len(chain) == 1) and len(stored) == len(chain)
    if fits or not stored or len(list(distributed_optimizers(optimizer))) < len(chain):
        return state
    groups: list[dict[str, Any]] = []
    for each in stored:
        groups += each["optimizer"]["param_groups"]
    others = [{**each, EXPERT: not each.get(EXPERT)} for each in groups]  # what follows replaces it
    shared = {key: value for key, value in stored[0].items() if not isinstance(key, int)}
    shared["optimizer"] = {**shared["optimizer"], "param_groups": [*others, *groups]}
    if len(chain) == 1:
        own = {key: value for key, value in state.items() if not isinstance(key, int)}
        return {**shared, **own}
    return {number: {**shared, **state.get(number, {})} for number in range(len(chain))}


def _keeping_step(
    optimizer: DistributedOptimizer,
) -> Callable[[torch.nn.Parameter, dict[str, Any]], None]:
    """Return the optimizer's method that sets a parameter's state, made to leave ``step`` alone."""
    set_state = optimizer._set_main_param_and_optimizer_states

    def set_state_without_step(parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        main_parameter = optimizer.optimizer.param_groups[group]["params"][order]
        slots = optimizer.optimizer.state[main_parameter]
        if "step" in slots:
            # The group's step is set already; bucket layouts bring back that of the optimizer
            # before its first step.
            tensors = {**tensors, "step": slots["step"]}
        set_state(parameter, tensors)

    return set_state_without_step


@contextmanager
def gathered_weights(model: list[MegatronModule]) -> Iterator[None]:
    """Bring the weights of all ranks up to date inside the context.

    With overlapped all-gathers they are otherwise stale until the next forward gathers them.
    """
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

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs without FSDP, in the format torch_dist of Megatron-Core's dist_checkpointing.

Three defects of its DistributedOptimizer over torch's AdamW are worked around. It cannot save an
optimizer without state nor load into one, so the optimizer has state from the beginning
(``make_optimizer_state``). The state on disk has no ``step``, whose absence makes a load fail.
After a load all parameters share one ``step`` tensor, so that a training step would advance it once
per parameter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron.checkpoint.core.param_groups import EXPERT_FIELD
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.dcp.stored_metadata import read_metadata
from megatron.checkpoint.torch_dist.checkpoint import check_marker
from megatron.checkpoint.torch_dist.unsharded_state import COMMON_FILE, read_common
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.trace.failed_collectives import CollectiveError
from megatron.mcore_adapter.checkpoints.checkpoint_format import (
    attempt,
    report_partial_load,
    sign,
    without_warnings,
)
from megatron.mcore_adapter.checkpoints.entered_together import PeerError
from megatron.mcore_adapter.checkpoints.saved_state import StateDict
from megatron.mcore_adapter.checkpoints.torch_dist_saving import (
    SaveStrategies,
    error_of_disk,
    load_strategy,
    written_by_threads,
)
from megatron.mcore_adapter.releases.common_state import common_object_readable
from megatron.mcore_adapter.run.first_rank import Log, on_first_rank
from megatron.mcore_adapter.run.run_state import TrainedParts
from megatron.mcore_adapter.run.wrapped_model import unwrap

SHARDING_TYPE = "distrib_optim_sharding_type"
"""Field of the metadata: layout of a distributed optimizer; absent for any other optimizer."""
MEMORY_EFFICIENT = "distrib_optim_fully_reshardable_mem_efficient"
"""Field of the metadata: True if a save gathers the optimizer's state on one rank only."""
LENIENT = ("log_", "return_", "ignore_")
"""Prefixes of the values of --dist-ckpt-strictness with which differences are no errors."""


class TorchDistFormat:
    """The format torch_dist of runs without FSDP, by Megatron-Core's dist_checkpointing."""

    def __init__(self) -> None:
        self._strategies = SaveStrategies()

    def collect(
        self,
        args: argparse.Namespace,
        state: StateDict,
        parts: TrainedParts,
    ) -> StateDict:
        """Return ``state``, the model and the optimizer in Megatron-Core's sharded form.

        Args:
            args: arguments of the run.
            state: everything but weights and optimizer.
            parts: model, and the optimizer if its state is saved; the tensors share their storage.

        Raises:
            ValueError: on every rank, if Megatron-Core cannot shard the model of some stage.
        """
        with gathered_weights(parts.model), without_warnings():
            content = sharded_state(state, parts, metadata_of(args), is_loading=False)
            apply_factories(content)  # factories have functions, which cannot be pickled
        return content

    def write(
        self,
        args: argparse.Namespace,
        content: StateDict,
        target: Path,
    ) -> list[str]:
        """Write content into a directory, and sign it.

        Args:
            args: arguments of the run.
            content: result of :meth:`collect`, or a copy of it.
            target: empty directory, the same on all ranks.

        Returns:
            The problems of all ranks, the same on every rank.
        """

        def save() -> None:
            metadata = metadata_of(args)
            with without_warnings(), written_by_threads():
                strategy = self._strategies.strategy(args, content)
                try:
                    dist_checkpointing.save(
                        content, str(target), strategy, content_metadata=metadata
                    )
                except RuntimeError as error:
                    cause = error_of_disk(error, target)
                    if cause is error:
                        raise
                    raise cause from error

        problems = attempt(save)
        if problems:
            self._strategies.forget()
            return problems
        return sign(target)

    def load(
        self,
        args: argparse.Namespace,
        state: StateDict,
        parts: TrainedParts,
        source: Path,
        log: Log,
    ) -> StateDict:
        """Load a torch_dist checkpoint into the model and the optimizer, and return the rest.

        Args:
            args: arguments of the run. ``dist_ckpt_strictness`` may allow a partial load.
            state: everything but weights and optimizer, as a run without a checkpoint has it.
            parts: model, and the optimizer if its state is loaded.
            source: directory of the checkpoint.
            log: prints a line on the first rank.

        Raises:
            ValueError: it does not fit this run, is damaged, or has pickled code.
        """
        model = parts.model
        optimizer = parts.optimizer
        on_first_rank(lambda: _refuse_code(source))
        with gathered_weights(model), without_warnings(), _common_state_readable(source):
            metadata = dist_checkpointing.load_content_metadata(str(source))
            if not metadata:
                metadata = metadata_of(args)
            elif optimizer is not None:
                _refuse_other_optimizer(args, metadata, source)
            # A load needs no gathering, and gloo groups only with it.
            metadata = {**metadata, MEMORY_EFFICIENT: False}
            content = sharded_state(state, parts, metadata, is_loading=True)
            _drop_absent_random_state(content, source)
            models = [content[key] for key in named_chunks(model)]
            own_keys = set()
            for entry in nested_values(models):
                if hasattr(entry, "key"):
                    own_keys.add(entry.key)
            not_requested = tuple({"optimizer", "rng_state"} - content.keys())
            loaded, differences = _load_sharded(args, content, source)
            if differences is not None:
                unused = []
                for key in sorted(differences.not_in_model):
                    if not key.startswith(not_requested):
                        unused.append(key)
                fitting = own_keys - differences.not_in_file
                report_partial_load(
                    source=source,
                    fits=bool(agree(["fits"] if fitting else [])),
                    not_in_file=agree(differences.not_in_file),
                    not_in_model=unused,
                    log=log,
                )
            for key, chunk in named_chunks(model).items():
                unwrap(chunk).load_state_dict(loaded[key], strict=differences is None)
            if optimizer is not None:
                load_optimizer(optimizer, loaded["optimizer"])
        return loaded


class _Differences(NamedTuple):
    """The keys that a load which is not strict has left out.

    Attributes:
        not_in_model: keys of the file that no rank requests; the same on all ranks.
        not_in_file: keys that this rank requests and the file lacks.
    """

    not_in_model: set[str]
    not_in_file: set[str]


def _load_sharded(
    args: argparse.Namespace,
    content: StateDict,
    source: Path,
) -> tuple[StateDict, _Differences | None]:
    """Load content in Megatron-Core's sharded form; a collective.

    Args:
        args: arguments of the run.
        content: content in sharded form, whose tensors are filled.
        source: directory of the checkpoint.

    Returns:
        The content in plain form, and the differences if the load is not strict, else None.

    Raises:
        ValueError: it does not fit this run.
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
    if not is_lenient:
        return loaded, None
    plain, *differences = loaded
    return plain, _Differences(*differences)


def _refuse_other_optimizer(
    args: argparse.Namespace,
    metadata: dict[str, Any],
    source: Path,
) -> None:
    """Refuse optimizer state that Megatron-Core's optimizer of this run cannot read.

    Args:
        args: arguments of the run.
        metadata: metadata in the file, see :func:`metadata_of`.
        source: directory of the checkpoint, for the message.

    Raises:
        ValueError: the file and the run differ in --use-distributed-optimizer.
    """
    is_distributed = SHARDING_TYPE in metadata
    if is_distributed == args.use_distributed_optimizer:
        return
    written = "without"
    fix = "leave out"
    if is_distributed:
        written = "with"
        fix = "give"
    raise ValueError(
        f"{source} was written {written} --use-distributed-optimizer, whose optimizer state is"
        f" another one: {fix} --use-distributed-optimizer, or load the weights alone with"
        " --no-load-optim; runs with --use-megatron-fsdp load both"
    )


def _refuse_code(source: Path) -> None:
    """Read all objects of a checkpoint as data, which refuses code; Megatron-Core unpickles any.

    Raises:
        ValueError: an object has pickled code, or is damaged.
    """
    check_marker(source)
    stored = StoredCheckpoint(source, verify=False)  # its files are verified already
    read_common(stored)
    for key in stored.objects:
        stored.read_object(key)


def _common_state_readable(source: Path) -> AbstractContextManager[None]:
    """Return the context in which Megatron-Core finds the common state, a file or an entry."""
    if (source / COMMON_FILE).is_file():
        return nullcontext()
    return common_object_readable(lambda: read_common(StoredCheckpoint(source, verify=False)))


def _drop_absent_random_state(content: StateDict, source: Path) -> None:
    """Request no random state on any rank if the file has none for some rank; a collective.

    A file of another layout may have none for some ranks. The caller of the load reports it.
    """
    absent = []
    if "rng_state" in content:
        stored = read_metadata(source).state_dict_metadata
        if content["rng_state"].unique_key not in stored:
            absent.append("no random state")
    if agree(absent):
        content.pop("rng_state", None)


def metadata_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the metadata of a run's files, which describe the layout of the optimizer's state.

    A fully reshardable layout has the state parameter by parameter. For this a save gathers the
    state on every rank, which writes its share. To need less memory, it can gather it over gloo on
    the first data-parallel rank alone, which then writes all of it.
    """
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if args.use_distributed_optimizer:
        metadata[SHARDING_TYPE] = "dp_reshardable"
        metadata[MEMORY_EFFICIENT] = False
        if args.dist_ckpt_optim_fully_reshardable:
            metadata[SHARDING_TYPE] = "fully_reshardable"
            metadata[MEMORY_EFFICIENT] = args.distrib_optim_fully_reshardable_mem_efficient
    return metadata


def sharded_state(
    state: StateDict,
    parts: TrainedParts,
    metadata: dict[str, Any],
    is_loading: bool,
) -> StateDict:
    """Return ``state`` with model, optimizer and random state in Megatron-Core's sharded form.

    A collective.

    Args:
        state: everything but weights and optimizer; copied.
        parts: model, and the optimizer if its state is included.
        metadata: result of :func:`metadata_of`, of this run or of the file.
        is_loading: True if the tensors will be loaded into.

    Raises:
        ValueError: on every rank, if Megatron-Core cannot shard the model of some stage.
    """
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


def _sharded_models(model: list[MegatronModule], metadata: dict[str, Any]) -> StateDict:
    """Return the model chunks in Megatron-Core's sharded form; a collective.

    Raises:
        ValueError: on every rank, if Megatron-Core fails for the chunks of some stage, since the
            other stages must not wait for that one in a collective.
    """
    models: StateDict = {}

    def shard() -> None:
        for key, chunk in named_chunks(model).items():
            models[key] = unwrap(chunk).sharded_state_dict(metadata=metadata)

    problems = attempt(shard)  # mostly assertions about layouts
    if problems:
        raise ValueError(
            f"Megatron-Core cannot save or load this model in torch_dist: {problems[0]}"
        )
    return models


def sharded_random_state(states: list[dict[str, Any]]) -> ShardedObject:
    """Return the generators of this rank in Megatron-Core's sharded form.

    The file has one entry for each pipeline stage and tensor-parallel rank, and with expert
    parallelism also for each data-parallel rank.

    Args:
        states: result of :func:`~megatron.mcore_adapter.run.run_state.gather_random_state`.
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
        return ShardedObject(
            "rng_state",
            data=states,
            global_shape=tuple(shape),
            global_offset=tuple(offset),
            replica_id=data_rank,
        )
    offset.append(data_rank)
    shape.append(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    state = states[data_rank % len(states)]
    return ShardedObject(
        "rng_state",
        data=[state],
        global_shape=tuple(shape),
        global_offset=tuple(offset),
    )


def named_chunks(model: list[MegatronModule]) -> dict[str, MegatronModule]:
    """Return the chunks by their names in the file.

    A single chunk is ``model``, those of virtual stages are ``model0``, ``model1`` and so on.
    """
    if len(model) == 1:
        return {"model": model[0]}
    return {f"model{number}": chunk for number, chunk in enumerate(model)}


def distributed_optimizers(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    """Yield the distributed optimizers inside a chain, or the optimizer itself if it is one."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner, DistributedOptimizer):
            yield inner


def load_optimizer(optimizer: MegatronOptimizer, state: StateDict) -> None:
    """Load the state into the optimizer, with workarounds for the defects named in this module."""
    for inner in distributed_optimizers(optimizer):
        inner._set_main_param_and_optimizer_states = _keeping_step(inner)
    try:
        with torch.no_grad():  # in fp32 runs main parameters are views of the model's
            optimizer.load_state_dict(_for_chain(optimizer, state))
    finally:
        for inner in distributed_optimizers(optimizer):
            del inner._set_main_param_and_optimizer_states  # restores the method of the class
            for slots in inner.optimizer.state.values():
                if isinstance(slots.get("step"), torch.Tensor):
                    slots["step"] = slots["step"].clone()


def _for_chain(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    """Return loaded state with an entry for each distributed optimizer of this rank.

    Experts have a separate optimizer if they are divided among ranks, so that a file of another
    layout may have one entry more or less. Then each optimizer gets the param groups of all. Param
    groups of experts and of other weights replace each other if the file has only one of them.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    is_single = len(chain) == 1
    is_stored_single = "optimizer" in state
    stored: list[dict[Any, Any]] = []
    if is_stored_single:
        stored.append(state)
    else:
        for number in sorted(key for key in state if isinstance(key, int)):
            if "optimizer" in state[number]:
                stored.append(state[number])
    fits = is_stored_single == is_single and len(stored) == len(chain)
    if fits or not stored:
        return state
    num_distributed = len(list(distributed_optimizers(optimizer)))
    if num_distributed < len(chain):
        return state
    groups: list[dict[str, Any]] = []
    substitutes: list[dict[str, Any]] = []  # before the groups, which have precedence
    for stored_state in stored:
        for group in stored_state["optimizer"]["param_groups"]:
            groups.append(group)
            substitutes.append({**group, EXPERT_FIELD: not group.get(EXPERT_FIELD)})
    shared = _without_numbers(stored[0])
    shared["optimizer"] = {**shared["optimizer"], "param_groups": [*substitutes, *groups]}
    if is_single:
        return {**shared, **_without_numbers(state)}
    return {number: {**shared, **state.get(number, {})} for number in range(len(chain))}


def _without_numbers(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a state that are not those of an optimizer in a chain."""
    common = {}
    for key, value in state.items():
        if not isinstance(key, int):
            common[key] = value
    return common


def _keeping_step(
    optimizer: DistributedOptimizer,
) -> Callable[[torch.nn.Parameter, dict[str, Any]], None]:
    """Return the optimizer's method that sets a parameter's state, changed to keep ``step``."""
    set_state = optimizer._set_main_param_and_optimizer_states

    def set_state_without_step(parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        main_parameter = optimizer.optimizer.param_groups[group]["params"][order]
        slots = optimizer.optimizer.state[main_parameter]
        if "step" in slots:
            # The step of the group is set already, and the file may have that of the optimizer
            # before its first step.
            tensors = {**tensors, "step": slots["step"]}
        set_state(parameter, tensors)

    return set_state_without_step


@contextmanager
def gathered_weights(model: list[MegatronModule]) -> Iterator[None]:
    """Update the weights of all ranks, and keep them up to date inside the context.

    With overlapped all-gathers they are otherwise stale until the next forward gathers them.
    """
    overlapped = []
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            overlapped.append(chunk)
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()

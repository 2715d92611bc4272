# SPDX-License-Identifier: Apache-2.0
"""The optimizer's tensors in a torch_dist file, which Megatron-Core has written in five layouts.

By parameter, under the key that the model's tensor has:

- ``fully_reshardable``: a tensor for each key of the model and slot, in the shape of the model's
  tensor, in which layers and experts are stacked;
- ``non_distributed``: the same, from optimizers that are not distributed;
- ``fully_sharded_model_space`` (up to 0.15): the same, stored block by block
  (:mod:`megatron.checkpoint.torch_dist.reformulated_tensor`).

By rank, in the order in which ranks have the optimizer's state in memory
(:mod:`megatron.checkpoint.torch_dist.optimizer_buckets`):

- ``dp_reshardable``: a tensor for each rank, bucket and slot;
- ``dp_zero_gather_scatter``: an object for each rank, with all of its buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Tensors
from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.core.param_groups import EXPERT_FIELD
from megatron.checkpoint.core.spelling import unstacked
from megatron.checkpoint.core.training_state import Fields
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist import optimizer_buckets, optimizer_keys
from megatron.checkpoint.torch_dist.optimizer_buffers import (
    OptimizerBuffer,
    check_bucket_sizes,
    gathered_buffers,
    sharded_buffers,
)
from megatron.checkpoint.torch_dist.optimizer_keys import (
    BucketKey,
    OptimizerKey,
    OptimizerOfRank,
    RankObjectKey,
    StateKey,
)
from megatron.checkpoint.torch_dist.reformulated_tensor import original_shape, reformulated
from megatron.checkpoint.torch_dist.unsharded_state import (
    optimizers_in,
    optimizers_of_ranks,
    param_groups_of,
    read_sharded_object,
)

FULLY_RESHARDABLE = "fully_reshardable"
NON_DISTRIBUTED = "non_distributed"
MODEL_SPACE = "fully_sharded_model_space"
DP_RESHARDABLE = "dp_reshardable"
DP_ZERO = "dp_zero_gather_scatter"

Keys = Mapping[str, OptimizerKey]
"""The optimizer's keys of a file -> the same, parsed."""
BuffersByRank = Mapping[OptimizerOfRank, Sequence[OptimizerBuffer]]
"""Chained optimizer and rank -> the rank's buffers."""

_MAIN_SLOTS = ("param", "fp32_param")
"""Slots of the main weight: its names in optimizers that are distributed, and that are not."""


@dataclass
class OptimizerTensors:
    """An optimizer's state in a file, by canonical name, with whole tensors.

    Attributes:
        layout: layout of the file; None if it has no optimizer.
        main: name -> main weight, fp32.
        moments: name -> slot, such as ``exp_avg``, -> tensor shaped like the weight.
        param_groups: param groups of all optimizers one after another, those of experts last;
            without ``params``, with ``step`` if the file has it.
        used_keys: all keys of the file that belong to the optimizer.
        grad_scaler: state of the gradient scaler of fp16 runs whose ranks stored it; others have it
            in the common state.
    """

    layout: str | None = None
    main: Tensors = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=dict)
    param_groups: list[Fields] = field(default_factory=list)
    used_keys: set[str] = field(default_factory=set)
    grad_scaler: Fields | None = None

    def add(
        self,
        name: str,
        slot: str,
        tensor: LazyTensor,
    ) -> None:
        """Add one slot of a parameter.

        Args:
            name: canonical name of the parameter.
            slot: name of the slot in the file.
            tensor: the whole tensor, shaped like the weight.

        Raises:
            ValueError: for one that is there already.
        """
        tensors = self.main
        key = name
        if slot not in _MAIN_SLOTS:
            tensors = self.moments.setdefault(name, {})
            key = slot
        if key in tensors:
            raise ValueError(f"the optimizer has {slot} of {name} twice")
        tensors[key] = tensor


def read_optimizer(
    stored: StoredCheckpoint,
    common: Mapping[str, Any],
    weights: Tensors,
) -> OptimizerTensors:
    """Find the optimizer's tensors by parameter, whatever the layout, without reading them.

    ``dp_zero_gather_scatter`` is the exception: there a rank's whole state is one object. Each is
    read once for its sizes. Reading a tensor then reads the objects of all tensor-parallel ranks of
    a pipeline stage, which stay in memory until a tensor of another stage is read.

    Args:
        stored: the checkpoint.
        common: the common state. Its ``args`` have the sizes of parallelism; those that they lack
            are inferred from the sizes of the buffers.
        weights: canonical name -> the model's tensor.

    Raises:
        ValueError: for keys of an optimizer that are not understood, for tensors that no parameter
            of the model accounts for or that are not as large as they should be, and where an
            argument is needed that ``args`` lack.
    """
    keys = _parsed_keys(stored)
    layout = _find_layout(stored, keys)
    found = OptimizerTensors(layout, used_keys=set(keys))
    if layout is None:
        return found
    if layout in (DP_RESHARDABLE, DP_ZERO):
        _read_by_rank(stored, keys, common, weights, found=found)
    else:
        _read_by_parameter(stored, keys, weights, found)
        found.param_groups = param_groups_of(optimizers_in(common))
    return found


def _parsed_keys(stored: StoredCheckpoint) -> Keys:
    """Parse all keys of the optimizer, and refuse those of another form."""
    keys = {}
    unknown = []
    for key in [*stored.tensors, *stored.objects]:
        if not optimizer_keys.is_optimizer_key(key):
            continue
        parsed = optimizer_keys.parse(key)
        is_object = key not in stored.tensors
        if parsed is None or (isinstance(parsed, StateKey) and is_object):
            unknown.append(key)
        else:
            keys[key] = parsed
    refuse("keys of an optimizer that are not understood", unknown)
    return {key: keys[key] for key in sorted(keys)}


def _find_layout(stored: StoredCheckpoint, keys: Keys) -> str | None:
    """Derive the layout from the keys: some files do not name it, and some name a wrong one."""
    layouts = set()
    has_state = False
    for key, parsed in keys.items():
        if isinstance(parsed, StateKey):
            has_state = True
            if original_shape(stored, key) is not None:
                layouts.add(MODEL_SPACE)
            elif parsed.slot == "param":  # moments look alike without a distributed optimizer
                layouts.add(FULLY_RESHARDABLE)
        elif isinstance(parsed, BucketKey):
            layouts.add(DP_RESHARDABLE)
        elif isinstance(parsed, RankObjectKey) and parsed.name == "param_state":
            layouts.add(DP_ZERO)
    if len(layouts) > 1:
        raise ValueError(
            f"the optimizer's keys are of several layouts: {', '.join(sorted(layouts))}"
        )
    if not layouts and has_state:
        return NON_DISTRIBUTED
    return next(iter(layouts), None)


def _read_by_parameter(
    stored: StoredCheckpoint,
    keys: Keys,
    weights: Tensors,
    found: OptimizerTensors,
) -> None:
    problems = []
    for key, parsed in keys.items():
        if not isinstance(parsed, StateKey):
            continue
        shape = original_shape(stored, key) or stored.shape(key)
        for name, index in unstacked(parsed.model_key, shape):
            shape_of_parameter = shape[len(index) :]
            if name not in weights:
                problems.append(f"{key}: the model has no {name}")
            elif weights[name].shape != shape_of_parameter:
                problems.append(
                    f"{key}: {shape_of_parameter} for {name}, expected {weights[name].shape} as in"
                    " the model"
                )
            else:
                found.add(name, parsed.slot, _tensor(stored, key, index))
    refuse("tensors of the optimizer that do not fit the model", problems)


def _tensor(
    stored: StoredCheckpoint,
    key: str,
    index: Sequence[int],
) -> LazyTensor:
    """Return the tensor of a key, or its slice at ``index`` of its leading axes."""
    shape = original_shape(stored, key)
    if shape is None:
        return stored.lazy(key, index)
    return reformulated(stored, key, shape, index)


def _read_by_rank(
    stored: StoredCheckpoint,
    keys: Keys,
    common: Mapping[str, Any],
    weights: Tensors,
    found: OptimizerTensors,
) -> None:
    """Put the ranks' buffers in order and decode them, and add param groups and gradient scaler."""
    objects: dict[str, dict[OptimizerOfRank, str]] = {}
    for key, parsed in keys.items():
        if isinstance(parsed, RankObjectKey):
            objects.setdefault(parsed.name, {})[parsed.owner] = key
    if "optimizer" in objects:
        chains = optimizers_of_ranks(stored, objects["optimizer"])
    else:
        chains = dict(enumerate(optimizers_in(common)))
    found.param_groups = param_groups_of([chains[chain] for chain in sorted(chains)])
    for key in objects.get("grad_scaler", {}).values():
        found.grad_scaler = found.grad_scaler or read_sharded_object(stored, key)

    args = common.get("args")
    buffers: BuffersByRank
    if found.layout == DP_RESHARDABLE:
        buffers = sharded = sharded_buffers(stored, keys)
        check_bucket_sizes(stored, sharded, objects.get("per_bucket_numel_unpadded", {}))
    else:
        buffers = gathered_buffers(stored, objects["param_state"], args)
    expert_chain = _chain_of_experts(chains, buffers)
    dense: list[list[OptimizerBuffer]] = []
    experts: list[list[OptimizerBuffer]] = []
    for chain, rank in sorted(buffers):
        ranks = dense
        if chain == expert_chain:
            ranks = experts
        while len(ranks) <= rank:
            ranks.append([])
        ranks[rank] += buffers[chain, rank]
    for name, slot, tensor in optimizer_buckets.decode(dense, experts, weights, args):
        found.add(name, slot, tensor)


def _chain_of_experts(chains: Mapping[int, Any], buffers: BuffersByRank) -> int | None:
    """Return the number of the optimizer that has the experts; None without experts."""
    has_groups = False
    for chain, state in chains.items():
        groups = param_groups_of([state])
        has_groups = has_groups or bool(groups)
        if groups and all(group[EXPERT_FIELD] for group in groups):
            return chain
    # Without any param groups, the last of several optimizers is taken.
    last = max((chain for chain, _ in buffers), default=0)
    if has_groups or last == 0:
        return None
    return last

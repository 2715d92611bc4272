# SPDX-License-Identifier: Apache-2.0
"""The optimizer's tensors in a torch_dist checkpoint, which Megatron-Core has written in five layouts.

Three are by parameter, under the key that the model's tensor has: ``fully_reshardable``,
``fully_sharded_model_space`` (up to 0.15) and that of optimizers which are not distributed. Two are
by rank, in the order in which ranks keep them in memory: ``dp_reshardable`` and
``dp_zero_gather_scatter`` (:mod:`megatron.checkpoint.torch_dist.optimizer_buckets`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.checkpoint.core import spelling
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist import optimizer_buckets

FULLY_RESHARDABLE, DP_RESHARDABLE = "fully_reshardable", "dp_reshardable"
MODEL_SPACE, DP_ZERO, NON_DISTRIBUTED = (
    "fully_sharded_model_space",
    "dp_zero_gather_scatter",
    "non_distributed",
)

_PREFIX = r"^(?:chained_(?P<chain>\d+)\.)?optimizer\."
_ANY = re.compile(_PREFIX)
_STATE = re.compile(_PREFIX + r"state\.(?P<slot>[^.]+)\.(?P<key>.+)$")
_BUCKET = re.compile(
    _PREFIX + r"distributed\.dp_group_idx_(?P<rank>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\((?P<dtype>\S+), \S+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>\w+)$"
)
_OBJECT = re.compile(
    _PREFIX + r"distributed\.dp_group_idx_(?P<rank>\d+)"
    r"\.(?P<name>optimizer|grad_scaler|per_bucket_numel|per_bucket_numel_unpadded|param_state)/shard_0_1$"
)
_MAIN = ("param", "fp32_param")
_REFORMULATED = "nd_reformulated_orig_global_shape"


@dataclass
class OptimizerTensors:
    """What a checkpoint holds of an optimizer. Names are canonical, tensors whole.

    Attributes:
        layout: how the file has it; None where it has no optimizer.
        main: name -> main weight, fp32.
        moments: name -> slot, such as ``exp_avg`` -> tensor shaped like the weight.
        param_groups: of all optimizers one after another, those of experts last; without
            ``params``, with ``step`` where the file has it.
        used_keys: all keys of the file that belong to the optimizer.
        grad_scaler: of fp16 runs whose ranks stored it; others have it in the common state.
    """

    layout: str | None = None
    main: dict[str, LazyTensor] = field(default_factory=dict)
    moments: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    used_keys: set[str] = field(default_factory=set)
    grad_scaler: dict[str, Any] | None = None

    def add(self, name: str, slot: str, tensor: LazyTensor) -> None:
        """A tensor of a parameter.

        Raises:
            ValueError: for one that is there already.
        """
        where, key = (
            (self.main, name) if slot in _MAIN else (self.moments.setdefault(name, {}), slot)
        )
        if key in where:
            raise ValueError(f"the optimizer has {slot} of {name} twice")
        where[key] = tensor


def read_optimizer(
    stored: StoredCheckpoint, common: Mapping[str, Any], weights: Mapping[str, LazyTensor]
) -> OptimizerTensors:
    """The optimizer's tensors by parameter, whatever the layout; none is read before it is asked for.

    ``dp_zero_gather_scatter`` is the exception: there a rank's whole state is one object. Each is
    read once for its sizes; asking for a tensor reads the objects of all tensor-parallel ranks of a
    pipeline stage, and they stay in memory until another stage is asked for.

    Args:
        common: the common state. Its ``args`` say how the ranks were laid out; what they lack is
            inferred from sizes.
        weights: canonical name -> the model's tensor.

    Raises:
        ValueError: for keys of an optimizer that are not understood, for tensors that no parameter
            of the model accounts for or that are not as large as they should be, and where an
            argument is needed that ``args`` lack.
    """
    keys = [key for key in (*stored.tensors, *stored.objects) if _ANY.match(key)]
    unknown = [
        key for key in keys if not any(pattern.match(key) for pattern in (_STATE, _BUCKET, _OBJECT))
    ]
    unknown += [key for key in keys if _STATE.match(key) and key not in stored.tensors]
    if unknown:
        raise ValueError(listed("keys of an optimizer that are not understood", unknown))
    layout = _layout(stored, keys)
    found = OptimizerTensors(layout, used_keys=set(keys))
    if layout is None:
        return found
    if layout in (DP_RESHARDABLE, DP_ZERO):
        _read_by_rank(stored, common, weights, found)
    else:
        _read_by_parameter(stored, weights, found)
        found.param_groups = _groups_in(_optimizers_in(common))
    return found


def _layout(stored: StoredCheckpoint, keys: Sequence[str]) -> str | None:
    """Told by the keys: not all files name it, and those that do were not always right about it."""
    layouts = set()
    for key in keys:
        entry = _STATE.match(key) or _BUCKET.match(key) or _OBJECT.match(key)
        if entry.re is _STATE:
            slot = entry["slot"]
            is_reformulated = _original_shape(stored, key) is not None
            # Moments look alike in the other two.
            layouts |= (
                {MODEL_SPACE}
                if is_reformulated
                else {FULLY_RESHARDABLE}
                if slot == "param"
                else set()
            )
        elif entry.re is _BUCKET:
            layouts.add(DP_RESHARDABLE)
        elif entry["name"] == "param_state":
            layouts.add(DP_ZERO)
    if len(layouts) > 1:
        raise ValueError(
            f"the optimizer's keys are of several layouts: {', '.join(sorted(layouts))}"
        )
    if not layouts and any(_STATE.match(key) for key in keys):
        return NON_DISTRIBUTED
    return next(iter(layouts), None)


# ---- by parameter
# ----------------------------------------------------------------------------------------------------


def _read_by_parameter(
    stored: StoredCheckpoint, weights: Mapping[str, LazyTensor], found: OptimizerTensors
) -> None:
    problems = []
    for key in sorted(found.used_keys):
        entry = _STATE.match(key)
        if entry is None:
            continue
        shape = _original_shape(stored, key) or stored.shape(key)
        for name, index in spelling.unstacked(entry["key"], shape):
            rest = shape[len(index) :]
            if name not in weights:
                problems.append(f"{key}: the model has no {name}")
            elif weights[name].shape != rest:
                problems.append(
                    f"{key}: {rest} for {name}, expected {weights[name].shape} as in the model"
                )
            else:
                found.add(name, entry["slot"], _tensor(stored, key, index))
    if problems:
        raise ValueError(listed("tensors of the optimizer that do not fit the model", problems))


def _original_shape(stored: StoredCheckpoint, key: str) -> tuple[int, ...] | None:
    shape = getattr(stored.metadata, "mcore_data", {}).get(key, {}).get(_REFORMULATED)
    return None if shape is None else tuple(shape)


def _tensor(stored: StoredCheckpoint, key: str, index: Sequence[int]) -> LazyTensor:
    shape = _original_shape(stored, key)
    return stored.lazy(key, index) if shape is None else reformulated(stored, key, shape, index)


def reformulated(
    stored: StoredCheckpoint, key: str, shape: Sequence[int], index: Sequence[int] = ()
) -> LazyTensor:
    """A tensor of ``fully_sharded_model_space``, or what lies at ``index`` of its leading axes.

    Stored is the number of pieces along each axis of ``shape``, and a last axis with the elements
    of one piece. Rows are read piece by piece, and of every piece no others.

    Raises:
        ValueError: where the stored shape is not that of pieces of ``shape``.
    """
    *grid, numel = stored.shape(key)
    local = [size // max(pieces, 1) for size, pieces in zip(shape, grid)]
    divides = len(grid) == len(shape) and all(n and size % n == 0 for size, n in zip(shape, grid))
    if not divides or math.prod(local) != numel:
        raise ValueError(
            f"{key}: {tuple(stored.shape(key))} is not {tuple(shape)} in equal pieces: expected the"
            " number of pieces along each axis and the elements of one piece"
        )
    lead, rest = len(index), tuple(shape[len(index) :])
    corner = [at // size for at, size in zip(index, local)]
    inside = 0  # rows before the index in its piece, counted through the leading axes
    for at, size in zip(index, local):
        inside = inside * size + at % size
    rows, row = (local[lead], math.prod(local[lead + 1 :])) if rest else (1, 1)

    def read_rows(start: int, stop: int) -> torch.Tensor:
        out = torch.empty((stop - start, *rest[1:]), dtype=stored.dtype(key))
        for piece in range(start // rows, -(-stop // rows)):
            first, last = max(start, piece * rows), min(stop, (piece + 1) * rows)
            begin = (inside * rows + first - piece * rows) * row
            for others in itertools.product(*(range(n) for n in grid[lead + 1 :])):
                at = [*corner, *([piece] if rest else []), *others]
                part = stored.read_region(
                    key, [*at, begin], [*(1 for _ in at), (last - first) * row]
                )
                box = tuple(
                    slice(n * size, (n + 1) * size) for n, size in zip(others, local[lead + 1 :])
                )
                out[(slice(first - start, last - start), *box)] = part.reshape(
                    last - first, *local[lead + 1 :]
                )
        return out if rest else out.reshape(())

    return LazyTensor(rest, stored.dtype(key), read_rows)


# ---- by rank
# ---------------------------------------------------------------------------------------------------------


def _read_by_rank(
    stored: StoredCheckpoint,
    common: Mapping[str, Any],
    weights: Mapping[str, LazyTensor],
    found: OptimizerTensors,
) -> None:
    """Put the ranks' buffers into order, have them decoded, and add what the ranks store beside them."""
    objects: dict[str, dict[tuple[int, int], str]] = {}
    for key in sorted(found.used_keys):
        entry = _OBJECT.match(key)
        if entry is not None:
            objects.setdefault(entry["name"], {})[int(entry["chain"] or 0), int(entry["rank"])] = (
                key
            )
    in_common = _optimizers_in(common)
    chains = (
        dict(enumerate(in_common))
        if not objects.get("optimizer")
        else _states_of_ranks(stored, objects["optimizer"])
    )
    found.param_groups = _groups_in([chains[chain] for chain in sorted(chains)])
    for key in objects.get("grad_scaler", {}).values():
        found.grad_scaler = found.grad_scaler or _content(stored, key)

    args = common.get("args")
    if found.layout == DP_RESHARDABLE:
        buffers = _stored_buckets(stored, found.used_keys)
        _compare_with_sizes(stored, buffers, objects.get("per_bucket_numel_unpadded", {}))
    else:
        buffers = optimizer_buckets.coalesced(stored, objects["param_state"], args)
    experts = _chain_of_experts(chains, buffers)
    dense = sorted({chain for chain, _ in buffers} - {experts})
    ranks = (_of_all_ranks(buffers, dense), _of_all_ranks(buffers, [experts]))
    for name, slot, tensor in optimizer_buckets.decode(*ranks, weights, args):
        found.add(name, slot, tensor)


def _of_all_ranks(
    buffers: Mapping[tuple[int, int], list[Any]], chains: Sequence[int | None]
) -> list[list[Any]]:
    """The buffers of every rank, optimizer after optimizer."""
    num_ranks = max((rank + 1 for chain, rank in buffers if chain in chains), default=0)
    return [
        [buffer for chain in chains for buffer in buffers.get((chain, rank), [])]
        for rank in range(num_ranks)
    ]


def _states_of_ranks(
    stored: StoredCheckpoint, keys: Mapping[tuple[int, int], str]
) -> dict[int, Any]:
    """The param groups of each chained optimizer; what one rank lacks, having no parameters in a group, is another's."""
    chains: dict[int, Any] = {}
    for (chain, _), key in sorted(keys.items()):
        state = _content(stored, key)
        groups = chains.setdefault(chain, {"param_groups": [{} for _ in state["param_groups"]]})[
            "param_groups"
        ]
        for group, fields in zip(groups, state["param_groups"]):
            missing = {name: value for name, value in fields.items() if group.get(name) is None}
            group.update(missing)
    return {chain: {"optimizer": state} for chain, state in chains.items()}


def _content(stored: StoredCheckpoint, key: str) -> Any:
    """What Megatron-Core has put into a list of one."""
    value = stored.read_object(key)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _chain_of_experts(
    chains: Mapping[int, Any], buffers: Mapping[tuple[int, int], Any]
) -> int | None:
    """The optimizer that has the experts, where they have one: its groups say so."""
    for chain, state in chains.items():
        groups = _groups_in([state])
        if groups and all(group.get("is_expert_parallel") for group in groups):
            return chain
    last = max((chain for chain, _ in buffers), default=0)
    return last if not any(_groups_in([state]) for state in chains.values()) and last > 0 else None


def _stored_buckets(
    stored: StoredCheckpoint, keys: set[str]
) -> dict[tuple[int, int], list[optimizer_buckets.StoredBuckets]]:
    """Chained optimizer and rank -> its buffers."""
    found: dict[tuple[int, int], dict[int, dict[str, dict[int, dict[str, str]]]]] = {}
    for key in keys:
        entry = _BUCKET.match(key)
        if entry is not None:
            buffers = found.setdefault((int(entry["chain"] or 0), int(entry["rank"])), {})
            buckets = buffers.setdefault(int(entry["buffer"]), {}).setdefault(entry["dtype"], {})
            buckets.setdefault(int(entry["bucket"]), {})[entry["slot"]] = key
    return {
        place: [
            optimizer_buckets.StoredBuckets(
                stored, dtype, [buckets[number] for number in sorted(buckets)]
            )
            for _, by_dtype in sorted(buffers.items())
            for dtype, buckets in by_dtype.items()
        ]
        for place, buffers in found.items()
    }


def _compare_with_sizes(
    stored: StoredCheckpoint,
    buffers: Mapping[tuple[int, int], list[optimizer_buckets.StoredBuckets]],
    keys: Mapping[tuple[int, int], str],
) -> None:
    """``per_bucket_numel_unpadded``, which ranks store too, must be the sizes of the buckets that are there."""
    for place, key in keys.items():
        expected = [list(sizes) for buffer in _content(stored, key) for sizes in buffer.values()]
        actual = [buffer.lengths for buffer in buffers.get(place, [])]
        if expected != actual:
            raise ValueError(
                f"{key} says that the buckets have {expected} elements, but they have {actual}"
            )


# ---- what is not sharded
# ---------------------------------------------------------------------------------------------


def _optimizers_in(common: Mapping[str, Any]) -> list[Any]:
    """The state of each chained optimizer in the common state."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    if optimizer and all(isinstance(number, int) for number in optimizer):
        return [optimizer[number] for number in sorted(optimizer)]
    return [optimizer]


def _groups_in(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """The param groups of all optimizers."""
    groups = []
    for number, state in enumerate(optimizers):
        inner = state.get("optimizer", state) if isinstance(state, dict) else {}
        step = (inner.get("state") or {}).get("common_step")
        for fields in inner.get("param_groups", []):
            group = {name: value for name, value in fields.items() if name != "params"}
            group.setdefault("is_expert_parallel", 0 < number == len(optimizers) - 1)
            if group.get("step", step) is not None:
                group["step"] = _number(group.get("step", step))
            groups.append(group)
    return sorted(groups, key=lambda group: bool(group["is_expert_parallel"]))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value

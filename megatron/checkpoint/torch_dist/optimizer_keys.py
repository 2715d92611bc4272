# SPDX-License-Identifier: Apache-2.0
"""Keys that the optimizer has in torch_dist files, in every layout, parsed.

Layouts by parameter have a tensor for each slot of a parameter, under the key of the model's
tensor. Layouts by rank number the data-parallel groups, one for each model-parallel rank::

    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight
    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)
        .bucket_idx_3.exp_avg       (one key; the line is too long for this page)
    optimizer.distributed.dp_group_idx_0.param_state/shard_0_1

In chained optimizers, of which the last one may have the experts, ``chained_1.`` and so on stands
before these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PREFIX = r"^(?:chained_(?P<chain>\d+)\.)?optimizer\."
_OF_OPTIMIZER = re.compile(_PREFIX)
_STATE = re.compile(_PREFIX + r"state\.(?P<slot>[^.]+)\.(?P<key>.+)$")
_BUCKET = re.compile(
    _PREFIX + r"distributed\.dp_group_idx_(?P<rank>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\((?P<dtype>\S+), \S+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>\w+)$"
)
_OBJECT = re.compile(
    _PREFIX + r"distributed\.dp_group_idx_(?P<rank>\d+)"
    r"\.(?P<name>optimizer|grad_scaler|per_bucket_numel|per_bucket_numel_unpadded|param_state)"
    r"/shard_0_1$"
)

OptimizerOfRank = tuple[int, int]
"""Number of the chained optimizer, and model-parallel rank: the number of a data-parallel group."""


@dataclass(frozen=True)
class StateKey:
    """A slot of a parameter, or of several ones that are stacked.

    Attributes:
        slot: slot, such as ``exp_avg``.
        model_key: key of the model's tensor.
    """

    slot: str
    model_key: str


@dataclass(frozen=True)
class BucketKey:
    """A slot of a bucket of a rank's buffer.

    Attributes:
        owner: number of the chained optimizer, and the rank.
        buffer: number of the buffer among those of the rank.
        dtype: dtype of the parameters in the model.
        bucket: number of the bucket in the buffer.
        slot: slot, such as ``exp_avg``.
    """

    owner: OptimizerOfRank
    buffer: int
    dtype: str
    bucket: int
    slot: str


@dataclass(frozen=True)
class RankObjectKey:
    """An object of a rank.

    Attributes:
        owner: number of the chained optimizer, and the rank.
        name: name of the object, such as ``param_state``.
    """

    owner: OptimizerOfRank
    name: str


OptimizerKey = StateKey | BucketKey | RankObjectKey


def is_optimizer_key(key: str) -> bool:
    """Return True if a key belongs to the optimizer, even if it cannot be parsed."""
    return _OF_OPTIMIZER.match(key) is not None


def parse(key: str) -> OptimizerKey | None:
    """Parse a key of the optimizer; None for a key of another form."""
    state = _STATE.match(key)
    if state is not None:
        return StateKey(state["slot"], state["key"])
    bucket = _BUCKET.match(key)
    if bucket is not None:
        return BucketKey(
            owner=_owner(bucket),
            buffer=int(bucket["buffer"]),
            dtype=bucket["dtype"],
            bucket=int(bucket["bucket"]),
            slot=bucket["slot"],
        )
    rank_object = _OBJECT.match(key)
    if rank_object is not None:
        return RankObjectKey(_owner(rank_object), rank_object["name"])
    return None


def _owner(key: re.Match[str]) -> OptimizerOfRank:
    return int(key["chain"] or 0), int(key["rank"])

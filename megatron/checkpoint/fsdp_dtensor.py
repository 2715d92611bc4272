# SPDX-License-Identifier: Apache-2.0
"""The fsdp_dtensor format: names of its keys and the rules by which parameters become entries.

``model.module.<name>`` holds the main weight, ``optimizer.state.<P>.<name>.<slot>`` the optimizer's state and
``optimizer.param_to_group_meta.<P>.<name>.<field>`` a field of its param group. ``<name>`` is the parameter's name in
the model without any wrapper; ``<P>`` is one ``module`` per wrapper of the run that wrote the file, which nothing
states and every reader has to find out from the keys.
"""

from __future__ import annotations

import re
from typing import Iterable

CHECKPOINT_VERSION = 3.0
MODEL_PREFIX = "module."
STATE_PREFIX = "optimizer.state."
META_PREFIX = "optimizer.param_to_group_meta."

# Gated MLPs keep the gate and the up projection in one tensor, split along dim 0 on disk: under tensor parallelism the
# fused tensor of a rank is no contiguous slice of the global one, the halves are.
GATED = re.compile(
    r"\.mlp\.(shared_experts\.|experts\.local_experts\.\d+\.)?linear_fc1\.(weight|bias)$"
    r"|\.mlp\.experts\.linear_fc1\.(weight|bias)\d+$"
)
HALVES = ("_w", "_v")


def is_gated(name: str, gated_linear_unit: bool) -> bool:
    """Whether a parameter is stored as two halves."""
    return gated_linear_unit and GATED.search(name) is not None


def entry_names(name: str, gated_linear_unit: bool) -> list[str]:
    """The names under which a parameter is stored: itself, or its halves."""
    return [name + half for half in HALVES] if is_gated(name, gated_linear_unit) else [name]


def wrapper_prefix(keys: Iterable[str], names: Iterable[str]) -> str | None:
    """``<P>.`` of the optimizer keys in a file that has parameters called ``names``; None where it has none of them."""
    known = set(names)
    for key in keys:
        stem = key.removeprefix(META_PREFIX).rpartition(".")[0]
        if key.startswith(META_PREFIX) and plain_name(stem) in known:
            return stem.removesuffix(plain_name(stem))
    return None


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name

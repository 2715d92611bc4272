# SPDX-License-Identifier: Apache-2.0
"""Keys of the fsdp_dtensor format, which runs with FSDP write.

============================================================ ===================================
``model.module.<name>``                                      the fp32 main weight of a parameter
``model.module.<module>._extra_state``                       the scales of delayed scaling, if any
``optimizer.state.<P>.<name>.<slot>``                        a moment, or the number of steps
``optimizer.param_to_group_meta.<P>.<name>.<field>``         a field of its param group
============================================================ ===================================

``<name>`` is the parameter's name in the model without any wrapper. ``<P>`` has one ``module`` per
wrapper of the run that wrote the file. The file does not state how many there are: every reader has
to derive it from the keys.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.checkpoint.core import key_rules
from megatron.checkpoint.core.param_groups import EXPERT_FIELD
from megatron.checkpoint.core.spelling import HALVES, canonical_name, plain_name
from megatron.checkpoint.core.training_state import Fields

CHECKPOINT_VERSION = 3.0
MODEL_PREFIX = "module."
MODEL_KEY_PREFIX = "model." + MODEL_PREFIX
STATE_PREFIX = "optimizer.state."
META_PREFIX = "optimizer.param_to_group_meta."
EXTRA_STATE = "._extra_state"
"""End of keys that other programs do not write, and pass over when they read."""


def wrapper_prefix(keys: Iterable[str], names: Iterable[str]) -> str | None:
    """Return ``<P>.`` of the optimizer keys of a file, by names of parameters without wrappers.

    It is None if the file has a param group for none of them.
    """
    known = set(names)
    for key in keys:
        stem = key.removeprefix(META_PREFIX).rpartition(".")[0]
        name = plain_name(stem)
        if key.startswith(META_PREFIX) and name in known:
            return stem.removesuffix(name)
    return None


def without_layout(fields: Mapping[str, Any]) -> Fields:
    """Return the fields of a param group that do not depend on the parallel layout of the run.

    The field of experts' groups does: with one expert rank experts have no groups of their own.
    """
    kept = {}
    for field, value in fields.items():
        if field != EXPERT_FIELD:
            kept[field] = value
    return kept


def split_half(name: str) -> tuple[str, str]:
    """Split the name of one half of a gated weight into the weight's name and the suffix.

    ``mlp.linear_fc1.weight_w`` gives ``("mlp.linear_fc1.weight", "_w")``, other names no suffix.
    """
    for half in HALVES:
        stem = name.removesuffix(half)
        if stem != name and key_rules.is_gated(stem):
            return stem, half
    return name, ""


def names_in_file(keys: Iterable[str]) -> dict[str, str]:
    """Map canonical names of parameters and buffers to their names in a file with these keys."""
    names = {}
    for key in keys:
        if key.startswith(MODEL_KEY_PREFIX):
            name, _ = split_half(plain_name(key.removeprefix(MODEL_KEY_PREFIX)))
            names[canonical_name(name)] = name
    return names


def args_of_format(args: Namespace) -> Namespace:
    """Return a copy of ``args`` with the values of a run that writes this format."""
    values = {
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": True,
        "ckpt_format": "fsdp_dtensor",
    }
    return Namespace(**vars(args) | values)

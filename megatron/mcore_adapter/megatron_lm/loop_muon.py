# SPDX-License-Identifier: Apache-2.0
"""Muon over sharded models in Megatron-LM's loop, which refuses both together.

The loop checks its arguments as those of Adam, which also updates what Muon does not. Then the
optimizer is built by this project: see :func:`~megatron.mcore_adapter.core_optimizers.build_muon`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from megatron.core.optimizer import get_megatron_optimizer

from megatron.mcore_adapter.core_optimizers import build_muon
from megatron.mcore_adapter.megatron_lm.loaded_names import with_original
from megatron.mcore_adapter.run.optimizer_names import MUON

BUILDERS = ("get_megatron_optimizer", "get_megatron_muon_optimizer")
"""The loop's names for functions that build an optimizer; the second one before 0.18."""


def replacements(arguments: ModuleType, training: ModuleType) -> Iterator[tuple[object, object]]:
    """Yield pairs of a function of the loop and its replacement.

    Args:
        arguments: ``megatron.training.arguments``.
        training: ``megatron.training.training``.
    """
    checks = {arguments.validate_args: validate_args}
    builders = {getattr(training, name): build for name in BUILDERS if hasattr(training, name)}
    for original, replacement in {**checks, **builders}.items():
        yield original, with_original(original, replacement)


def validate_args(original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Check and complete the arguments, where Muon is chosen those of Adam."""
    args = given["args"]
    chosen = args.optimizer
    if not (args.use_megatron_fsdp and chosen in MUON):
        return original(**given)
    args.optimizer = "adam"
    try:
        return original(**given)
    finally:
        args.optimizer = "muon"  # "dist_muon" names the same


def build(original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Build the optimizer of the loop."""
    config = given["config"]
    is_sharded = all(chunk.ddp_config.use_megatron_fsdp for chunk in given["model_chunks"])
    if config.optimizer not in MUON or not is_sharded:
        return original(**given)
    settings = {}
    for name in inspect.signature(get_megatron_optimizer).parameters:
        if name in given and name not in ("config", "model_chunks", DUMP):
            settings[name] = given[name]
    return build_muon(config, given["model_chunks"], **settings)


DUMP = "dump_param_to_param_group_map"
"""A file of the loop with names that Muon's groups would not fit."""

# SPDX-License-Identifier: Apache-2.0
"""Optimizers that Megatron-LM's loop has no sharded form of: Muon, and updates in host memory.

The loop refuses the one together with FSDP, and has an optimizer of its own for the other. So it
checks its arguments as those of Adam on the device. Then the optimizer is built by this project:
see :func:`~megatron.mcore_adapter.core_optimizers.build_muon`, and ``Offload``.
"""

from __future__ import annotations

import argparse
import inspect
import traceback
from collections.abc import Iterator
from copy import copy
from types import ModuleType
from typing import Any

from megatron.core.optimizer import get_megatron_optimizer

from megatron.fsdp import Offload
from megatron.mcore_adapter.core_optimizers import build_muon
from megatron.mcore_adapter.megatron_lm.loaded_names import Arguments, Function, with_original
from megatron.mcore_adapter.releases import tested
from megatron.mcore_adapter.run.optimizer_names import MUON


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the attributes of ``ddp_config`` that the engine reads and no release has."""
    settings: dict[str, Any] = {}
    if args.optimizer in MUON:
        settings["megatron_fsdp_granularity"] = "prefer_tensors"  # whole matrices stay on one rank
    if args.optimizer_cpu_offload:
        pins = args.pin_cpu_grads and args.pin_cpu_params
        policy = Offload(fraction=args.optimizer_offload_fraction, pins=pins)
        settings["megatron_fsdp_offload_policy"] = policy
    return settings


BUILDERS = ("get_megatron_optimizer", "get_megatron_muon_optimizer")
"""The loop's names for functions that build an optimizer; the second one before 0.18."""
OF_ADAM = "dump_param_to_param_group_map"
"""An argument of these functions that Muon's groups do not fit."""


def replacements(arguments: ModuleType, training: ModuleType) -> Iterator[tuple[object, object]]:
    """Yield pairs of a function of the loop and its replacement.

    Args:
        arguments: ``megatron.training.arguments``.
        training: ``megatron.training.training``.
    """
    yield arguments.validate_args, with_original(arguments.validate_args, validate_args)
    for name in BUILDERS:
        original = getattr(training, name, None)
        if original is not None:
            yield original, with_original(original, build)


def validate_args(original: Function, given: Arguments) -> Any:
    """Check and complete the arguments, with FSDP as those of Adam on the device.

    The loop checks by assertions: the message of one that fails ends the program.
    """
    args = given["args"]
    optimizer = args.optimizer
    is_offloaded = args.optimizer_cpu_offload
    if args.use_megatron_fsdp:
        args.optimizer_cpu_offload = False
        if optimizer in MUON:
            args.optimizer = "adam"
    try:
        return original(**given)
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error) or frame.line
        tested.end_program(f"error: {reason} ({frame.filename}:{frame.lineno})", 2)
    finally:
        if args.use_megatron_fsdp:
            # "dist_muon" names the same.
            args.optimizer = "muon" if optimizer in MUON else optimizer
            args.optimizer_cpu_offload = is_offloaded


def build(original: Function, given: Arguments) -> Any:
    """Build the optimizer of the loop."""
    config = given["config"]
    model = given["model_chunks"]
    if not all(chunk.ddp_config.use_megatron_fsdp for chunk in model):
        return original(**given)
    config = copy(config)
    config.optimizer_cpu_offload = False  # the wrapper offloads
    if config.optimizer not in MUON:
        return original(**{**given, "config": config})
    settings = {}
    for name in inspect.signature(get_megatron_optimizer).parameters:
        if name in given and name not in ("config", "model_chunks", OF_ADAM):
            settings[name] = given[name]
    return build_muon(config, model, **settings)

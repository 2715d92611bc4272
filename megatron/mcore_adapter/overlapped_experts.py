# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's combined 1F1B schedule, which hides the communication of experts, with FSDP."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary, ref

from megatron.core.models.common import model_chunk_schedule_plan as plans
from torch import nn

from megatron_fsdp import MegatronFSDP

_engines: WeakKeyDictionary[nn.Module, ref[MegatronFSDP]] = WeakKeyDictionary()


def drive_combined_schedule(engine: MegatronFSDP) -> None:
    """Let the schedule tell the engine when the model and its layers begin and end."""
    if not _engines:
        for plan in (plans.TransformerModelChunkSchedulePlan, plans.TransformerLayerSchedulePlan):
            plan.run = staticmethod(_telling(plan.run))
    _engines.update(dict.fromkeys(engine.module.modules(), ref(engine)))


def _telling(run: Any) -> Any:
    @functools.wraps(run)
    def run_and_tell(forward: Any, backward: Any, *args: Any, **kwargs: Any) -> Any:
        to_forward, to_backward = _engine_of(forward), _engine_of(backward)
        if to_forward[0]:
            to_forward[0].pre_forward(to_forward[1])
        if to_backward[0]:
            to_backward[0].pre_backward(to_backward[1])
        result = run(forward, backward, *args, **kwargs)
        for engine, layer in (to_forward,):
            if engine:
                engine.post_forward_release_module(layer) if layer else engine.post_forward()
        for engine, layer in (to_backward,):
            if engine:
                engine.post_backward_release_module(layer) if layer else engine.post_backward()
        return result

    return run_and_tell


def _engine_of(plan: Any) -> tuple[MegatronFSDP | None, nn.Module | None]:
    """Return the engine of a plan and its layer, None for a plan of the whole model."""
    if plan is None:
        return None, None
    layer = getattr(plan, "layer", None)
    found = _engines.get(plan.state.model if layer is None else layer)
    return (None if found is None else found()), layer

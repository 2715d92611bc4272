# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's combined 1F1B schedule, which hides the communication of experts, with FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from megatron.core.models.common import model_chunk_schedule_plan as plans
from megatron.core.pipeline_parallel import combined_1f1b
from torch import nn

from megatron_fsdp import MegatronFSDP

_engines: WeakKeyDictionary[nn.Module, ref[MegatronFSDP]] = WeakKeyDictionary()


def drive_combined_schedule(engine: MegatronFSDP, delays_gradients: bool) -> None:
    """Let the schedule tell the engine when the model and its layers begin and end."""
    units = {unit.module for unit in engine._units[1:] if unit.module is not None}
    if delays_gradients and any(len(units.intersection(unit.modules())) > 1 for unit in units):
        raise NotImplementedError(
            "delay_wgrad_compute with units inside of layers: their gradients would be reduced"
            " before they are computed; leave out enable_fine_grained_param_gather"
        )
    for plan in (plans.TransformerModelChunkSchedulePlan, plans.TransformerLayerSchedulePlan):
        if plan.run.__module__ != __name__:
            plan.run = staticmethod(_telling(plan.run))
    # Since 0.18 the schedule looks for the published class, and would call it a second time.
    combined_1f1b.find_megatron_fsdp = lambda model: None
    _engines.update(dict.fromkeys(engine.module.modules(), ref(engine)))


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_and_tell(forward: Any, backward: Any, *args: Any, **kwargs: Any) -> Any:
        ends = [_begin(forward, "forward"), _begin(backward, "backward")]
        result = run(forward, backward, *args, **kwargs)
        if kwargs.get("is_last_layer_in_bwd") and backward.config.delay_wgrad_compute:
            ends.pop()  # the model's backward ends it, after the weight gradients of its attention
        for end in reversed(ends):
            end()
        return result

    return run_and_tell


def _begin(plan: Any, direction: str) -> Callable[[], None]:
    """Tell of the begin of a plan's forward or backward; return what tells of its end."""
    layer = getattr(plan, "layer", None)  # None: the plan is that of the model
    engine = plan and _engines.get(plan.state.model if layer is None else layer, lambda: None)()
    if engine is None:
        return lambda: None
    event, stream = plan.event, torch.cuda.current_stream()
    getattr(engine, f"pre_{direction}")(layer)
    event.record(stream)  # the next part may run on the other stream, and wants the weights

    def end() -> None:
        event.wait(stream)  # the last part may have run on the other stream
        released = "" if layer is None else "_release_module"
        getattr(engine, f"post_{direction}{released}")(*filter(None, [layer]))

    return end

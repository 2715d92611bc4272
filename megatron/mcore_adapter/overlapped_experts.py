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
    """Let the schedule notify the engine when the model and its layers begin and end."""
    units = set()
    for unit in engine._units[1:]:
        if unit.module is not None:
            units.add(unit.module)
    has_nested = False
    if delays_gradients:
        has_nested = any(len(units.intersection(unit.modules())) > 1 for unit in units)
    if has_nested:
        raise NotImplementedError(
            "delay_wgrad_compute with units inside of layers: their gradients would be reduced"
            " before they are computed; leave out enable_fine_grained_param_gather"
        )
    for plan in (plans.TransformerModelChunkSchedulePlan, plans.TransformerLayerSchedulePlan):
        if plan.run.__module__ != __name__:
            plan.run = staticmethod(_notifying(plan.run))
    # Since 0.18 the schedule looks for the published class, and would call it a second time.
    combined_1f1b.find_megatron_fsdp = lambda model: None
    for module in engine.module.modules():
        _engines[module] = ref(engine)


def _notifying(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_and_notify(
        forward: Any,
        backward: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        end_forward = _begin(forward, "forward")
        end_backward = _begin(backward, "backward")
        result = run(forward, backward, *args, **kwargs)
        # With delayed weight gradients the model's backward ends that of the last layer, after the
        # weight gradients of its attention.
        if not (kwargs.get("is_last_layer_in_bwd") and backward.config.delay_wgrad_compute):
            end_backward()
        end_forward()
        return result

    return run_and_notify


def _begin(plan: Any, direction: str) -> Callable[[], None]:
    """Notify the engine that a plan's forward or backward begins.

    Returns:
        The function to call at its end. It does nothing without a plan or an engine.
    """
    if plan is None:
        return lambda: None
    layer = getattr(plan, "layer", None)  # None: the plan is that of the model
    reference = _engines.get(plan.state.model if layer is None else layer)
    engine = None if reference is None else reference()
    if engine is None:
        return lambda: None
    event = plan.event
    stream = torch.cuda.current_stream()
    getattr(engine, f"pre_{direction}")(layer)
    event.record(stream)  # the next part may run on the other stream, and needs the weights

    def end() -> None:
        event.wait(stream)  # the last part may have run on the other stream
        if layer is None:
            getattr(engine, f"post_{direction}")()
        else:
            getattr(engine, f"post_{direction}_release_module")(layer)

    return end

# SPDX-License-Identifier: Apache-2.0
"""Losses of routers and of multi-token prediction, by Megatron-Core's trackers.

Megatron-Core adds each of them up in a tracker of its own, in forward, layer by layer.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

try:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
except ImportError:  # releases before 0.18
    get_moe_metrics_tracker = None

EMPTYING = ("clean_metrics_in_tracker", "clean_loss_in_tracker")
"""The methods that empty the tracker of multi-token prediction: since 0.19, and before."""
LOAD_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kind of load balancing -> its name in Megatron-Core's tracker."""


class LossCollector:
    """A writer for Megatron-Core's trackers that keeps the numbers."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(
        self,
        name: str,
        value: Any,
        iteration: int,
    ) -> None:
        """Keep a number.

        Args:
            name: name of the loss in the tracker.
            value: a number or a tensor of one element.
            iteration: ignored.
        """
        self.values[name] = float(value)


def forget() -> None:
    """Empty the trackers, before another forward."""
    if get_moe_metrics_tracker is not None:
        get_moe_metrics_tracker().clear()
    else:
        moe_utils.clear_aux_losses_tracker()
    if MTPLossLoggingHelper.tracker:
        for name in EMPTYING:
            if hasattr(MTPLossLoggingHelper, name):
                getattr(MTPLossLoggingHelper, name)()
                break


def take(args: argparse.Namespace, num_microbatches: int) -> dict[str, float]:
    """Return the losses of the last step and empty the trackers; a collective.

    They have the names that Megatron-LM gives them, and are means over layers and microbatches.
    """
    collector = LossCollector()
    if args.num_experts is not None:
        names = _router_losses(args)
        if get_moe_metrics_tracker is not None:
            report = get_moe_metrics_tracker().report
        else:
            _make_trackers(args, names)
            report = moe_utils.track_moe_metrics
        report(
            loss_scale=1 / num_microbatches,
            iteration=0,
            writer=collector,
            per_layer_logging=False,
            force_initialize=True,
            track_names=names,
            num_layers=args.num_layers,
            moe_layer_freq=args.moe_layer_freq,
            mtp_num_layers=args.mtp_num_layers,
        )
    if args.mtp_num_layers is not None:
        collector.values |= _token_prediction_losses(args.mtp_num_layers, num_microbatches)
    return collector.values


def _token_prediction_losses(num_layers: int, num_microbatches: int) -> dict[str, float]:
    """Return the losses of multi-token prediction, which only the last stage has, on every stage.

    Each microbatch has added its mean.
    """
    collector = LossCollector()
    MTPLossLoggingHelper.track_mtp_metrics(1 / num_microbatches, 0, collector)
    names = [f"mtp_{number} loss" for number in range(1, num_layers + 1)]
    losses = torch.tensor(
        [collector.values.get(name, 0.0) for name in names], device=torch.cuda.current_device()
    )
    dist.all_reduce(losses, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(names, losses.tolist()))


def _router_losses(args: argparse.Namespace) -> list[str]:
    kinds = args.moe_router_load_balancing_type
    if isinstance(kinds, str):
        kinds = [kinds]
    names = [LOAD_BALANCING[kind] for kind in kinds if kind in LOAD_BALANCING]
    if args.moe_z_loss_coeff is not None:
        names.append("z_loss")
    return names


def _make_trackers(args: argparse.Namespace, names: list[str]) -> None:
    """Make the trackers that this stage lacks, since Megatron-Core sums over stages.

    By itself it would make them without the layers of multi-token prediction.
    """
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    for name in names:
        if name not in tracker:
            zero = torch.zeros((), device=torch.cuda.current_device())
            num_layers = args.num_layers + (args.mtp_num_layers or 0)
            moe_utils.save_to_aux_losses_tracker(name, zero, 1, num_layers)

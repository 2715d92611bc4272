# SPDX-License-Identifier: Apache-2.0
"""The schedule of learning rate and weight decay that a checkpoint brings."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.fsdp.engine.collectives import agree


def rates_of(scheduler: OptimizerParamScheduler) -> list[dict[str, Any]]:
    """Return the highest and lowest learning rate of every param group."""
    return [
        {name: group.get(name) for name in ("max_lr", "min_lr")}
        for group in scheduler.optimizer.param_groups
    ]


def load_schedule(
    scheduler: OptimizerParamScheduler, saved: dict[str, Any], rates: list[dict[str, Any]]
) -> None:
    """Set the schedule to the step of the saved one.

    Args:
        scheduler: of this run. The param groups of its optimizer have the file's rates already.
        saved: the state of the file's schedule.
        rates: the highest and lowest rates of this run's groups before the load.

    Raises:
        ValueError: lists the settings that differ, unless a flag says which ones count.
    """
    if scheduler.override_opt_param_scheduler:
        for group, own in zip(scheduler.optimizer.param_groups, rates):
            group.update(own)
    elif not scheduler.use_checkpoint_opt_param_scheduler:
        different = _differences(saved, scheduler.state_dict())
        for number, (theirs, own) in enumerate(zip(rates_of(scheduler), rates)):
            different += [f"param group {number}, {line}" for line in _differences(theirs, own)]
        different = agree(different)  # a rank does not know the rates of groups empty on it
        if different:
            raise ValueError(
                "the checkpoint has another schedule of learning rate and weight decay (steps count"
                " samples):\n  "
                + "\n  ".join(different)
                + "\n--use-checkpoint-opt-param-scheduler takes the file's,"
                " --override-opt-param-scheduler this run's"
            )
    scheduler.load_state_dict(saved)


def _differences(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {value} in the file, {own[name]} in this run"
        for name, value in saved.items()
        if name != "num_steps" and name in own and own[name] != value
    ]

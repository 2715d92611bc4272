# SPDX-License-Identifier: Apache-2.0
"""The state of a run beside weights and optimizer: arguments, progress, schedule, generators."""

from __future__ import annotations

import argparse
import copyreg
import enum
from pathlib import Path
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.checkpoint.fsdp_dtensor.keys import CHECKPOINT_VERSION
from megatron.checkpoint.store.url_staging import with_urls
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.run.first_rank import Say
from megatron.mcore_adapter.run.run_state import Progress, gather_random_state, restore_random_state


def run_state(
    args: argparse.Namespace,
    progress: Progress,
    scheduler: OptimizerParamScheduler | None,
    with_rng: bool,
) -> dict[str, Any]:
    """Return the state of a run without weights and optimizer, in the structure of all formats.

    A collective if ``with_rng``.
    """
    pickle_enums_by_value(args)
    saved_args = progress.written_into(args)
    for dest in ("save", "load", "pretrained_checkpoint"):
        if getattr(saved_args, dest):  # a URL, not the directory in which it is staged
            setattr(saved_args, dest, with_urls(getattr(saved_args, dest)))
    state: dict[str, Any] = {
        "args": saved_args,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": progress.iteration,
        "num_floating_point_operations_so_far": progress.num_floating_point_operations_so_far,
    }
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    if with_rng:
        state["rng_state"] = gather_random_state(
            differs_between_data_ranks=(
                args.data_parallel_random_init or args.expert_model_parallel_size > 1
            )
        )
    return state


def pickle_enums_by_value(args: argparse.Namespace) -> None:
    """Let this process pickle the enums among the arguments by their values.

    Early releases of Python 3.11 pickle members by `getattr`, which careful readers refuse to call.
    """
    for value in vars(args).values():
        if isinstance(value, enum.Enum):
            copyreg.pickle(type(value), lambda member: (type(member), (member.value,)))


def load_random_state(states: list[dict[str, Any]] | None, source: Path, say: Say) -> None:
    """Set the generators of every rank, or of none if the file has no state for some rank."""
    if agree(["no random state"] if states is None else []):
        say(
            f"{source} has no random state for some of this run's ranks: their generators begin"
            " anew"
        )
    elif states is not None:
        restore_random_state(states)


# ---- the schedule of learning rate and weight decay


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
        scheduler: schedule of this run, whose param groups have the file's rates already.
        saved: state of the file's schedule.
        rates: highest and lowest rates of this run's groups before the load.

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

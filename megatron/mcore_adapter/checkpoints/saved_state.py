# SPDX-License-Identifier: Apache-2.0
"""The state of a run except weights and optimizer: arguments, progress, schedule, generators."""

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
from megatron.mcore_adapter.run.first_rank import Log
from megatron.mcore_adapter.run.run_state import Progress, gather_random_state, restore_random_state

StateDict = dict[str, Any]
"""The state of a run, the content of a checkpoint, or a part of them, nested by keys."""


def run_state(
    args: argparse.Namespace,
    progress: Progress,
    scheduler: OptimizerParamScheduler | None,
    with_rng: bool,
) -> StateDict:
    """Return the state of a run without weights and optimizer, in the structure of all formats.

    Args:
        args: arguments of the run, of which a copy is returned.
        progress: progress of the run.
        scheduler: schedule of learning rate and weight decay; None to leave it out.
        with_rng: True to include the states of the generators, which makes this a collective.
    """
    pickle_enums_by_value(args)
    saved_args = progress.written_into(args)
    for dest in ("save", "load", "pretrained_checkpoint"):
        path = getattr(saved_args, dest)
        if path:  # a staged directory is saved as its URL
            setattr(saved_args, dest, with_urls(path))
    state: StateDict = {
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
    """Register the enums among the arguments, so that this process pickles them by their values.

    Early releases of Python 3.11 pickle members by `getattr`, which careful readers refuse to call.
    """
    for value in vars(args).values():
        if isinstance(value, enum.Enum):
            copyreg.pickle(type(value), lambda member: (type(member), (member.value,)))


def load_random_state(
    states: list[dict[str, Any]] | None,
    source: Path,
    log: Log,
) -> None:
    """Set the generators of every rank, or of none if the file has no state for some rank.

    A collective.

    Args:
        states: states of this rank, as ``gather_random_state`` returns them; None if the file has
            none for it.
        source: directory of the checkpoint, for the message.
        log: prints a line on the first rank.
    """
    if agree(["no random state"] if states is None else []):
        log(
            f"{source} has no random state for some of this run's ranks: their generators start"
            " from --seed"
        )
    elif states is not None:
        restore_random_state(states)


# ---- the schedule of learning rate and weight decay


def rates_of(scheduler: OptimizerParamScheduler) -> list[dict[str, Any]]:
    """Return the highest and lowest learning rate of every param group."""
    rates = []
    for group in scheduler.optimizer.param_groups:
        rates.append({"max_lr": group.get("max_lr"), "min_lr": group.get("min_lr")})
    return rates


def load_schedule(
    scheduler: OptimizerParamScheduler,
    saved: StateDict,
    rates: list[dict[str, Any]],
) -> None:
    """Set the schedule to the step of the saved one.

    Args:
        scheduler: schedule of this run, whose param groups have the file's rates already.
        saved: state of the file's schedule.
        rates: result of :func:`rates_of` before the load.

    Raises:
        ValueError: on every rank, with the settings that differ, unless a flag chooses those of
            the file or of this run.
    """
    if scheduler.override_opt_param_scheduler:
        for group, own in zip(scheduler.optimizer.param_groups, rates):
            group.update(own)
    elif not scheduler.use_checkpoint_opt_param_scheduler:
        different = _differences(saved, scheduler.state_dict())
        for number, (theirs, own) in enumerate(zip(rates_of(scheduler), rates)):
            different += [f"param group {number}, {line}" for line in _differences(theirs, own)]
        different = agree(different)  # ranks do not know the rates of groups that they lack
        if different:
            raise ValueError(
                "the checkpoint has another schedule of learning rate and weight decay (steps count"
                " samples):\n  "
                + "\n  ".join(different)
                + "\n--use-checkpoint-opt-param-scheduler takes the file's,"
                " --override-opt-param-scheduler this run's"
            )
    scheduler.load_state_dict(saved)


def _differences(saved: StateDict, own: StateDict) -> list[str]:
    lines = []
    for name, value in saved.items():
        if name != "num_steps" and name in own and own[name] != value:
            lines.append(f"{name}: {value} in the file, {own[name]} in this run")
    return lines

# SPDX-License-Identifier: Apache-2.0
"""Save and load a run: weights, optimizer, schedule, random state, position in the data.

A checkpoint is complete or absent: it is written beside its place, renamed, and then named by the
tracker file.
"""

from __future__ import annotations

import argparse
import copyreg
import enum
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.core import directory
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain import fsdp_dtensor_checkpoint, torch_dist_checkpoint
from megatron.pretrain.errors import RunError

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
FORMATS = {"fsdp_dtensor": fsdp_dtensor_checkpoint, "torch_dist": torch_dist_checkpoint}


def check_target(args: argparse.Namespace) -> None:
    """Find out before training whether ``--save`` can be written to; writes nothing.

    Raises:
        ValueError: on every rank.
    """
    problem = None
    if args.save and dist.get_rank() == 0:
        place = Path(args.save).absolute()
        nearest = next(path for path in (place, *place.parents) if path.exists())
        if not nearest.is_dir():
            problem = f"--save {args.save}: {nearest} is a file, not a directory"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            problem = f"--save {args.save}: no permission to write in {nearest}"
    problems = agree([problem] if problem else [])
    if problems:
        raise ValueError(problems[0])


def save(
    args: argparse.Namespace,
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    say: Callable[[str], None],
) -> None:
    """Write the state after ``args.iteration`` iterations under ``args.save`` and publish it.

    Raises:
        RunError: on every rank, where any rank could not write; nothing is left behind then.
    """
    state = run_state(
        args, None if args.no_save_optim else scheduler, with_rng=not args.no_save_rng
    )
    content = (model, None if args.no_save_optim else optimizer)
    _on_first_rank(
        lambda: directory.prepare(args.save, args.iteration), "cannot prepare the checkpoint"
    )
    staging = directory.staging_directory(args.save, args.iteration)
    problem = None
    try:
        FORMATS[args.ckpt_format].save(args, state, *content, staging)
    except (
        CheckpointException
    ) as error:  # raised on every rank (and no Exception): each tells its own part
        problem = _cause(error, dist.get_rank())
    except (
        Exception
    ) as error:  # disk full, no permission, a broken file system: whatever it is, on whichever rank
        problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    problems = agree([problem] if problem else [])
    if problems:
        _on_first_rank(lambda: directory.discard(args.save, args.iteration), "cannot clean up")
        raise RunError(
            f"the checkpoint of iteration {args.iteration} was not written:\n" + "\n".join(problems)
        )
    _on_first_rank(
        lambda: directory.publish(args.save, args.iteration), "cannot publish the checkpoint"
    )
    if args.save_retain_interval:
        _on_first_rank(
            lambda: directory.retain(args.save, args.save_retain_interval, args.iteration),
            "cannot clean up",
        )
    if args.log_progress:
        _on_first_rank(lambda: _note_progress(args), "cannot write progress.txt")
    say(
        f"saved checkpoint of iteration {args.iteration} to"
        f" {directory.iteration_directory(args.save, args.iteration)}"
    )


def load(
    args: argparse.Namespace,
    model: list[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    say: Callable[[str], None],
) -> None:
    """Load what ``--load`` (or ``--pretrained-checkpoint``) asks for; sets ``args.iteration`` and the counters.

    Raises:
        ValueError: on every rank, where there is no such checkpoint, or it is one of another model.
    """
    args.num_floating_point_operations_so_far = 0.0
    found = _find(args, say)
    if found is None:
        return
    source, weights_only = found
    with_optimizer = optimizer is not None and not (args.no_load_optim or weights_only)
    with_rng = not (args.no_load_rng or weights_only)
    module = FORMATS[args.ckpt_format]
    _check_format(source, args.ckpt_format)
    state = run_state(args, scheduler if with_optimizer else None, with_rng)
    rates = _rates(scheduler) if with_optimizer else []
    try:
        loaded = module.load(args, state, model, optimizer if with_optimizer else None, source)
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error
    except CheckpointException as error:
        causes = [_cause(error, rank) for rank in sorted(error.failures)]
        head = f"{source} cannot be loaded, its files are damaged or of another run:"
        raise ValueError("\n  ".join([head, *causes])) from error
    if optimizer is not None and not with_optimizer:
        optimizer.reload_model_params()  # its fp32 weights are those that were loaded
    if not weights_only:
        args.iteration = loaded["iteration"]
        for name in COUNTERS:
            setattr(args, name, getattr(loaded["args"], name, 0))
        args.num_floating_point_operations_so_far = loaded.get(
            "num_floating_point_operations_so_far", 0.0
        )
    if with_optimizer:
        _load_schedule(scheduler, loaded["opt_param_scheduler"], rates)
    if with_rng and agree([] if "rng_state" in loaded else ["no random state"]):
        say(
            f"{source} has no random state for some of this run's ranks: their generators begin"
            " anew"
        )
    elif with_rng:
        _restore_rng(loaded["rng_state"])
    rows = getattr(loaded["args"], "padded_vocab_size", None)
    if rows is not None and rows != args.padded_vocab_size:
        say(
            f"{source} has {rows} rows of vocabulary, this run {args.padded_vocab_size}: rows of"
            f" padding take part in the loss, which is another one now; --padded-vocab-size {rows}"
            " keeps it"
        )
    say(
        f"loaded the weights of {source}"
        if weights_only
        else f"loaded {source}, iteration {args.iteration}"
    )


def run_state(
    args: argparse.Namespace, scheduler: OptimizerParamScheduler | None, with_rng: bool
) -> dict[str, Any]:
    """Everything but weights and optimizer, in the structure that both formats share."""
    for value in vars(args).values():
        if isinstance(value, enum.Enum):
            # Early releases of Python 3.11 pickle members by `getattr`, which careful readers
            # refuse to call.
            copyreg.pickle(type(value), _pickle_by_value)
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": fsdp_dtensor_checkpoint.CHECKPOINT_VERSION,
        "iteration": args.iteration,
        "num_floating_point_operations_so_far": args.num_floating_point_operations_so_far,
    }
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    if with_rng:
        state["rng_state"] = _gather_rng(args)
    return state


def _pickle_by_value(member: enum.Enum) -> tuple[type, tuple[Any]]:
    return type(member), (member.value,)


def _gather_rng(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The generators of this rank; of all data ranks where they differ."""
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if not (args.data_parallel_random_init or args.expert_model_parallel_size > 1):
        return [mine]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _restore_rng(states: list[dict[str, Any]]) -> None:
    state = states[parallel_state.get_data_parallel_rank(with_context_parallel=True) % len(states)]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _find(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[Path, bool] | None:
    """The directory to load and whether only weights are taken; None to start from scratch."""
    for root, weights_only in ((args.load, args.finetune), (args.pretrained_checkpoint, True)):
        if not root:
            continue
        iteration = (
            args.ckpt_step
            if args.ckpt_step is not None and root == args.load
            else directory.read_tracker(root)
        )
        if iteration is not None:
            source = directory.find(root, iteration)
            if source is None:
                missing = directory.iteration_directory(root, iteration)
                raise ValueError(
                    f"there is no checkpoint {missing}; in {root} are: {_inventory(root)}"
                )
            return source, weights_only or iteration == directory.RELEASE
    if args.pretrained_checkpoint:
        raise ValueError(
            f"--pretrained-checkpoint {args.pretrained_checkpoint} has no {directory.TRACKER}"
        )
    if args.load and (args.exit_on_missing_checkpoint or args.finetune):
        flag = "--exit-on-missing-checkpoint" if args.exit_on_missing_checkpoint else "--finetune"
        raise ValueError(f"{flag}: {args.load} has no {directory.TRACKER}")
    if args.load:
        say(f"{args.load} has no {directory.TRACKER}: starting from scratch")
    return None


def _inventory(root: str) -> str:
    names = sorted(path.name for path in Path(root).glob("iter_*"))
    return ", ".join(names) if names else "none"


def _check_format(source: Path, expected: str) -> None:
    if not (source / ".metadata").is_file():
        raise ValueError(f"{source} is no complete checkpoint: it has no .metadata")
    actual = "torch_dist" if (source / "metadata.json").is_file() else "fsdp_dtensor"
    if actual != expected:
        flag = "with" if actual == "fsdp_dtensor" else "without"
        raise ValueError(
            f"{source} is in the format {actual}, but this run reads {expected}: it was written"
            f" {flag} --use-megatron-fsdp"
        )


def _cause(error: CheckpointException, rank: int) -> str | None:
    """What went wrong on ``rank``, without the traceback."""
    if rank not in error.failures:
        return None
    cause = error.failures[rank][0]
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _rates(scheduler: OptimizerParamScheduler) -> list[dict[str, Any]]:
    """The highest and lowest learning rate of every param group."""
    return [
        {name: group.get(name) for name in ("max_lr", "min_lr")}
        for group in scheduler.optimizer.param_groups
    ]


def _load_schedule(
    scheduler: OptimizerParamScheduler, saved: dict[str, Any], rates: list[dict[str, Any]]
) -> None:
    """Go on where the saved schedule was.

    ``rates`` are those of this run; the groups have the file's already.

    Raises:
        ValueError: listing the settings that differ, unless a flag says which ones count.
    """
    if scheduler.override_opt_param_scheduler:
        for group, own in zip(scheduler.optimizer.param_groups, rates):
            group.update(own)
    elif not scheduler.use_checkpoint_opt_param_scheduler:
        different = _differences(saved, scheduler.state_dict())
        for number, (theirs, own) in enumerate(zip(_rates(scheduler), rates)):
            different += [f"param group {number}, {line}" for line in _differences(theirs, own)]
        different = agree(different)  # groups that are empty on a rank know nothing
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


def _note_progress(args: argparse.Namespace) -> None:
    with open(Path(args.save) / "progress.txt", "a") as file:
        operations = args.num_floating_point_operations_so_far
        file.write(
            f"iteration {args.iteration}\tsamples {args.consumed_train_samples}\toperations"
            f" {operations:.4e}\n"
        )


def _on_first_rank(action: Callable[[], Any], problem: str) -> None:
    """Do it on the first rank; what goes wrong there is raised everywhere."""
    trouble = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            trouble = f"{problem}: {error}"
    problems = agree([trouble] if trouble else [])
    if problems:
        raise RunError(problems[0])

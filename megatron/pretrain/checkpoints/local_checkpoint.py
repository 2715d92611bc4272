# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints: every rank has a part of its own on a disk of its node.

A part contains all that the rank needs to go on. It is loaded only by the rank that wrote it, in
the same layout, and only if every rank has a sound part of the same save.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.store import directory
from megatron.fsdp.dtensor.chunked_tensor import ChunkedTensor
from megatron.pretrain.checkpoints import url_saves
from megatron.pretrain.checkpoints.abandoned_checkpoints import run_to_load
from megatron.pretrain.checkpoints.checkpoint_source import (
    CheckpointSource,
    Damage,
    Say,
    find_source,
)
from megatron.pretrain.checkpoints.followed_checkpoint import is_given_up, tracked_in
from megatron.pretrain.checkpoints.run_identity import run_in
from megatron.pretrain.first_rank import on_first_rank

LOCAL = "local"
"""Value of --non-persistent-ckpt-type."""

Layout = dict[str, Any]
"""Properties of a run that its parts depend on, and digests of the shards of this rank."""

_IDENTITY = "local_part"
"""Key of the entry of a part that identifies it: its run, its save and its layout, in JSON."""
_ARGUMENTS = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
    "use_tp_pp_dp_mapping",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
)
_SHARDS = "shards of the "


def part_root(args: argparse.Namespace, run: str) -> Path:
    """Return the directory of this rank's parts.

    Args:
        args: of the run.
        run: the directory of the persistent checkpoints to which the parts belong. Runs that save
            in different directories share no parts.
    """
    path = Path(run).resolve()
    name = f"{path.name}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    return Path(args.non_persistent_local_ckpt_dir) / name / f"rank_{dist.get_rank()}"


def remove_parts_of_moved_ranks(root: Path, iteration: int) -> None:
    """Remove what ranks have left on this node that run on another one now.

    Args:
        root: directory of this rank's parts.
        iteration: of which all ranks have published a part, wherever they are.
    """
    for other in root.parent.glob("rank_*"):
        if iteration not in directory.iterations(other):
            shutil.rmtree(other, ignore_errors=True)  # another rank of this node does it too


# ---- identity


def layout_of(args: argparse.Namespace, content: Mapping[str, Any]) -> Layout:
    """Return the layout of this rank.

    Args:
        args: of the run.
        content: of a checkpoint: "model", and "optimizer" if there is one.
    """
    layout = {name: getattr(args, name) for name in _ARGUMENTS}
    layout["rank"] = dist.get_rank()
    for key in ("model", "optimizer"):
        if key in content:
            layout[_SHARDS + key] = _digest_of_shards(content[key])
    return layout


def _digest_of_shards(content: dict[str, Any]) -> str:
    """Return a digest of the names and shapes of all tensors, and of the chunks on this rank."""
    digest = hashlib.sha256()
    entries, _ = flatten_state_dict(content)
    for key in sorted(entries):
        value = entries[key]
        if isinstance(value, torch.Tensor):
            local = value._local_tensor if isinstance(value, DTensor) else value
            own = local.chunks if isinstance(local, ChunkedTensor) else tuple(local.shape)
            digest.update(f"{key} {tuple(value.shape)} {own}\n".encode())
    return digest.hexdigest()


def identity(layout: Layout, run: str, save: str, followed: str) -> dict[str, str]:
    """Return the entry that identifies a part.

    Args:
        layout: of the rank that writes it.
        run: identifier of the run.
        save: identifies the save: the same on every rank, and of no other save.
        followed: persistent checkpoints, as :func:`followed_now` returns them.
    """
    content = {"run": run, "save": save, "layout": layout, "followed": followed}
    return {_IDENTITY: json.dumps(content)}


# ---- the choice


def find_newest(
    args: argparse.Namespace,
    damage: Damage,
    local_instead_of: Callable[[CheckpointSource | None], CheckpointSource | None],
    say: Say,
) -> CheckpointSource | None:
    """Return the newest checkpoint, local or not, None without any; a collective.

    Args:
        args: of the run.
        damage: of persistent checkpoints, as for :func:`find_source`.
        local_instead_of: :func:`find_local` for a persistent checkpoint.
        say: prints a line.

    Raises:
        ValueError: as :func:`find_source` does, if there is no local one either.
    """
    notes: list[str] = []
    try:
        found = on_first_rank(
            lambda: url_saves.found_by(lambda: find_source(args, notes.append, damage))
        )
    except ValueError:
        local = None if args.no_load_fallback else local_instead_of(None)
        if local is None:
            raise
        return local
    local = local_instead_of(None if found is None else found.source)
    if local is not None:
        return local
    for note in notes:
        say(note)
    return None if found is None else found.fetched()


def find_local(
    args: argparse.Namespace,
    layout: Callable[[], Layout],
    passed: set[int],
    say: Say,
    persistent: CheckpointSource | None,
) -> CheckpointSource | None:
    """Return this rank's part of the newest local checkpoint if it is to be loaded; a collective.

    It is None on every rank or on none.

    Args:
        args: of the run.
        layout: returns the layout of this run; a collective.
        passed: iterations of local checkpoints that have been passed over, the same on every rank.
        say: prints a line for each one that is.
        persistent: the checkpoint of which only a newer local one takes the place; None: any does.
    """
    if args.non_persistent_ckpt_type != LOCAL or not args.load:
        return None
    if args.ckpt_step is not None or args.finetune:
        return None
    after = 0 if persistent is None or persistent.weights_only else int(persistent.iteration)
    root = part_root(args, args.load)
    there: set[int] = set().union(*_of_all_ranks(_iterations(root)))
    candidates = sorted(number for number in there - passed if number > after)
    own = layout() if candidates else {}
    expected = on_first_rank(
        lambda: _Expected(_run_of(args), tracked_in(args.load) if persistent else None)
    )
    for iteration in reversed(candidates):
        part = _examine(root, iteration, expected, own, verify=not args.no_verify_integrity)
        parts = _of_all_ranks(part)
        problems = _problems(parts)
        if not problems:
            assert part.path is not None  # no rank has a problem
            return CheckpointSource(part.path, iteration, False, is_newest=True, is_local=True)
        if args.no_load_fallback and any(each.is_damaged for each in parts):
            raise ValueError(f"the local checkpoint of iteration {iteration}: {some(problems, 3)}")
        passed.add(iteration)
        say(f"the local checkpoint of iteration {iteration} is passed over: {some(problems, 3)}")
    return None


@dataclass(frozen=True)
class _Expected:
    """Facts with which a part must have been saved."""

    run: str
    """Identifier of the run."""
    tracked: str | None
    """What the tracker file of the persistent checkpoints names, if that tells anything."""


@dataclass(frozen=True)
class _Part:
    """The part of a local checkpoint that a rank has found."""

    path: Path | None = None
    save: str = ""
    """Identifier of the save that its part is of."""
    problem: str | None = None
    is_damaged: bool = False


def _run_of(args: argparse.Namespace) -> str:
    """Return the identifier of the run whose parts this run may load."""
    is_own = args.save and Path(args.save).resolve() == Path(args.load).resolve()
    return run_in(args.load) if is_own else run_to_load(args.load)


def _problems(parts: Sequence[_Part]) -> list[str]:
    """Return why a local checkpoint cannot be loaded, given the parts of all ranks."""
    problems = []
    for rank, part in enumerate(parts):
        if part.problem is not None:
            problems.append(f"rank {rank}: {part.problem}")
    is_mixed = len({part.save for part in parts if part.save}) > 1
    return ["its parts are of different saves"] if is_mixed else problems


def _iterations(root: Path) -> list[int]:
    """Return the iterations of the parts in a directory, none if it cannot be read."""
    try:
        return directory.iterations(root)
    except OSError:
        return []


def _examine(root: Path, iteration: int, expected: _Expected, own: Layout, verify: bool) -> _Part:
    """Look at a part of this rank; reads all of it if ``verify``.

    Args:
        root: directory of this rank's parts.
        iteration: of the part.
        expected: of every part that is loaded.
        own: layout of this run.
        verify: compare digests.
    """
    path: Path | None = root
    try:
        path = directory.find(root, iteration)
        if path is None:
            return _Part(problem=f"{root} has no part of it")
        stored = StoredCheckpoint(path, verify)
        damaged = stored.damaged_files()
        if damaged:
            return _Part(problem=f"{path} is damaged: {some(damaged)}", is_damaged=True)
        found = json.loads(stored.read_object(_IDENTITY))
        if found["run"] != expected.run:
            return _Part(problem=f"{path} is of another run that saved here")
        if is_given_up(iteration, found.get("followed"), expected.tracked):
            names = f"{directory.TRACKER} names {expected.tracked}"
            problem = f"{path} followed another checkpoint than {names}"
            return _Part(path, str(found["save"]), problem)
        return _Part(path, str(found["save"]), _difference(found["layout"], own))
    except Exception as error:  # files can hold anything, disks can fail, and other ranks wait
        words = " ".join(str(error).split())
        return _Part(problem=f"{path}: {type(error).__name__}: {words}", is_damaged=True)


def _difference(written: Layout, own: Layout) -> str | None:
    """Describe the first difference between the layouts of a part and of this run, if any."""
    for name, value in own.items():
        if written.get(name) != value:
            if name.startswith(_SHARDS):
                return f"the {name} are others than this run's"
            return f"{name} was {written.get(name)} when it was written, and is {value}"
    return None


def _of_all_ranks(value: Any) -> list[Any]:
    """Gather a value of every rank, by rank; a collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

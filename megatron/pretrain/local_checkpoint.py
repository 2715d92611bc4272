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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core import directory
from megatron.checkpoint.core.listing import some
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.fsdp.dtensor.chunked_tensor import ChunkedTensor
from megatron.pretrain import url_saves
from megatron.pretrain.checkpoint_source import CheckpointSource, Damage, Say, find_source
from megatron.pretrain.first_rank import on_first_rank

LOCAL = "local"
"""Value of --non-persistent-ckpt-type."""

Layout = dict[str, Any]
"""Properties of a run that its parts depend on, and digests of the shards of this rank."""

_IDENTITY = "local_part"
"""Key of the entry of a part that identifies it: its save and its layout, in JSON."""
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


def identity(layout: Layout, save: str) -> dict[str, str]:
    """Return the entry that identifies a part.

    Args:
        layout: of the rank that writes it.
        save: identifies the save: the same on every rank, and of no other save.
    """
    return {_IDENTITY: json.dumps({"save": save, "layout": layout})}


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
    there: set[int] = set().union(*_of_all_ranks(directory.iterations(root)))
    candidates = sorted(number for number in there - passed if number > after)
    own = layout() if candidates else {}
    for iteration in reversed(candidates):
        path = directory.find(root, iteration)
        problems = _problems(_examine(path, root, own, verify=not args.no_verify_integrity))
        if not problems:
            assert path is not None  # it has been examined
            return CheckpointSource(path, iteration, False, is_newest=True, is_local=True)
        passed.add(iteration)
        say(f"the local checkpoint of iteration {iteration} is passed over: {some(problems, 3)}")
    return None


def _problems(examined: tuple[str, str | None]) -> list[str]:
    """Return why a local checkpoint cannot be loaded, the same on every rank; a collective.

    Args:
        examined: the save that this rank's part is of, and what is wrong with it.
    """
    of_ranks = _of_all_ranks(examined)
    problems = []
    for rank, (_, problem) in enumerate(of_ranks):
        if problem is not None:
            problems.append(f"rank {rank}: {problem}")
    saves = {save for save, _ in of_ranks}
    return problems or (["its parts are of different saves"] if len(saves) > 1 else [])


def _examine(path: Path | None, root: Path, own: Layout, verify: bool) -> tuple[str, str | None]:
    """Return the save that a part is of, and what is wrong with it; reads all of it if ``verify``.

    Args:
        path: of the part; None if there is none.
        root: directory of this rank's parts.
        own: layout of this run.
        verify: compare digests.
    """
    if path is None:
        return "", f"{root} has no part of it"
    try:
        stored = StoredCheckpoint(path, verify)
        damaged = stored.damaged_files()
        if damaged:
            return "", f"{path} is damaged: {some(damaged)}"
        found = json.loads(stored.read_object(_IDENTITY))
        return str(found["save"]), _difference(found["layout"], own)
    except Exception as error:  # files can hold anything, disks can fail, and other ranks wait
        return "", f"{path}: {type(error).__name__}: {' '.join(str(error).split())}"


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

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that differ a little from what a run writes, for tests of what is noticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.dcp_target import DcpTarget, ObjectEntry, whole
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import MANIFEST
from megatron.checkpoint.store.directory import OutputDirectory, new_checkpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from tests.support.checkpoint import small_models
from tests.support.checkpoint.small_models import shapes_of, state_of

TENSOR = "decoder.layers.1.mlp.linear_fc2.weight"


def rewritten(iteration: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Write a copy of a checkpoint with changed entries, all of which pass through memory."""
    stored = StoredCheckpoint(iteration)
    content: dict[str, Any] = {key: stored.lazy(key).read() for key in stored.tensors}
    content |= {key: stored.read_object(key) for key in stored.objects}
    change(content)
    paths = stored.metadata.planner_data
    beside = [iteration / name for name in (torch_dist.COMMON_FILE, torch_dist.MARKER)]
    files = {path.name: path.read_bytes() for path in beside if path.is_file()}
    return write_entries(
        content,
        new_checkpoint(target, 3),
        paths={key: path for key, path in paths.items() if key in content} if paths else None,
        extra_files={name: lambda data=data: data for name, data in files.items()},
    )


def write_entries(content: dict[str, Any], output: OutputDirectory, **options: Any) -> Path:
    entries = [
        whole(key, in_memory(value)) if isinstance(value, torch.Tensor) else ObjectEntry(key, value)
        for key, value in content.items()
    ]
    conversion.convert(DcpTarget(entries, **options), output, show_progress=False)
    return output.final


def without_manifest(folder: Path) -> Path:
    """Make a checkpoint one of a program that writes no manifest, and return its directory."""
    for manifest in folder.rglob(MANIFEST):
        manifest.unlink()
    return folder


def flip_a_bit(iteration: Path, key: str, at: int = 0) -> Path:
    """Change a bit of the values of a tensor, and return the file that has them."""
    stored = StoredCheckpoint(iteration)
    payload = stored._payload(key, stored.chunks[key][0])
    data = bytearray(payload.file.read_bytes())
    data[payload.offset + at] ^= 1
    payload.file.write_bytes(data)
    return payload.file


def change_common(iteration: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    without_manifest(iteration)
    path = iteration / torch_dist.COMMON_FILE
    common = safe_pickle.load_torch(path.read_bytes())
    change(common)
    path.write_bytes(safe_pickle.save_torch(common))


def contradicting(path: Path) -> Path:
    """Write a file in which the main weight of one parameter differs from its model weight."""

    def change(content: dict[str, Any]) -> None:
        content["optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"][1] += 1

    return rewritten(
        small_models.write(state_of(shapes_of()), path / "right"), path / "contradicting", change
    )


def with_another_momentum(state: TrainingState) -> TrainingState:
    """Replace Adam's moments by the momentum of SGD."""
    state.moments = {
        name: {"momentum_buffer": slots["exp_avg"]} for name, slots in state.moments.items()
    }
    return state

# SPDX-License-Identifier: Apache-2.0
"""Runs with checkpoints, and the content of their files as torch alone reads it."""

import itertools
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint.core.training_state import SCHEDULE
from megatron.checkpoint.store.directory import TRACKER
from tests.support.pretrain.training_runs import NO_DROPOUT, SMALL, State

FSDP = "--use-megatron-fsdp"
SIX = f"{SMALL} --train-iters 6 --lr-decay-iters 20"
DROPOUT = SIX.replace(NO_DROPOUT, "--attention-dropout 0.1 --hidden-dropout 0.1")
GATED = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
LINE = f"{SIX} {GATED} {FSDP}"


def saved_at(folder: Path, *iterations: int) -> None:
    """Check that exactly these checkpoints are there and the tracker names the last."""
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert [name for name in folders if not name.startswith("replaced_")] == [
        f"iter_{number:07d}" for number in iterations
    ]
    assert (folder / TRACKER).read_text() == str(iterations[-1])


def read(folder: Path, iteration: int, only: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its key, read by torch alone, without any rank."""
    source = folder / f"iter_{iteration:07d}"
    entries = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(only)
    }
    dcp.load(tensors, checkpoint_id=source, no_dist=True)
    return tensors


def keys(folder: Path, iteration: int) -> set[str]:
    return set(
        dcp.FileSystemReader(folder / f"iter_{iteration:07d}").read_metadata().state_dict_metadata
    )


def whole(
    tensors: dict[str, torch.Tensor], prefix: str, suffix: str = ""
) -> dict[str, torch.Tensor]:
    """Plain name -> tensor, halves of gated weights put together."""
    entries = {
        key.removeprefix(prefix).removesuffix(suffix): value
        for key, value in tensors.items()
        if key.startswith(prefix) and key.endswith(suffix)
    }
    result = {name: value for name, value in entries.items() if not name.endswith(("_w", "_v"))}
    for name in entries:
        if name.endswith("_w"):
            result[name[:-2]] = torch.cat([entries[name], entries[f"{name[:-2]}_v"]])
    return result


def assert_equal(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert values.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(values[name], expected[name])]
    assert not different


LAYER = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight",
    "pre_mlp_layernorm.weight",
)

UNSPLIT = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} | {
    f"decoder.layers.{number}.{name}"
    for number, name in itertools.product((0, 1), (*LAYER, "mlp.linear_fc2.weight"))
}

FC1 = {f"decoder.layers.{number}.mlp.linear_fc1.weight" for number in (0, 1)}
ENTRIES = UNSPLIT | {f"{name}_w" for name in FC1} | {f"{name}_v" for name in FC1}

GROUP_FIELDS = [
    "is_expert_parallel",
    "default_config",
    "wd_mult",
    "lr_mult",
    "is_decoupled_lr",
    "max_lr",
    "min_lr",
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
]

RNG = [
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states.data-parallel-rng",
    "rng_tracker_states.model-parallel-rng",
    "rng_tracker_states.expert-parallel-rng",
]


def expected_keys(wrappers: str) -> set[str]:
    states = itertools.product(ENTRIES, ("exp_avg", "exp_avg_sq", "step"))
    fields = itertools.product(UNSPLIT | FC1, GROUP_FIELDS)
    return (
        {"args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"}
        | {f"model.module.{name}" for name in ENTRIES}
        | {f"optimizer.state.{wrappers}.{name}.{slot}" for name, slot in states}
        | {f"optimizer.param_to_group_meta.{wrappers}.{name}.{field}" for name, field in fields}
        | {f"opt_param_scheduler.{field}" for field in SCHEDULE}
        | {f"rng_state.(0, 0).0.{name}" for name in RNG}
    )


def assert_same_state(state: State, expected: State) -> None:
    assert_equal(state.weights, expected.weights)
    assert state.slots.keys() == expected.slots.keys()
    for slot in expected.slots:
        assert_equal(state.slots[slot], expected.slots[slot])
    assert state.groups == expected.groups
    assert state.args == expected.args

# SPDX-License-Identifier: Apache-2.0
"""Ranks that are given different things all raise the same message, which lists everything."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.engine.collectives import agree
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.reference import Ranks, on_ranks
from tests.support.fsdp.subclasses import Frozen4Bit
from tests.support.fsdp.wrong_calls import Scene, WrongCall, check_refusals


def differing(**values: Any) -> Callable[[Scene], Any]:
    """Give rank 0 and all others different values of an argument."""
    return lambda scene: fully_shard(
        scene.module,
        scene.optimizer,
        **{key: pair[min(scene.rank, 1)] for key, pair in values.items()},
    )


def quantized() -> nn.Module:
    """Return a layer whose weight cannot be trained."""
    module = nn.Linear(8, 8)
    module.weight = nn.Parameter(Frozen4Bit.of(module.weight.detach()))
    return module


def several_things(scene: Scene) -> None:
    fully_shard_model(
        nn.ReLU(),
        mesh_of("dp", "cp"),
        "data",
        zero_dp_strategy="zero3",
        fsdp_unit_modules=[int],
        device="abacus",
        nccl_ub=True,
        calculate_per_token_loss=True,
        average_in_collective=True,
    )


WRONG_CALLS: dict[str, WrongCall] = {
    "strategy wrong on one rank": WrongCall(
        ("zero_dp_strategy expects", "but got 7"), differing(zero_dp_strategy=(3, 7))
    ),
    "optimizer of another model on one rank": WrongCall(
        ("none of the module's",),
        lambda scene: fully_shard(
            scene.module,
            torch.optim.SGD(nn.Linear(2, 2).parameters()) if scene.rank else scene.optimizer,
        ),
    ),
    "module wrong on one rank": WrongCall(
        ("module expects",), lambda scene: fully_shard_model(scene.module if scene.rank else "text")
    ),
    "optimizer wrong on one rank": WrongCall(
        ("optimizer expects",),
        lambda scene: fully_shard(scene.module, scene.optimizer if scene.rank else "text"),
    ),
    "not built on one rank": WrongCall(
        ("weight (Frozen4Bit)", "freeze them"),
        lambda scene: fully_shard_model(quantized() if scene.rank else scene.module),
        NotImplementedError,
    ),
    "strategies differ": WrongCall(
        (
            "zero_dp_strategy differs between ranks",
            "optim_grads on rank 0; ",
            "optim_grads_params on rank 1",
        ),
        differing(zero_dp_strategy=(2, 3)),
    ),
    "policies differ": WrongCall(
        ("mixed_precision_policy differs between ranks",),
        differing(mixed_precision_policy=(MixedPrecisionPolicy(), MixedPrecisionPolicy(None))),
    ),
    "units differ": WrongCall(
        ("the list of units differs between ranks",),
        differing(fsdp_unit_modules=([ResidualBlock, nn.LayerNorm], [])),
    ),
    "per-token loss differs": WrongCall(
        ("calculate_per_token_loss differs between ranks", "True"),
        differing(calculate_per_token_loss=(False, True)),
    ),
    "reports of NaN differ": WrongCall(
        ("report_nan_in_param_grad differs between ranks",),
        differing(report_nan_in_param_grad=(False, True)),
    ),
    "synchronisation differs": WrongCall(
        ("sync_model_each_microbatch differs between ranks",),
        differing(sync_model_each_microbatch=(False, True)),
    ),
    "overlap differs": WrongCall(
        ("overlap_grad_reduce differs between ranks",), differing(overlap_grad_reduce=(False, True))
    ),
    "memory slots differ": WrongCall(
        ("fsdp_double_buffer differs between ranks",),
        differing(fsdp_double_buffer=(False, True)),
    ),
    "communication sizes differ": WrongCall(
        ("suggested_communication_unit_size differs between ranks",),
        differing(suggested_communication_unit_size=(1024, None)),
    ),
    "shapes differ": WrongCall(
        ("differs between ranks", "weight (3, 2)", "weight (4, 2)"),
        lambda scene: fully_shard_model(nn.Linear(2, 3 + scene.rank)),
    ),
    "numbers of parameters differ": WrongCall(
        ("the number of parameters differs between ranks",),
        lambda scene: fully_shard_model(nn.Linear(2, 3, bias=scene.rank == 0)),
    ),
    "frozen on one rank": WrongCall(
        ("differs between ranks", "trainable", "frozen"),
        lambda scene: fully_shard_model(nn.Linear(2, 3).requires_grad_(scene.rank == 0)),
    ),
    "shapes differ on one of four": WrongCall(
        ("differs between ranks", "weight (3, 2)", "weight (4, 2)"),
        lambda scene: fully_shard_model(nn.Linear(2, 3 + (scene.rank == 2))),
        world_size=4,
    ),
    "classes of optimizers differ": WrongCall(
        ("the class of the optimizer differs between ranks: AdamW on rank 1; SGD on rank 0",),
        lambda scene: fully_shard(
            scene.module,
            [torch.optim.SGD, torch.optim.AdamW][scene.rank](scene.module.parameters(), lr=0.1),
        ),
    ),
    "rates and groups of optimizers differ": WrongCall(
        (
            "lr of param group 0 of the optimizer differs between ranks: 0.0 on rank 0; 1.0 on"
            " ranks 1, 2, 3",
            "the list of parameters of param group 0 of the optimizer differs",
        ),
        lambda scene: fully_shard(
            scene.module,
            torch.optim.SGD(
                list(scene.module.parameters())[:: -1 if scene.rank == 2 else 1],
                lr=float(scene.rank > 0),
            ),
        ),
        world_size=4,
    ),
    "several things": WrongCall(
        (
            "no parameters",
            "zero_dp_strategy",
            "'zero3'",
            "dp_shard_dim='data'",
            "fsdp_unit_modules",
            "int",
            "'abacus'",
            "nccl_ub",
            "average_in_collective",
            "('dp', 'cp')",
        ),
        several_things,
    ),
    "optimizer and arguments": WrongCall(
        ("optimizer expects", "zero_dp_strategy", "'abacus'"),
        lambda scene: fully_shard(scene.module, "adam", zero_dp_strategy=9, device="abacus"),
    ),
    "different things on two ranks": WrongCall(
        ("zero_dp_strategy", "fsdp_unit_modules"),
        lambda scene: fully_shard_model(
            scene.module,
            **({"zero_dp_strategy": 9} if scene.rank else {"fsdp_unit_modules": [int]}),
        ),
    ),
}


def test_wrong_calls_are_refused_alike_on_every_rank(ranks: Ranks) -> None:
    check_refusals(ranks, __name__)


@on_ranks(2)
def test_stages_of_a_pipeline_have_other_parameters_and_optimizers() -> None:
    stage = dist.get_rank()
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + stage)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 * (1 + stage))
    mesh = mesh_of("pp", "dp", sizes=(2, 1))
    fully_shard(module, optimizer, mesh, dp_shard_dim="dp", fsdp_unit_modules=[nn.Linear])


@on_ranks(2)
def test_any_texts_are_agreed_on_wherever_tensors_are_made() -> None:
    is_first = dist.get_rank() == 0
    assert agree(["no\udcff file"] if is_first else []) == ["no\udcff file"]  # its name is no UTF-8
    assert agree([""] if is_first else []) == [""]
    assert agree(["a\0b"] if is_first else ["a", "b"]) == ["a", "a\0b", "b"]
    with torch.device("meta"):
        assert agree(["same"]) == ["same"]

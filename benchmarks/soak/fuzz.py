# SPDX-License-Identifier: Apache-2.0
"""The gradient contract under random combinations of model, mesh, strategy, dtypes and schedule.

    python -m benchmarks.soak.fuzz --draws 5000 --seed 1

Each draw trains for a few steps and compares gradients, their norm, weights and outputs with an
unsharded float64 reference. A failing draw is printed as a `Case`, to be kept as a named test.
"""

from __future__ import annotations

import time
from math import inf
from random import Random
from typing import Any

import click
import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron.checkpoint.core.parts import progress_of
from megatron_fsdp import MixedPrecisionPolicy
from tests.support import rank_pool
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import MODELS
from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import Case, compare

WORLD_SIZES = (1, 2, 3, 4)
DRAWS_PER_JOB = 25


def draw_case(random: Random, world_size: int) -> Case:
    """Draw one combination for `world_size` ranks."""
    mesh = draw_mesh(random, world_size)
    settings: dict[str, Any] = {"zero_dp_strategy": random.choice((0, 1, 2, 3, 3))}
    if mesh.startswith("outer") and random.random() < 0.5:
        settings |= {"zero_dp_strategy": 3, "outer_dp_sharding_strategy": 1}
    for name, share in {
        "overlap_grad_reduce": 0.5,
        "overlap_param_gather": 0.5,
        "disable_bucketing": 0.15,
        "calculate_per_token_loss": 0.3,
        "enable_fine_grained_param_gather": 0.2,
        "fsdp_double_buffer": 0.3,
    }.items():
        settings[name] = random.random() < share
    settings["average_in_collective"] = (
        not settings["calculate_per_token_loss"] and random.random() < 0.5
    )
    if random.random() < 0.2:
        settings["fsdp_unit_modules"] = []
    # Expert-parallel ranks add up their outputs in another order than one rank: in bf16 that alone
    # is too much.
    low = [torch.float32] if mesh.startswith("ep") else [torch.float32, torch.bfloat16]
    dtype = random.choice([torch.float64] * 5 + low)
    if dtype != torch.float64:
        settings["mixed_precision_policy"] = draw_policy(random, dtype)
    # What is rounded to bf16 on the way to the weights parts them from those of the reference with
    # the first update.
    coarse = dtype == torch.bfloat16 and settings["mixed_precision_policy"] != MixedPrecisionPolicy(
        torch.float32, torch.float32, torch.float32
    )
    sync = random.choice(["auto", "no_sync", "manual", "step"])
    if mesh.startswith("ep"):
        model = draw_model(random, num_experts=random.choice([2, 4]) if mesh == "ep2" else 4)
    else:
        model = draw_model(random) if random.random() < 0.7 else random.choice(sorted(MODELS))
    case = Case(
        model=model,
        mesh=mesh,
        sync=sync,
        microbatches=random.randint(1, 3),
        forwards=1 if mesh.startswith("ep") else random.choice([1, 1, 2]),
        steps=1 if coarse else random.randint(2, 4),
        evaluate=random.random() < 0.5,
        clip=random.choice([None, 2.0, 2.0, 1.0, inf]) if sync != "step" else None,
        # Adam turns the sign of a rounding error into a step: with low precision it is nothing to
        # compare.
        optimizer=random.choice(["adamw", "sgd"]) if dtype == torch.float64 else "sgd",
        dtype=dtype,
        settings=settings,
    )
    if random.random() < 0.4:  # a window in bytes, in place of one unit
        settings["suggested_communication_unit_size"] = random.choice((1, 1000, 4000, 20000))
    layers = model.layers if isinstance(model, Drawn) and mesh.startswith("ep") else ()
    if any(layer.num_experts for layer in layers):
        settings["expert_zero_dp_strategy"] = random.choice((None, 0, 1, 2, 3))
    return case


def draw_model(random: Random, num_experts: int = 0) -> Drawn:
    """Draw a model; its layers have `num_experts` experts each or none."""
    layers = tuple(draw_layer(random, num_experts) for _ in range(random.randint(1, 4)))
    tied = None
    if len(layers) > 1 and random.random() < 0.3:
        tied = tuple(sorted(random.sample(range(len(layers)), 2)))
        hidden = layers[tied[0]].hidden
        layers = tuple(
            DrawnLayer(**{**vars(layer), "hidden": hidden}) if number in tied else layer
            for number, layer in enumerate(layers)
        )
    return Drawn(
        layers=layers,
        seed=random.randrange(1000),
        tied_layers=tied,
        head=random.choice(["linear", "linear", "tied", "functional"]),
        frozen_embedding=random.random() < 0.2,
        skip=random.randrange(len(layers)) if random.random() < 0.2 and not num_experts else None,
        is_output_a_dict=random.random() < 0.3,
    )


def draw_layer(random: Random, num_experts: int) -> DrawnLayer:
    return DrawnLayer(
        hidden=random.choice([1, 2, 3, 7, 8, 16, 33]),
        bias=random.random() < 0.7,
        norm=random.random() < 0.5,
        scale=random.choice(["", "", "vector", "scalar"]),
        recompute="" if num_experts else random.choice(["", "", "reentrant", "non_reentrant"]),
        calls=random.choice([1, 1, 1, 2]),
        unused=random.random() < 0.2,
        frozen=tuple(name for name in ("up", "down") if random.random() < 0.15),
        num_experts=num_experts if random.random() < 0.7 else 0,
    )


def draw_mesh(random: Random, world_size: int) -> str:
    kinds = ["flat", "flat", "default", "gather_group"]
    for size in (1, 2, 3, 4):
        if world_size % size == 0:
            kinds += [f"outer{size}", f"outer{size}", f"cp{size}"]
            kinds += [f"ep{size}"] * 2 if size in (2, 4) else []
    return random.choice(kinds)


def draw_policy(random: Random, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Draw dtypes that lose nothing that the tolerance would show."""
    main = random.choice(
        [torch.float32, torch.float64]
        if dtype == torch.float32
        else [torch.float32, torch.bfloat16, None]
    )
    grads = random.choice([torch.float32, torch.float32, None])
    comm = random.choice(
        [torch.float32, torch.bfloat16, None] if dtype == torch.bfloat16 else [torch.float32, None]
    )
    return MixedPrecisionPolicy(main, grads, comm)


def run_draws(seed: int, first: int, last: int, world_size: int) -> None:
    """Run the draws from `first` to before `last` on a rank, up to the first that fails."""
    meshes = Meshes()
    for number in range(first, last):
        case = draw_case(Random(f"{seed}/{world_size}/{number}"), world_size)
        try:
            compare(case, meshes)
        except Exception as error:
            if meets_limit_of_slots(case, error):
                continue
            error.add_note(f"draw {number} of seed {seed} on {world_size} ranks: {case}")
            raise
    dist.barrier()
    dist.destroy_process_group()  # the groups of many meshes are of no use to the rest of the run


def meets_limit_of_slots(case: Case, error: Exception) -> bool:
    """Return True for the error that memory slots raise where steps use units differently.

    Which units are in use together is learnt in the first step. One that skips a layer may combine
    others, if units are called twice or recomputed.
    """
    skips = isinstance(case.model, Drawn) and case.model.skip is not None
    is_raised = isinstance(error, RuntimeError) and "for the first time since" in str(error)
    return skips and bool(case.settings.get("fsdp_double_buffer")) and is_raised


@click.command()
@click.option("--draws", default=400, help="Over all world sizes.")
@click.option("--seed", default=0)
@click.option("--world-size", "world_sizes", multiple=True, type=int, default=WORLD_SIZES)
@click.option("--keep-going", is_flag=True, help="Go on after a failure; else stop at the first.")
def main(draws: int, seed: int, world_sizes: tuple[int, ...], keep_going: bool) -> None:
    """Run random draws on warm ranks and print what failed."""
    begin, failures, done = time.perf_counter(), [], 0
    each = -(-draws // len(world_sizes))
    with progress_of("drawing", each * len(world_sizes), unit="draws") as advance:
        for world_size in world_sizes:
            first = 0
            while first < each:
                last = min(first + DRAWS_PER_JOB, each)
                try:
                    rank_pool.run_ranks(
                        world_size, run_draws, seed, first, last, world_size, timeout=300
                    )
                except rank_pool.RankFailure as failure:
                    failures.append(str(failure))
                    tqdm.write(str(failure).partition("was still running")[0])
                    if not keep_going:
                        raise SystemExit(1) from None
                    last = number_of(str(failure), first) + 1
                advance(last - first)
                done += last - first
                first = last
    click.echo(
        f"{done} draws, seed {seed}: {len(failures)} failures, {time.perf_counter() - begin:.0f} s"
    )
    raise SystemExit(bool(failures))


def number_of(text: str, default: int) -> int:
    """Return the number of the draw that a failure names."""
    return int(text.split("draw ")[1].split(" of seed")[0]) if "draw " in text else default


if __name__ == "__main__":
    main()

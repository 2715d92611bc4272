# SPDX-License-Identifier: Apache-2.0
"""Trainings on several GPUs with NCCL, each compared with an unsharded model in float64.

    torchrun --nproc_per_node 8 -m tests.gpu.training         all of them
    torchrun --nproc_per_node 8 -m tests.gpu.training level3 "hybrid level1"

Without CUDA the ranks are the CPU's, over gloo. With ``--streams`` no value is read before the end
of a training, which would order all streams: for ``TORCH_CUDA_SANITIZER=1``, or without CUDA on the
model of a CUDA device (docs/decisions/cuda_model.md). A rank that fails ends the others;
``--progress FILE`` then has the names of the trainings that passed before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from tests.support.cuda_model.scenarios import EXPERTS, SCENARIOS, reports_of, stack_on, step
from tests.support.fsdp.meshes import Meshes, device_type
from tests.support.fsdp.models import build_stack
from tests.support.fsdp.reference import LEVELS, Case, batch, compare, loss_of

Training = Callable[[Meshes], None]


def compared(num_steps: int = 3, **options: object) -> Training:
    """Return a comparison of one of the tests' models; other names are settings of the library."""
    fields = {key: options.pop(key) for key in set(options) & set(Case.__dataclass_fields__)}
    case = Case(**{"model": "several_units", "steps": num_steps, **fields}, settings=options)
    return partial(compare, case)


def from_the_meta_device(level: int, meshes: Meshes) -> None:
    """Shard a model without values; its gradients are those of a whole model with its weights."""
    with torch.device("meta"):
        module = build_stack()
    model, _ = stack_on(level, meshes, module=module, init_model_with_meta_device=True)
    whole = build_stack().to(device_type())
    with torch.no_grad():
        for weight, shards in zip(whole.parameters(), model.parameters()):
            weight.copy_(full_tensor(shards))
    loss_of(model(batch(0, dist.get_rank(), 0))).backward()
    for rank in range(dist.get_world_size()):
        (loss_of(whole(batch(0, rank, 0))) / dist.get_world_size()).backward()
    for weight, shards in zip(whole.parameters(), model.parameters()):
        torch.testing.assert_close(full_tensor(shards.grad), weight.grad)


def continued(level: int, meshes: Meshes) -> None:
    """Save, train a step, load into another model and train the same step: weights are equal."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    def trained(is_saved: bool) -> nn.Module:
        model, optimizer = stack_on(level, meshes, module=build_stack().to(device_type()))
        step(model, optimizer, 0 if is_saved else 7)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if is_saved:
            dcp.save(state, checkpoint_id=folder[0])
        else:
            dcp.load(state, checkpoint_id=folder[0])
            model.load_state_dict(state["model"], strict=False)
            optimizer.load_state_dict(state["optimizer"])
        step(model, optimizer, 1)
        return model

    for first, second in zip(trained(True).parameters(), trained(False).parameters()):
        torch.testing.assert_close(full_tensor(second), full_tensor(first))


BF16 = {"dtype": torch.bfloat16}
TRAININGS: dict[str, Training] = {
    **{f"level{n}": compared(zero_dp_strategy=n, microbatches=2, clip=2.0) for n in LEVELS},
    **{f"level{n} bf16": compared(zero_dp_strategy=n, **BF16) for n in LEVELS},
    "level3 no_sync": compared(microbatches=3, sync="no_sync"),
    "level2 manual": compared(zero_dp_strategy=2, microbatches=3, sync="manual"),
    **{f"hybrid level{n}": compared(mesh="outer2", zero_dp_strategy=n) for n in LEVELS},
    "hybrid sharded optimizer": compared(mesh="outer2", outer_dp_sharding_strategy=1),
    "experts": compared(model=EXPERTS, mesh="ep2", microbatches=2),
    "recomputation": compared(model="checkpoint_non_reentrant", forwards=2),
    "slots": compared(fsdp_double_buffer=True, microbatches=2, num_steps=4),
    "meta level3": partial(from_the_meta_device, 3),
    **{f"checkpoint level{n}": partial(continued, n) for n in (1, 3)},
}
"""By name."""

NEEDS_PAIRS = ("hybrid", "experts")
"""Beginnings of the names of trainings whose meshes have an axis of two."""

ON_EVERY_STREAM = ("level0", "level3", "level3 bf16", "level3 no_sync", "slots")
"""What torch's sanitizer watches: at levels 1 and 2 it takes an in-place gather, which leaves a
rank's own shard as it is, for a write of it."""


def suits(name: str, num_ranks: int) -> bool:
    """Return whether a training has a mesh for this number of ranks."""
    return num_ranks % 2 == 0 or not name.startswith(NEEDS_PAIRS)


def run(name: str, meshes: Meshes, streams: bool) -> None:
    """Run one training."""
    if not streams:
        return TRAININGS[name](meshes)
    if device_type() == "cuda":
        return SCENARIOS[name].program(meshes)()
    reports = reports_of([name])[name]
    assert not reports, "\n".join(reports)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--streams", is_flag=True, help="read no value before the end of a training")
@click.option("--progress", type=click.Path(path_type=Path), help="gets the names that passed")
def main(names: tuple[str, ...], streams: bool, progress: Path | None) -> None:
    """Run trainings by name, or all that fit the number of ranks."""
    unknown = set(names) - TRAININGS.keys()
    if unknown:
        raise click.UsageError(f"no trainings {sorted(unknown)}; there are {list(TRAININGS)}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    meshes = Meshes()
    names = names or (ON_EVERY_STREAM if streams else tuple(TRAININGS))
    suiting = [name for name in names if suits(name, dist.get_world_size())]
    for name in suiting:
        try:
            run(name, meshes, streams)
        except Exception:
            print(f"failed: {name} on rank {dist.get_rank()}", flush=True)
            raise
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"passed: {name}", flush=True)
            if progress is not None:
                with progress.open("a") as file:
                    file.write(f"{name}\n")
    if dist.get_rank() == 0:
        print(f"{len(suiting)} trainings passed on {dist.get_world_size()} ranks, {backend}")
    dist.barrier()  # a rank of gloo that leaves early may abort others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` in its surroundings: options, other models, pipeline stages, Megatron-Core."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import FSDPDistributedIndex, MegatronFSDP, fully_shard, fully_shard_model
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import BATCH, WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import (
    Ranks,
    batch,
    close,
    compare_shards,
    loss_of,
    on_ranks,
    optimizer_over,
    shown_gradients,
)
from tests.support.fsdp.side_by_side import mean_gradients, plain_backward, shard
from tests.support.fsdp.wrong_calls import message_of


def train_a_stage() -> None:
    """Train two pipeline stages with other modules, on two ranks each.

    Activations and their gradients travel between them.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    stage, place = mesh.get_local_rank("stage"), mesh.get_local_rank("dp")
    whole_model = models.build("several_units")
    parts = (
        nn.Sequential(whole_model.embed, whole_model.blocks[0]),
        nn.Sequential(whole_model.blocks[1], whole_model.head),
    )
    reference = copy.deepcopy(parts)
    model = fully_shard_model(
        parts[stage], mesh["dp"], fsdp_unit_modules=[ResidualBlock], preserve_fp32_weights=False
    )
    other = mesh.get_group("stage")
    for microbatch in range(2):
        x = batch(0, place, microbatch)
        with model.no_sync():
            run_stage(model, stage, x, other)
        for rank in range(2):
            (loss_of(reference[1](reference[0](batch(0, rank, microbatch)))) / 2).backward()
    model.finish_grad_sync()
    expected = {name: parameter.grad for name, parameter in reference[stage].named_parameters()}
    compare_shards(model, shown_gradients(model), expected, f"stage {stage}")


def run_stage(model: nn.Module, stage: int, x: Tensor, group: dist.ProcessGroup) -> None:
    if stage == 0:
        output = model(x)
        dist.send(output.detach().clone(), group=group, group_dst=1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, group=group, group_src=1)
        output.backward(gradient)
    else:
        received = torch.empty(BATCH, WIDTH, dtype=torch.float64)
        dist.recv(received, group=group, group_src=0)
        received.requires_grad_()
        loss_of(model(received)).backward()
        dist.send(received.grad, group=group, group_dst=0)


def shard_other_stages_by_mistake() -> str:
    """Shard, over one data axis, the modules of different pipeline stages."""
    return message_of(
        ValueError,
        fully_shard_model,
        nn.Linear(2, 2) if dist.get_rank() else nn.Linear(2, 3),
        shard_mesh(),
    )


def test_pipeline_stages_train_and_mixed_up_stages_are_refused_on_every_rank(
    ranks: Ranks,
) -> None:
    ranks(4, train_a_stage)
    messages = ranks(2, shard_other_stages_by_mistake)
    assert messages[0] == messages[1]
    assert "differs between ranks" in messages[0]


def shard_beside_megatron_core() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig as OtherConfig

    module = models.build("several_units")
    model, optimizer = fully_shard(
        module, optimizer_over(module), fsdp_unit_modules=[ResidualBlock]
    )
    loss_of(model(batch(0, 0, 0))).backward()
    optimizer.step()
    config = OtherConfig(data_parallel_sharding_strategy="optim_grads", overlap_grad_reduce=True)
    model = MegatronFSDP(models.build("several_units"), FSDPDistributedIndex(), config)
    loss_of(model(batch(0, 0, 0))).backward()
    model.finish_grad_sync()
    assert model.strategy == 2 and all(
        parameter.grad is not None for parameter in model.parameters()
    )


WITHOUT_MEGATRON_CORE = """
import sys
sys.modules["megatron.core"] = None  # importing it fails
import torch
from megatron_fsdp import fully_shard
import megatron_fsdp.megatron_fsdp, megatron_fsdp.uneven_dtensor, megatron_fsdp.utils
module = torch.nn.Linear(3, 3)
model, optimizer = fully_shard(module, torch.optim.AdamW(module.parameters()))
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
assert not [name for name in sys.modules if name.startswith("megatron.core.")]
torch.distributed.destroy_process_group()
print("trained")
"""


@pytest.mark.exhaustive
def test_the_engine_works_with_megatron_core_beside_it_and_without(ranks: Ranks) -> None:
    ranks(2, shard_beside_megatron_core)
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON_CORE],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # gloo of some releases of torch prints its connections there too.
    own = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert own == ["trained"], done.stderr


def train_both(
    pairs: list[tuple], use: Callable[[list[nn.Module], int, int], None], step: int
) -> None:
    for reference, *_ in pairs:
        reference.zero_grad()
    for rank in range(dist.get_world_size()):
        use([reference for reference, *_ in pairs], step, rank)
    use([model for _, _, model, _ in pairs], step, dist.get_rank())
    for number, (reference, expected_optimizer, model, optimizer) in enumerate(pairs):
        if all(parameter.grad is None for parameter in reference.parameters()):
            continue
        for parameter in reference.parameters():
            parameter.grad /= dist.get_world_size()
        expected_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        compare_shards(
            model, dict(model.named_parameters()), weights, f"{use.__name__}: model {number}"
        )


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_models_are_trained_in_turn_and_through_one_another(level: int) -> None:
    """Train two models in turn, then one inside the loss of the other, as distillation does."""
    mesh = shard_mesh()
    pairs = []
    for number in range(2):
        reference, module = build_stack(), build_stack()
        with torch.no_grad():
            for each in (reference, module):
                each.head.weight.add_(number)
        pairs.append((reference, optimizer_over(reference), *shard(module, level, mesh)))

    def interleaved(models_: list[nn.Module], step: int, rank: int) -> None:
        first, second = (
            loss_of(model(batch(step, rank, number))) for number, model in enumerate(models_)
        )
        second.backward()
        first.backward()

    def distilled(models_: list[nn.Module], step: int, rank: int) -> None:
        with torch.no_grad():
            target = models_[0](batch(step, rank, 0))
        loss_of(models_[1](batch(step, rank, 0)) - target).backward()

    def chained(models_: list[nn.Module], step: int, rank: int) -> None:
        hidden = models_[0](batch(step, rank, 0)).repeat(1, 2)[:, :WIDTH]
        loss_of(models_[1](hidden)).backward()

    for step, use in enumerate((interleaved, distilled, chained, interleaved)):
        train_both(pairs, use, step)


class Around(nn.Module):
    """An unsharded module around a sharded one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH).double()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.before(x))


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_a_sharded_model_works_inside_an_unsharded_module(level: int) -> None:
    mesh = shard_mesh()
    torch.manual_seed(3)
    reference = Around(build_stack())
    module = build_stack()
    model, _optimizer = shard(module, level, mesh)
    around = Around(model)
    around.before.load_state_dict(reference.before.state_dict())
    expected = mean_gradients(reference, plain_backward, 0)
    plain_backward(around, 0, dist.get_rank())
    inside = {
        name.removeprefix("body."): value
        for name, value in expected.items()
        if name.startswith("body.")
    }
    compare_shards(model, shown_gradients(model), inside, "inside")
    local = around.before.weight.grad  # plain: nobody reduces it
    dist.all_reduce(local)
    close(local / dist.get_world_size(), expected["before.weight"], "outside")
    assert sum(
        1 for name, _ in around.named_parameters() if name.startswith("body.module.")
    ) == len(inside)
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(around, optimizer_over(around), mesh)

# SPDX-License-Identifier: Apache-2.0
"""Experts that torch's tensor parallelism divides over more or fewer ranks than other layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.fsdp.reference import Ranks, close, on_ranks, optimizer_over, shown_gradients
from tests.support.fsdp.state_dicts import load_checkpoint, save_checkpoint
from tests.support.fsdp.wrong_calls import message_of

WIDTH, HIDDEN, TOKENS = 6, 8, 8
SPLIT = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class LayerWithExpert(nn.Module):
    """A dense part, and an expert that gets the tokens of all ranks that compute it together."""

    mesh: DeviceMesh | None = None  # (dp_shard, tp)
    experts_are_whole = True

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = FeedForward(), nn.ModuleList([FeedForward()])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        if self.mesh is None:
            return x + self.experts[0](x)
        # Every data rank has other tokens, which its tensor-parallel ranks have all. An expert of
        # one rank gets a part of them, one that is divided over all ranks those of all.
        own = [Shard(0), Replicate()]
        there = [Shard(0), Shard(0)] if self.experts_are_whole else [Replicate(), Replicate()]
        tokens = DTensor.from_local(x, self.mesh, own).redistribute(placements=there).to_local()
        computed = DTensor.from_local(self.experts[0](tokens), self.mesh, there)
        return x + computed.redistribute(placements=own).to_local()


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), LayerWithExpert(), LayerWithExpert(), nn.Linear(WIDTH, 2)
    ).double()


def parallelized(kind: str) -> tuple[nn.Sequential, dict[str, Any]]:
    """Divide dense layers over two of four ranks, and experts over one or all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    sizes = (1, 4) if kind == "over_four" else (4, 1)
    experts = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
    model = build()
    for layer in model[1:3]:
        layer.mesh, layer.experts_are_whole = mesh, kind != "over_four"
        parallelize_module(layer.dense, mesh["tp"], SPLIT)
        if kind != "plain":
            parallelize_module(layer.experts[0], experts["tp"], SPLIT)
    place = {"dp_shard_dim": "dp_shard", "tp_dim": "tp", "expt_device_mesh": experts}
    return model, {"device_mesh": mesh, **place}


def sharded(kind: str, level: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module, place = parallelized(kind)
    settings = {"zero_dp_strategy": level, "preserve_fp32_weights": False}
    return fully_shard(
        module, optimizer_over(module), **place, **settings, fsdp_unit_modules=[LayerWithExpert]
    )


def batch(step: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 8 + data_rank)
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def loss_on(model: nn.Module, step: int, data_rank: int) -> Tensor:
    output = model(batch(step, data_rank))
    return output.pow(2).mean() + output.mean()


def compare(model: MegatronFSDP, expected: dict[str, Tensor], what: str, grad: bool) -> None:
    for name, parameter in model.named_parameters():
        actual = full_tensor(parameter.grad if grad else parameter).detach()
        close(actual, expected[name.removeprefix("module.")], f"{what}: {name}")


def reference_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    optimizer.zero_grad()
    (sum(loss_on(model, step, rank) for rank in range(2)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return norm


def train(kind: str, level: int) -> None:
    model, optimizer = sharded(kind, level)
    reference = build()
    expected = optimizer_over(reference)
    for step in range(2):
        expected_norm = reference_step(reference, expected, step)
        optimizer.zero_grad()
        loss_on(model, step, dist.get_rank() // 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert expected_norm > 0.05
        close(norm, expected_norm, f"norm in step {step}", 1e-9)
        gradients = shown_gradients(reference)
        compare(model, gradients, f"gradient in step {step}", True)
        optimizer.step()
        compare(model, dict(reference.named_parameters()), f"weight after step {step}", False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "level"),
    [
        *((kind, 3) for kind in ("plain", "over_one", "over_four")),
        ("over_four", 1),
        ("plain", 0),
        ("over_one", 2),
    ],
)
def test_experts_of_another_size_match_the_unsharded_model(
    ranks: Ranks, kind: str, level: int
) -> None:
    ranks(4, train, kind, level)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same data everywhere, so that the number of data ranks does not matter."""
    for step in steps:
        optimizer.zero_grad()
        loss_on(model, step, 0).backward()
        optimizer.step()


def save(path: str, kind: str, level: int) -> None:
    model, optimizer = sharded(kind, level)
    take_steps(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer)


def load_and_go_on(path: str, kind: str, level: int) -> None:
    reference = build()
    expected = optimizer_over(reference)
    take_steps(reference, expected, range(2))
    model, optimizer = sharded(kind, level)
    take_steps(model, optimizer, range(5, 6))
    load_checkpoint(path, model, optimizer)
    compare(model, dict(reference.named_parameters()), "loaded", False)
    take_steps(reference, expected, range(2, 4))
    take_steps(model, optimizer, range(2, 4))
    compare(model, dict(reference.named_parameters()), "two steps after loading", False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(("over_four", 3), ("plain", 3)), (("over_one", 1), ("over_four", 3))],
    ids=["four_to_plain", "one_to_four"],
)
def test_a_checkpoint_loads_with_experts_of_another_size(
    ranks: Ranks, tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    ranks(4, save, str(tmp_path), *saved)
    ranks(4, load_and_go_on, str(tmp_path), *loaded)


@on_ranks(4)
def test_experts_over_an_axis_that_their_mesh_lacks_are_refused() -> None:
    """Give meshes for experts that do not have the axis over which they are divided."""
    model, place = parallelized("over_four")
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    message = message_of(
        ValueError, fully_shard_model, model, **{**place, "expt_device_mesh": whole}
    )
    assert "experts.0.up.weight is a DTensor over ('tp',)" in message
    assert "pass that axis of expt_device_mesh as tp_dim" in message
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    message = message_of(
        ValueError, fully_shard_model, model, **{**place, "expt_device_mesh": other}
    )
    assert "over another mesh than tp_dim='tp' of expt_device_mesh" in message
    # As many ranks as the tensor-parallel axis has, but other ones: those of the data axis.
    model, place = parallelized("plain")
    parallelize_module(model[0], place["device_mesh"]["dp_shard"], ColwiseParallel())
    message = message_of(ValueError, fully_shard_model, model, **place)
    assert "0.weight is a DTensor over another mesh than tp_dim='tp'" in message

# SPDX-License-Identifier: Apache-2.0
"""A simulated step has the collectives, the flat storage and the memory of the step of a run."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.fsdp import trace
from megatron.fsdp.backends.host_memory import HostMemory
from megatron.fsdp.trace.recorder import STORAGE, TraceEntry
from megatron.planning.host_copies import follow_copies
from megatron.planning.machine import MACHINES
from megatron.planning.simulation import attach, simulating
from megatron.planning.skeleton import make_skeleton
from megatron.pretrain.dry_run import pretended_ranks
from megatron.pretrain.memory_estimate import host_bytes
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.support.fsdp.live_bytes import LiveBytes
from tests.support.fsdp.offloaded import sums_as_on_a_gpu
from tests.support.rank_pool import run_apart, run_ranks

WIDTH = 64
Entry = tuple[Any, ...]


class PlannedLayer(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class PlannedModel(nn.Module):
    """Layers between an embedding and a head, which may be tied and are large or small."""

    def __init__(self, vocabulary: int = 999, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(vocabulary, WIDTH, bias=False)
        self.layers = nn.ModuleList(PlannedLayer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH if is_tied else vocabulary, bias=False)
        if is_tied:
            self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mesh_of(device: str, outer: int) -> DeviceMesh:
    sizes = (outer, dist.get_world_size() // outer)
    return init_device_mesh(device, sizes, mesh_dim_names=("outer", "inner"))


def sharded(
    device: str, dtype: torch.dtype, model: dict[str, Any], outer: int, settings: dict[str, Any]
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    with torch.device(device):
        module = PlannedModel(**model).to(dtype)
    return fully_shard(
        module,
        torch.optim.AdamW(module.parameters()),
        mesh_of(device, outer),
        "inner",
        "outer" if outer > 1 else None,
        fsdp_unit_modules=[PlannedLayer],
        **settings,
    )


def train_step(
    model: MegatronFSDP, optimizer: Any, microbatches: int, x: Tensor, before_update: Callable
) -> None:
    for number in range(microbatches):
        with nullcontext() if number == microbatches - 1 else model.no_sync():
            model(x).sum().backward()
    before_update()
    optimizer.step()
    optimizer.zero_grad()


def described(entries: list[TraceEntry]) -> list[Entry]:
    """Return what a run and its simulation have in common: everything but times and numbers."""
    return [
        (each.name, each.unit, each.phase, each.microbatch, each.ranks, each.num_bytes, each.dtype)
        for each in entries
        if each.is_collective or each.track == STORAGE
    ]


def run_step(
    microbatches: int,
    model: dict[str, Any],
    outer: int,
    settings: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Entry], int]:
    """Return the entries of the third step of a run, and the most bytes before its update."""
    with sums_as_on_a_gpu(), LiveBytes() as tracker:
        sharded_model, optimizer = sharded("cpu", dtype, model, outer, settings)
        x = torch.randn(2, sharded_model.module.embed.in_features, dtype=dtype)
        for _ in range(2):
            train_step(sharded_model, optimizer, microbatches, x, lambda: None)
        tracker.peak = 0
        peaks: list[int] = []
        with trace.record() as recorder:
            train_step(
                sharded_model, optimizer, microbatches, x, lambda: peaks.append(tracker.peak)
            )
    return described([*recorder.entries]), peaks[0]


def simulate_step(
    world_size: int,
    microbatches: int,
    model: dict[str, Any],
    outer: int,
    settings: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Entry], int]:
    """Return the same of a simulation; in a process without a process group."""
    with pretended_ranks(world_size), simulating() as simulator:
        sharded_model, optimizer = sharded("meta", dtype, model, outer, settings)
        attach(simulator, sharded_model)
        follow_copies(simulator, sharded_model, MACHINES["h100"])
        units = [unit.module for unit in sharded_model._units if unit.module is not None]
        make_skeleton(sharded_model.module, units, simulator)
        for group in sharded_model.groups:  # a run on a CPU has what is offloaded there too
            if group.memory.is_offloaded:
                own = host_bytes(group.layout.shard_size, group.precision, True, 0)
                simulator.change_memory(own)
        for state in optimizer.state.values():
            moments = [state[name].to_local() for name in ("exp_avg", "exp_avg_sq")]
            simulator.change_memory(sum(each.numel() * each.element_size() for each in moments))
        x = torch.empty(1, device="meta")
        peaks: list[int] = []
        for _ in range(3):
            simulator.begin_simulated_step()
            train_step(
                sharded_model,
                optimizer,
                microbatches,
                x,
                lambda: peaks.append(simulator.step.peak_bytes),
            )
        return described(simulator.end_simulated_step().entries), peaks[-1]


CASES: dict[str, tuple[int, int, dict[str, Any], int, dict[str, Any]]] = {
    "level2": (2, 1, {}, 1, {"zero_dp_strategy": 2}),
    **{f"level{level}_3": (2, 3, {}, 1, {"zero_dp_strategy": level}) for level in range(4)},
    "one_rank": (1, 2, {}, 1, {}),
    "hybrid": (4, 2, {}, 2, {}),
    "hybrid_level1": (4, 2, {}, 2, {"zero_dp_strategy": 1}),
    "tied": (2, 2, {"is_tied": True}, 1, {}),
    "small_head": (2, 1, {"vocabulary": 7}, 1, {}),
    "one_unit": (2, 2, {}, 1, {"disable_bucketing": True}),
    "no_overlap": (2, 2, {}, 1, {"overlap_param_gather": False, "overlap_grad_reduce": False}),
    "window": (2, 1, {}, 1, {"suggested_communication_unit_size": 10**6}),
    "nan_check": (2, 1, {}, 1, {"report_nan_in_param_grad": True}),
    "each_synchronised": (2, 2, {}, 1, {"sync_model_each_microbatch": True}),
}


@pytest.mark.always("level3_3")
@pytest.mark.parametrize("case", CASES)
def test_the_simulated_collectives_and_flat_buffers_are_those_of_a_run(case: str) -> None:
    world_size, *arguments = CASES[case]
    runs = run_ranks(world_size, run_step, *arguments)
    simulated, _ = run_apart(simulate_step, world_size, *arguments)
    assert len(simulated) > 10
    assert simulated == runs[0][0]


@pytest.mark.exhaustive
def test_the_shards_of_an_outer_axis_are_gathered_and_reduced_as_in_a_run() -> None:
    """On a CPU the second of two collectives begins when the first is waited for, not after it."""
    arguments = (2, {}, 2, {"outer_dp_sharding_strategy": 1})
    runs = run_ranks(4, run_step, *arguments)
    simulated, _ = run_apart(simulate_step, 4, *arguments)
    assert sorted(simulated, key=str) == sorted(runs[0][0], key=str)


PEAKS: dict[str, tuple[str | None, int, torch.dtype]] = {
    # Every pair of place, level and dtype once.
    "device-0-fp32": (None, 0, torch.float32),
    "device-1-bf16": (None, 1, torch.bfloat16),
    "device-2-fp32": (None, 2, torch.float32),
    "device-3-bf16": (None, 3, torch.bfloat16),
    "host-0-bf16": ("host", 0, torch.bfloat16),
    "host-1-fp32": ("host", 1, torch.float32),
    "host-2-bf16": ("host", 2, torch.bfloat16),
    "host-3-fp32": ("host", 3, torch.float32),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("place", "level", "dtype"), PEAKS.values(), ids=PEAKS)
def test_the_simulated_peak_is_that_of_a_run(
    place: str | None, level: int, dtype: torch.dtype
) -> None:
    precision = MixedPrecisionPolicy(torch.float32, torch.float32, None)
    settings = {
        "zero_dp_strategy": level,
        "mixed_precision_policy": precision,
        "offload_policy": place,
    }
    arguments = (2, {}, 1, settings, dtype)
    runs = run_ranks(2, run_step, *arguments)
    _, simulated = run_apart(simulate_step, 2, *arguments)
    assert simulated == pytest.approx(runs[0][1], rel=0.02)


OFFLOADED: dict[str, Any] = {
    "offload_policy": "host",
    "mixed_precision_policy": MixedPrecisionPolicy(torch.float32, torch.float32, None),
}


def run_copies(microbatches: int, settings: dict[str, Any]) -> list[int]:
    """Return the bytes of each copy from and to the host before the second update of a run."""
    copies: list[int] = []

    use, add = HostMemory.use, HostMemory.add

    def counted_use(memory: HostMemory, shard: Tensor, function: Any) -> Any:
        copies.append(shard.nbytes)
        return use(memory, shard, function)

    def counted_add(memory: HostMemory, total: Tensor, addend: Tensor, is_first: bool) -> None:
        copies.extend([total.nbytes] if is_first else [total.nbytes, total.nbytes])
        add(memory, total, addend, is_first)

    model, optimizer = sharded("cpu", torch.bfloat16, {}, 1, settings)
    x = torch.randn(2, model.module.embed.in_features, dtype=torch.bfloat16)
    train_step(model, optimizer, microbatches, x, lambda: None)
    before: list[int] = []
    with patch.object(HostMemory, "use", counted_use), patch.object(HostMemory, "add", counted_add):
        train_step(model, optimizer, microbatches, x, lambda: before.extend(copies))
    return before


def simulated_copies(
    world_size: int, microbatches: int, settings: dict[str, Any]
) -> tuple[list[int], float, float]:
    """Return the same of a simulation, and the seconds that they are planned and found to take."""
    machine = MACHINES["h100"]
    with pretended_ranks(world_size), simulating() as simulator:
        model, optimizer = sharded("meta", torch.bfloat16, {}, 1, settings)
        attach(simulator, model)
        follow_copies(simulator, model, machine)
        units = [unit.module for unit in model._units if unit.module is not None]
        make_skeleton(model.module, units, simulator)
        copies: list[int] = []
        waited = 0.0

        def note() -> None:
            nonlocal waited
            copies[:] = [each.num_bytes for each in simulator.step.copies]
            waited = simulator.elapsed  # nothing else takes time here

        for _ in range(2):
            simulator.begin_simulated_step()
            train_step(model, optimizer, microbatches, torch.empty(1, device="meta"), note)
    return copies, machine.copy_seconds(sum(copies)), waited


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", range(4), ids=lambda level: f"level{level}")
def test_the_simulated_copies_are_those_of_a_run(level: int) -> None:
    settings = OFFLOADED | {"zero_dp_strategy": level}
    for microbatches in (1, 3):
        runs = run_ranks(2, run_copies, microbatches, settings)
        copies, planned, waited = run_apart(simulated_copies, 2, microbatches, settings)
        assert len(copies) >= 5 and copies == runs[0]
        # Copies to the device and to the host overlap: both of them, or one after the other.
        assert planned / 2 <= waited <= planned * 1.001

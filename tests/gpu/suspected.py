# SPDX-License-Identifier: Apache-2.0
"""The measurements that settle suspected faults of the CUDA code, which no CPU can see.

    torchrun --nproc_per_node 8 -m tests.gpu.suspected 7

runs one, by its number in the table of `tests/gpu/steps.py`, and prints its figure. It ends with an
error where the fault is there. What this machine cannot tell is "not measured", with the reason.
Without CUDA the same programs run on ranks over gloo, as far as these can.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import profile

from megatron.fsdp.backends.host_memory import HostMemory
from megatron.fsdp.weight_average import WeightAverage
from megatron.mcore_adapter.checkpoints.staging import StagingBuffer
from megatron_fsdp import clip_grad_norm_, fully_shard
from tests.gpu.profiled_step import Span, duration, overlap
from tests.gpu.steps import NOT_MEASURED
from tests.support.cuda_model.machine import cuda_model

HAS_CUDA = torch.cuda.is_available()
DEVICE_TYPE = "cuda" if HAS_CUDA else "cpu"
# A layer of 4100 columns has a little more than 64 MiB, which powers of two round up to 128.
WIDTH = 4100 if HAS_CUDA else 20
ROWS = 8192 if HAS_CUDA else 8
NUM_LAYERS = 6
SLOTS = {"nccl_ub": True} if HAS_CUDA else {"fsdp_double_buffer": True}
NEEDS_GPU = "needs a GPU"
ALONE = "needs two GPUs"


class Measurement(NamedTuple):
    """The result of a measurement on one rank."""

    is_right: bool | None  # None: this machine cannot tell
    figure: str
    reason: str = ""  # why it cannot


def unmeasured(reason: str, figure: str = "none") -> Measurement:
    """Return the result of a measurement that this machine cannot make."""
    return Measurement(None, figure, reason)


# ---- what is trained


def sharded(**settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model of layers, each a unit, and its optimizer."""
    torch.manual_seed(0)
    with torch.device(current_device()):
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    optimizer = settings.pop("optimizer", torch.optim.SGD)(module.parameters(), lr=1e-3)
    return fully_shard(module, optimizer, fsdp_unit_modules=[nn.Linear], **settings)


def current_device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else torch.device("cpu")


def backward(model: nn.Module) -> None:
    """Run forward and backward of a batch."""
    batch = torch.ones(ROWS, WIDTH, device=current_device())
    model(batch).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    """Run whole steps."""
    for _ in range(num_steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def kernels_and_copies(program: Callable[[], None]) -> list[dict[str, Any]]:
    """Run a program under torch's profiler; return what it has seen."""
    with profile() as profiler:
        program()
        if HAS_CUDA:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


@contextmanager
def waits_of_the_host() -> Iterator[list[str]]:
    """Collect the lines inside the context in which the host waits for the GPU."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if HAS_CUDA:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            if HAS_CUDA:
                torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            lines.append(f"{Path(each.filename).name}:{each.lineno}")


# ---- the measurements, by number


def share_of_copies(events: list[dict[str, Any]]) -> float | None:
    """Return the share of copies to and from the host that compute covers, or of compute by copies.

    Of the two whichever takes less time, which is what can be hidden. None: there are no copies.
    """
    copies: list[Span] = []
    compute: list[Span] = []
    for event in events:
        name, category = str(event.get("name")), event.get("cat")
        if category == "gpu_memcpy" and re.search("HtoD|DtoH", name):
            copies.append((event["ts"], event["ts"] + event["dur"]))
        elif category == "kernel" and "nccl" not in name.lower():
            compute.append((event["ts"], event["ts"] + event["dur"]))
    shorter = min(duration(copies), duration(compute))
    return overlap(copies, compute) / shorter if shorter else None


def offload_copies_overlap_compute() -> Measurement:
    """Train with weights in host memory; find copies in the timeline, and waits of the host."""
    model, optimizer = sharded(offload_policy="host")
    train(model, optimizer)
    share = share_of_copies(kernels_and_copies(lambda: backward(model)))
    with model.no_sync():
        backward(model)
        with waits_of_the_host() as waits:
            backward(model)
    optimizer.step()
    if share is None:
        return unmeasured("no copies between host and GPU in the trace")
    text = f"{share:.0%} of what can overlap does; the host waits {len(waits)} times a microbatch"
    return Measurement(share > 0.25 and not waits, told(text, waits))


def user_buffers_on_a_full_gpu() -> Measurement:
    """Register slots while all memory that is not in use is in the allocator's cache."""
    train(*sharded(), num_steps=1)  # NCCL takes what it needs
    model, optimizer = sharded(**SLOTS)
    backward(model)
    num_bytes = fill_the_cache() if HAS_CUDA else 0
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    slots = sum(map(sum, model.memory_slots.values()))
    if not slots:
        return unmeasured(ALONE)
    text = f"slots of {slots:,} bytes beside {num_bytes:,} in the allocator's cache"
    return Measurement(True, text)


def fill_the_cache() -> int:
    """Leave the free memory of the GPU in the allocator's cache; return its bytes."""
    blocks = []
    size = 1 << 30
    while size >= 1 << 22:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    blocks.clear()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def priorities_of_streams() -> Measurement:
    """Train over a group of high priority; its kernels must go before those of compute."""
    ranks = list(range(dist.get_world_size()))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if HAS_CUDA else None
    group = dist.new_group(ranks, pg_options=options)
    mesh = DeviceMesh.from_group(group, DEVICE_TYPE, mesh_dim_names=("dp",))
    model, optimizer = sharded(device_mesh=mesh, dp_shard_dim="dp")
    train(model, optimizer)
    events = kernels_and_copies(lambda: train(model, optimizer, num_steps=1))
    return of_priorities(events)


def of_priorities(events: list[dict[str, Any]]) -> Measurement:
    """Compare the priorities of NCCL's kernels and of others in a trace; less goes first."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for event in events:
        if event.get("cat") == "kernel" and "priority" in event["args"]:
            is_nccl = "nccl" in event["name"].lower()
            found[is_nccl].add(event["args"]["priority"])
    if not all(found.values()):
        return unmeasured("no kernels of NCCL and of compute with priorities in the trace")
    text = f"priorities of NCCL's kernels {sorted(found[True])}, of others {sorted(found[False])}"
    return Measurement(max(found[True]) < min(found[False]), text)


def pinned_host_memory() -> Measurement:
    """Compare the host memory that offload takes with the bytes that are asked for."""
    train(*sharded(), num_steps=1)
    asked = 0
    empty = HostMemory.empty

    def counted(memory: HostMemory, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal asked
        asked += numel * dtype.itemsize
        return empty(memory, numel, dtype)

    pinned, resident = pinned_bytes(), resident_bytes()
    with patch.object(HostMemory, "empty", counted):
        model, optimizer = sharded(offload_policy="host", optimizer=torch.optim.AdamW)
        train(model, optimizer)
    # Memory that torch's allocator pins is not resident for the kernel, and other memory is.
    taken = max(pinned_bytes() - pinned, resident_bytes() - resident)
    text = f"{taken:,} bytes of host memory for {asked:,} that are asked for"
    return Measurement(taken <= 1.2 * asked, text)


def pinned_bytes() -> int:
    """Return the bytes that torch's allocator has pinned."""
    if not HAS_CUDA:
        return 0
    number: int = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return number


def resident_bytes() -> int:
    """Return the memory of this process that the kernel counts."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def contexts_on_gpu_0() -> Measurement:
    """Save in the background, which copies in a thread; no other rank may have a context there."""
    buffer = StagingBuffer()
    tensor = torch.ones(1 << 20, device=current_device())
    buffer.stage({"weight": tensor}, is_changing=lambda tensor: False)
    buffer.finish()
    buffer.close()
    index = current_device().index or 0
    has_context = HAS_CUDA and index != 0 and torch._C._cuda_hasPrimaryContext(0)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (index, has_context))
    if not any(each for each, _ in found):
        return unmeasured(ALONE)
    others = [rank for rank, (_, is_there) in enumerate(found) if is_there]
    return Measurement(
        not others, f"ranks of other GPUs with a context on GPU 0: {others or 'none'}"
    )


def clipping_without_waits() -> Measurement:
    """Clip gradients by both functions; the host must not wait for the GPU."""
    model, optimizer = sharded()
    lines: list[str] = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        for _ in range(2):
            backward(model)
            with waits_of_the_host() as waits:
                clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        lines += waits  # of the second step: the first one may prepare
    return Measurement(not lines, told(f"the host waits {len(lines)} times in clipping", lines))


def groups_of_objects_alone() -> Measurement:
    """Use groups that have sent nothing but objects, which use gloo: by Muon, and for slots."""
    num_ranks = dist.get_world_size()
    if num_ranks % 2:
        return unmeasured("needs an even number of GPUs")
    names = ("outer", "inner")
    mesh = init_device_mesh(DEVICE_TYPE, (2, num_ranks // 2), mesh_dim_names=names)
    settings = {"device_mesh": mesh, "dp_outer_dim": "outer", "dp_shard_dim": "inner"}
    train(*sharded(optimizer=torch.optim.Muon, **settings))
    # At level 2 no weights are gathered before the end of the first step, which registers slots.
    mesh = init_device_mesh(DEVICE_TYPE, (num_ranks,), mesh_dim_names=("dp",))
    settings = {"device_mesh": mesh, "fsdp_group_ag": dist.new_group(list(range(num_ranks)))}
    model, optimizer = sharded(zero_dp_strategy=2, **settings, **SLOTS)
    train(model, optimizer)
    slots = sum(map(sum, model.memory_slots.values()))
    text = f"Muon has stepped over 2 x {num_ranks // 2} ranks, slots of {slots:,} bytes are in use"
    return Measurement(True, text)


def groups_of_some_stages() -> Measurement:
    """Step Muon with tensor parallelism on the first of two stages, which alone makes groups."""
    num_ranks = dist.get_world_size()
    if HAS_CUDA and num_ranks % 4:
        return unmeasured("needs four GPUs")
    num_slices = 2 if num_ranks % 4 == 0 else 1
    sizes = (2, num_slices, num_ranks // 2 // num_slices)
    mesh = init_device_mesh(DEVICE_TYPE, sizes, mesh_dim_names=("stage", "tensor", "data"))
    if mesh.get_local_rank("stage") == 0:
        axes = {"device_mesh": mesh["tensor", "data"], "tp_dim": "tensor", "dp_shard_dim": "data"}
        train(*sharded(optimizer=torch.optim.Muon, **axes))
    dist.barrier()
    return Measurement(True, "the first of two stages alone has made groups")


def weights_in_use_while_gathered() -> Measurement:
    """Load and average main weights while all-gathers run: for torch's sanitizer, or the model."""
    if dist.get_world_size() == 1:
        return unmeasured(ALONE)
    if HAS_CUDA:
        use_weights_while_gathered()
        if os.environ.get("TORCH_CUDA_SANITIZER") != "1":
            return unmeasured("needs TORCH_CUDA_SANITIZER=1")
        return Measurement(True, "torch's sanitizer reports no load or average beside a gather")
    with cuda_model() as model:
        use_weights_while_gathered()
    return unmeasured(NEEDS_GPU, f"{len(model.reports)} reports of the model of a GPU")


def use_weights_while_gathered() -> None:
    """Load a state dict, and exchange weights with their average, right after gathers begin."""
    model, optimizer = sharded()
    average = WeightAverage(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        train(model, optimizer, num_steps=1)
        model.start_param_sync()
        average.update()
        model.start_param_sync()
        model.load_state_dict(state)
        model.start_param_sync()
        with average.applied(), torch.no_grad():
            model(torch.ones(ROWS, WIDTH, device=current_device()))


def told(text: str, lines: list[str]) -> str:
    """Return a figure, with the places that it counts."""
    return f"{text} ({', '.join(dict.fromkeys(lines))})" if lines else text


MEASUREMENTS: dict[int, Callable[[], Measurement]] = {
    1: offload_copies_overlap_compute,
    3: user_buffers_on_a_full_gpu,
    4: priorities_of_streams,
    5: pinned_host_memory,
    6: contexts_on_gpu_0,
    7: clipping_without_waits,
    8: groups_of_objects_alone,
    9: groups_of_some_stages,
    10: weights_in_use_while_gathered,
}
"""By number; 2 is a run of `pretrain_gpt.py`, a step of its own."""
BINDS_DEVICE = (9,)
"""Those for which process groups are bound to a device."""


def measured(number: int) -> Measurement:
    """Make a measurement on all ranks; return the result of the worst one."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(MEASUREMENTS[number]()))
    order = (False, None, True)
    worst = min((Measurement(*each) for each in found), key=lambda each: order.index(each.is_right))
    return worst if HAS_CUDA else unmeasured(NEEDS_GPU, f"{worst.figure}, on CPU ranks")


@click.command()
@click.argument("number", type=click.Choice(list(map(str, MEASUREMENTS))))
def main(number: str) -> None:
    """Make a measurement by its number; the exit code is 1 if the fault is there."""
    fault = int(number)
    if HAS_CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if HAS_CUDA else "gloo",
        timeout=timedelta(minutes=2),
        device_id=current_device() if HAS_CUDA and fault in BINDS_DEVICE else None,
    )
    finding = measured(fault)
    if dist.get_rank() == 0:
        print(f"figure: {finding.figure}")
        if finding.is_right is None:
            print(f"{NOT_MEASURED}{finding.reason}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(finding.is_right is False)


if __name__ == "__main__":
    main()

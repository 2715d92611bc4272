# SPDX-License-Identifier: Apache-2.0
"""Measures of one training step: time, memory, page faults, copies and collectives."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES_OF_RESULT = ("cat", "stack", "clone", "_to_copy")
COPIES_OF_OPERAND = ("copy_", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "chunk_cat")
"""Operations that copy, in any namespace, and whether their result or first operand is counted."""


class StepCounter(TorchDispatchMode):
    """Counts the bytes that a step copies, and its collectives with the bytes that a rank sends.

    A copy counts the bytes that it writes. The bytes of a collective on n ranks are those of the
    ring algorithms: (n - 1) / n of the whole tensor for an all-gather or a reduce-scatter, twice
    that for an all-reduce. gloo runs a reduce-scatter as an all-reduce, and it counts as one there.
    Where a collective consists of messages, its n - 1 sends count as one collective together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes = 0
        self.wire_bytes = 0.0
        self.collectives = 0
        self._num_sends = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self._count_collective(name.strip("_"), args)
        elif name in COPIES_OF_OPERAND:
            self.copied_bytes += num_bytes(args[0])
        elif name in COPIES_OF_RESULT:
            self.copied_bytes += num_bytes(result)
        elif name == "all_gather_copy_in":  # FSDP2's: the shards, to their place in the output
            self.copied_bytes += num_bytes(args[0])
        return result

    def _count_collective(self, name: str, args: tuple[Any, ...]) -> None:
        num_ranks = dist.get_world_size()
        share = (num_ranks - 1) / num_ranks
        if name == "send":
            self.wire_bytes += num_bytes(args[0])
            self._num_sends += 1
            if self._num_sends % (num_ranks - 1):
                return
        elif name.startswith(("allgather", "all_gather")):
            self.wire_bytes += share * num_bytes(args[0])
        elif name.startswith(("allreduce", "all_reduce")):
            self.wire_bytes += 2 * share * num_bytes(args[0])
        elif name.startswith(("reduce_scatter", "reduce_scatter_base")):
            factor = 2 if dist.get_backend() == "gloo" else 1
            self.wire_bytes += factor * share * num_bytes(args[1])
        if not name.startswith(("wait_tensor", "recv", "barrier")):
            self.collectives += 1


def num_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a nest."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def count_step(step: Callable[[], object]) -> dict[str, float]:
    """Return the counts of one step."""
    with StepCounter() as counter:
        step()
    return {
        "copied MB": counter.copied_bytes / 1e6,
        "collectives": counter.collectives,
        "wire MB": counter.wire_bytes / 1e6,
    }


def time_steps(step: Callable[[], object], count: int) -> dict[str, float]:
    """Return the milliseconds and the page faults per step, over ``count`` steps."""
    dist.barrier()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    begin = time.perf_counter()
    for _ in range(count):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {
        "ms": (time.perf_counter() - begin) * 1000 / count,
        "page faults": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / count,
    }


class HeapInfo(ctypes.Structure):
    """The ``struct mallinfo2`` of glibc (see its manual, "Statistics for Memory Allocation")."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        ("bytes_mapped", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks")),
        ("bytes_in_heap", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("fordblks", "keepcost")),
    )


_LIBC = ctypes.CDLL(None)


def heap_bytes() -> int:
    """Return the bytes that this process has allocated and not freed, by glibc's own count.

    torch's profiler misses what other threads free, such as operands of collectives.
    """
    _LIBC.mallinfo2.restype = HeapInfo
    info = _LIBC.mallinfo2()
    return int(info.bytes_mapped + info.bytes_in_heap)


class HeapPeak(TorchDispatchMode):
    """Samples the allocated bytes after every operation of torch, and keeps the most."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_bytes = max(self.num_bytes, heap_bytes())
        return result


def peak_memory(build: Callable[[], Callable[[], object]]) -> dict[str, float]:
    """Return the peak MB of live tensors, and of resident memory, from construction on.

    Args:
        build: builds a model with its wrapper and optimizer and returns its step, of which three
            are run.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _run(build)
        live = torch.cuda.max_memory_allocated() - before
        return {"live MB": live / 1e6, "resident MB": torch.cuda.max_memory_reserved() / 1e6}
    # What the allocator keeps of earlier measurements would count as nobody's.
    _LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
    resident, before = _status("VmRSS"), heap_bytes()
    with HeapPeak() as peak:
        _run(build)
    return {
        "live MB": (peak.num_bytes - before) / 1e6,
        "resident MB": (_status("VmHWM") - resident) / 1e3,
    }


def _run(build: Callable[[], Callable[[], object]]) -> None:
    step = build()
    for _ in range(3):
        step()


def _status(field: str) -> int:
    """Return a field of this process's status, in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise ValueError(f"no {field} in /proc/self/status")

# SPDX-License-Identifier: Apache-2.0
"""Machines: the FLOP/s and the memory of a GPU, and the links over which GPUs communicate.

[Note: the time of a collective] A collective of n ranks, r of them on each of k nodes, is limited
by the links inside a node, over which a rank receives (n - 1) / n of the whole tensor, or by those
between nodes, over which r ranks together receive (k - 1) / k of it. The slower one counts, and
log2(n) latencies of its link are added. An all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, log2
from pathlib import Path
from typing import Any

from megatron.pretrain.report.speed import PEAK_TFLOPS


@dataclass(frozen=True)
class Link:
    """A link of one GPU, in one direction.

    Args:
        bytes_per_second: of the data sheet.
        latency: seconds of one message.
    """

    bytes_per_second: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes.

    Args:
        name: for messages.
        flops: FLOP/s of a GPU's data sheet, dense, in bf16.
        memory_bytes: of a GPU.
        memory_bytes_per_second: between a GPU and its memory.
        gpus_per_node: GPUs that the links inside a node connect.
        inside: link of a GPU inside its node.
        between: link of a GPU to other nodes.
        compute_efficiency: part of ``flops`` that the layers of a model reach.
        link_efficiency: part of the bandwidth of links that collectives reach.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bytes_per_second: float
    gpus_per_node: int
    inside: Link
    between: Link
    compute_efficiency: float = 0.55
    link_efficiency: float = 0.8

    def collective_seconds(self, name: str, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective; see [Note: the time of a collective].

        Args:
            name: of the operation, such as ``all_gather``.
            num_bytes: of the whole tensor.
            ranks: that take part.
        """
        num_ranks = len(ranks)
        if num_ranks < 2:
            return 0.0
        nodes = {rank // self.gpus_per_node for rank in ranks}
        per_node = num_ranks / len(nodes)
        inside = num_bytes * (num_ranks - 1) / num_ranks / self.inside.bytes_per_second
        between = num_bytes * (len(nodes) - 1) / len(nodes)
        between /= per_node * self.between.bytes_per_second
        link = self.between if len(nodes) > 1 else self.inside
        inside = inside if per_node > 1 else 0.0
        seconds = max(inside, between) / self.link_efficiency + ceil(log2(num_ranks)) * link.latency
        return 2 * seconds if name == "all_reduce" else seconds

    def exchange_seconds(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of an all-to-all; ``num_bytes`` are what a rank has for all ranks."""
        num_ranks = len(ranks)
        if num_ranks < 2:
            return 0.0
        nodes = {rank // self.gpus_per_node for rank in ranks}
        here = num_ranks / len(nodes)
        inside = num_bytes * (here - 1) / num_ranks / self.inside.bytes_per_second
        between = num_bytes * (num_ranks - here) / num_ranks / self.between.bytes_per_second
        link = self.between if len(nodes) > 1 else self.inside
        return max(inside, between) / self.link_efficiency + link.latency

    def message_seconds(self, num_bytes: float, distance: int) -> float:
        """Return the seconds of a message to the rank whose number differs by ``distance``."""
        link = self.inside if distance < self.gpus_per_node else self.between
        return num_bytes / (link.bytes_per_second * self.link_efficiency) + link.latency


def _node_of_8(gpu: str, gigabytes: int, memory: float, nvlink: float) -> Cluster:
    """Return a node of 8 GPUs with one 400 Gb/s adapter each.

    Args:
        gpu: its name in the list of peaks.
        gigabytes: of its memory.
        memory: TB/s of its memory.
        nvlink: GB/s of its NVLink, in one direction: half of what the data sheet calls bandwidth.
    """
    return Cluster(
        name=gpu.lower(),
        flops=PEAK_TFLOPS[gpu] * 1e12,
        memory_bytes=gigabytes * 10**9,
        memory_bytes_per_second=memory * 1e12,
        gpus_per_node=8,
        inside=Link(nvlink * 1e9, 3e-6),
        between=Link(50e9, 10e-6),
    )


MACHINES = {
    # NVIDIA H100 Tensor Core GPU, data sheet (SXM): 80 GB, 3.35 TB/s, NVLink 900 GB/s.
    "h100": _node_of_8("H100", 80, 3.35, 450),
    # NVIDIA H200 Tensor Core GPU, data sheet (SXM): 141 GB, 4.8 TB/s, NVLink 900 GB/s.
    "h200": _node_of_8("H200", 141, 4.8, 450),
    # NVIDIA DGX B200, data sheet, of 8 GPUs: 1,440 GB, 64 TB/s, NVLink 14.4 TB/s.
    "b200": _node_of_8("B200", 180, 8.0, 900),
}
"""Nodes of 8 GPUs. The adapters are those of DGX H100, H200 and B200: 8 ConnectX-7 of 400 Gb/s, so
50 GB/s for each GPU and direction. Latencies and efficiencies are assumptions, not data sheets'."""


def find_machine(name: str) -> Cluster:
    """Return a machine that is listed here, or described by a JSON file.

    Args:
        name: of the list, or the path of a file with the fields of :class:`Cluster`.

    Raises:
        ValueError: lists everything that is wrong with the file.
    """
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    try:
        values = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--machine {name} is none of {', '.join(MACHINES)}, and no file of JSON: {error}"
        ) from None
    problems = _problems_of(values)
    if problems:
        example = json.dumps(asdict(MACHINES["h100"]))
        raise ValueError(f"--machine {name}: {'; '.join(problems)}. An example: {example}")
    links = {field: Link(**values[field]) for field in ("inside", "between")}
    return Cluster(**{**values, **links})


def _problems_of(values: Any) -> list[str]:
    """Return the problems of the content of a machine's file."""
    if not isinstance(values, dict):
        return ["the file must hold one object"]
    wanted = {field.name for field in fields(Cluster)}
    optional = {"compute_efficiency", "link_efficiency"}
    problems = [f"unknown field {name}" for name in sorted(set(values) - wanted)]
    problems += [f"no field {name}" for name in sorted(wanted - optional - set(values))]
    for name in sorted(wanted & set(values)):
        if name in ("inside", "between"):
            link = values[name]
            names = {field.name for field in fields(Link)}
            if not isinstance(link, dict) or set(link) != names:
                problems.append(f"{name} expects an object with {' and '.join(sorted(names))}")
                continue
            problems += [
                f"{name}.{key}: {_number_problem(link[key])}"
                for key in sorted(names)
                if _number_problem(link[key])
            ]
        elif name != "name" and _number_problem(values[name]):
            problems.append(f"{name}: {_number_problem(values[name])}")
    return problems


def _number_problem(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if is_number and value > 0 else f"expects a number above 0 but got {value!r}"

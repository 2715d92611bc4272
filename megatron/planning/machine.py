# SPDX-License-Identifier: Apache-2.0
"""Machines: FLOP/s and memory of a GPU and of its host, and the links over which they communicate.

[Note: the time of a collective] A collective of n ranks, r of them on each of k nodes, is limited
by the links inside a node, over which a rank receives (n - 1) / n of the whole tensor, or by those
between nodes, over which r ranks together receive (k - 1) / k of it. The slower one counts, and
log2(n) latencies of its link are added. An all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import ceil, inf, log2
from pathlib import Path
from typing import Any

from megatron.pretrain.report.speed import PEAK_TFLOPS

HOST_USABLE = 0.9
"""Part of a host's memory that a plan may use; an estimate."""


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
class Host:
    """The processors of a node, with their memory.

    Args:
        cores: of a node.
        memory_bytes: of a node.
        memory_bytes_per_second: between all processors of a node and their memory.
        link_bytes_per_second: between that memory and one GPU, in one direction.
        disk_bytes_per_second: of all local disks of a node; None: unknown.
        memory_efficiency: part of the memory's bandwidth that an optimizer reaches on all cores;
            0.6 is an estimate.
    """

    cores: int
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    disk_bytes_per_second: float | None = None
    memory_efficiency: float = 0.6


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
        compute_efficiency: part of ``flops`` that the best matrix products reach.
        link_efficiency: part of the bandwidth of links that collectives and copies reach.
        host: of a node; None: unknown, so nothing can be offloaded to it.
        processors: multiprocessors of a GPU.
        fp8_flops: FLOP/s of a GPU's data sheet, dense, in FP8; None: it has none.
        fp8_efficiency: part of ``fp8_flops`` that the best matrix products reach.
        power_part: limit of a GPU's power, in that of the data sheet.
        joined_gpus: GPUs that NVLink joins, where these are more than a node; None: a node.
        host_speed: of a core that launches operations, in that of DGX H100.
        generation: ``ampere``, ``hopper`` or ``blackwell``, for the speed of attention.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bytes_per_second: float
    gpus_per_node: int
    inside: Link
    between: Link
    compute_efficiency: float = 0.8
    link_efficiency: float = 0.8
    host: Host | None = None
    processors: int = 132
    fp8_flops: float | None = None
    fp8_efficiency: float = 0.7
    power_part: float = 1.0
    joined_gpus: int | None = None
    host_speed: float = 1.0
    generation: str = "hopper"

    @property
    def domain(self) -> int:
        """GPUs that the links inside of a node, or of a rack, join."""
        return max(self.joined_gpus or 0, self.gpus_per_node)

    def collective_seconds(
        self,
        name: str,
        num_bytes: float,
        ranks: Sequence[int],
    ) -> float:
        """Return the seconds of a collective; see [Note: the time of a collective].

        Args:
            name: of the operation, such as ``all_gather``.
            num_bytes: of the whole tensor.
            ranks: that take part.
        """
        num_ranks = len(ranks)
        if num_ranks < 2:
            return 0.0
        num_nodes = self._nodes_of(ranks)
        per_node = num_ranks / num_nodes
        inside = 0.0
        if per_node > 1:
            received = num_bytes * (num_ranks - 1) / num_ranks
            inside = received / self.inside.bytes_per_second
        received = num_bytes * (num_nodes - 1) / num_nodes
        between = received / (per_node * self.between.bytes_per_second)
        seconds = max(inside, between) / self.link_efficiency
        seconds += ceil(log2(num_ranks)) * self._latency(num_nodes)
        if name == "all_reduce":
            return 2 * seconds
        return seconds

    def _nodes_of(self, ranks: Sequence[int]) -> int:
        """Return the number of nodes, or racks, that ranks are on."""
        domain = self.domain
        if isinstance(ranks, range) and 0 < ranks.step <= domain:  # no node is left out
            return ranks[-1] // domain - ranks[0] // domain + 1
        return len({rank // domain for rank in ranks})

    def _latency(self, num_nodes: int) -> float:
        """Return the latency of the links that join ranks on so many nodes."""
        if num_nodes > 1:
            return self.between.latency
        return self.inside.latency

    def exchange_seconds(
        self,
        num_bytes: float,
        ranks: Sequence[int],
        copies: int = 0,
    ) -> float:
        """Return the seconds of an all-to-all.

        Args:
            num_bytes: that a rank has for all ranks.
            ranks: that take part.
            copies: of each token among these bytes, of which those for one node travel as one
                between nodes; 0: all travel.
        """
        num_ranks = len(ranks)
        if num_ranks < 2:
            return 0.0
        num_nodes = self._nodes_of(ranks)
        here = num_ranks / num_nodes
        inside = num_bytes * (here - 1) / num_ranks
        between = num_bytes * (num_ranks - here) / num_ranks
        if copies > 1:  # nodes that are different among so many, in the mean
            others = 1 - 1 / num_nodes
            between *= num_nodes * (1 - others**copies) / copies
            inside = num_bytes * (num_ranks - 1) / num_ranks
        inside /= self.inside.bytes_per_second
        between /= self.between.bytes_per_second
        seconds = max(inside, between) / self.link_efficiency
        return seconds + self._latency(num_nodes)

    def message_seconds(self, num_bytes: float, distance: int) -> float:
        """Return the seconds of a message to the rank whose number differs by ``distance``."""
        link = self.between
        if distance < self.domain:
            link = self.inside
        per_second = link.bytes_per_second * self.link_efficiency
        return num_bytes / per_second + link.latency

    def ranks_of_node(self, num_gpus: int) -> int:
        """Return the ranks that share a node in a run on so many GPUs."""
        return min(self.gpus_per_node, num_gpus)

    def host_share(self, num_gpus: int) -> float:
        """Return the bytes on a host that each of the ranks of a node may use."""
        if self.host is None:
            return inf
        usable = HOST_USABLE * self.host.memory_bytes
        return usable / self.ranks_of_node(num_gpus)

    def copy_seconds(self, num_bytes: float) -> float:
        """Return the seconds of a copy between a GPU and its host."""
        assert self.host is not None
        per_second = self.host.link_bytes_per_second * self.link_efficiency
        return num_bytes / per_second

    def host_seconds(self, num_bytes: float) -> float:
        """Return the seconds in which a host moves its memory's bytes, so many for each GPU."""
        assert self.host is not None
        per_second = self.host.memory_bytes_per_second
        per_second *= self.host.memory_efficiency
        return num_bytes * self.gpus_per_node / per_second


def _node_of_8(
    gpu: str,
    gigabytes: int,
    memory: float,
    nvlink: float,
    host_memory: float,
) -> Cluster:
    """Return a node of 8 GPUs with one 400 Gb/s adapter each.

    Args:
        gpu: its name in the list of peaks.
        gigabytes: of its memory.
        memory: TB/s of its memory.
        nvlink: GB/s of its NVLink, in one direction: half of what the data sheet calls bandwidth.
        host_memory: GB/s of the memory of a node's two processors.
    """
    return Cluster(
        name=gpu.lower(),
        flops=PEAK_TFLOPS[gpu] * 1e12,
        memory_bytes=gigabytes * 10**9,
        memory_bytes_per_second=memory * 1e12,
        gpus_per_node=8,
        inside=Link(nvlink * 1e9, 3e-6),
        between=Link(50e9, 10e-6),
        host=Host(112, 2 * 10**12, host_memory * 1e9, 64e9),
    )


_H100 = replace(
    _node_of_8("H100", 80, 3.35, 450, 614),
    fp8_flops=1979e12,
    compute_efficiency=0.763,
    fp8_efficiency=0.674,
)
_B200 = replace(
    _node_of_8("B200", 180, 8.0, 900, 717),
    fp8_flops=4500e12,
    compute_efficiency=0.635,
    fp8_efficiency=0.624,
    processors=148,
    generation="blackwell",
)
_A100 = replace(
    _node_of_8("A100", 80, 2.039, 300, 410),
    compute_efficiency=0.869,
    between=Link(25e9, 10e-6),
    host=Host(128, 2 * 10**12, 410e9, 32e9),
    processors=108,
    generation="ampere",
)
_GB200 = replace(
    _B200,
    name="gb200",
    flops=2500e12,
    fp8_flops=5000e12,
    compute_efficiency=0.60,
    fp8_efficiency=0.59,
    memory_bytes=186 * 10**9,
    gpus_per_node=4,
    joined_gpus=64,
    host_speed=0.75,
    host=Host(144, 960 * 10**9, 1024e9, 450e9),
    processors=152,
)

MACHINES = {
    # NVIDIA H100 Tensor Core GPU, data sheet (SXM): 80 GB, 3.35 TB/s, NVLink 900 GB/s.
    "h100": _H100,
    # NVIDIA H200 Tensor Core GPU, data sheet (SXM): 141 GB, 4.8 TB/s, NVLink 900 GB/s.
    "h200": replace(
        _H100,
        name="h200",
        memory_bytes=141 * 10**9,
        memory_bytes_per_second=4.8e12,
    ),
    # NVIDIA DGX B200, data sheet, of 8 GPUs: 1,440 GB, 64 TB/s, NVLink 14.4 TB/s.
    "b200": _B200,
    # NVIDIA A100 80GB Tensor Core GPU, data sheet (SXM): 80 GB, 2.04 TB/s, NVLink 600 GB/s.
    "a100": _A100,
    # NVIDIA GB200 NVL72, data sheet: 72 GPUs, 13.4 TB, 576 TB/s, NVLink 130 TB/s.
    "gb200": _GB200,
    # NVIDIA GB300 NVL72, data sheet: 72 GPUs, 20 TB, 576 TB/s; adapters of 800 Gb/s. That is 278 GB
    # of the 288 GB that each GPU's memory is named after, as 13.4 TB are 186 of 192 on GB200.
    "gb300": replace(
        _GB200,
        name="gb300",
        memory_bytes=278 * 10**9,
        between=Link(100e9, 10e-6),
    ),
    # NVIDIA DGX B300, data sheet, of 8 GPUs: 2.3 TB; FLOP/s in bf16 and FP8 are those of B200.
    "b300": replace(
        _B200,
        name="b300",
        memory_bytes=288 * 10**9,
        between=Link(100e9, 10e-6),
    ),
    # H800: an H100 with NVLink of 400 GB/s (DeepSeek-V3 Technical Report, section 3.1).
    "h800": replace(_H100, name="h800", inside=Link(200e9, 3e-6)),
    # A800: an A100 with NVLink of 400 GB/s.
    "a800": replace(_A100, name="a800", inside=Link(200e9, 3e-6)),
}
"""Nodes of 8 GPUs; GB200 and GB300 nodes of 4, of which 64 in a rack are used together. Adapters
are those of DGX H100, H200 and B200: 8 ConnectX-7 of 400 Gb/s, so 50 GB/s for each GPU and
direction (DGX A100: 200 Gb/s). So are the hosts: 2 TB, two Xeon 8480C (B200: 8570) of 56 cores with
eight channels of DDR5-4800 (DDR5-5600) each, and PCIe 5.0 with 16 lanes, 64 GB/s in one direction,
for each GPU.

``compute_efficiency`` is that of the best matrix products that such a GPU sustains, at the clock
that its power allows. Source: S. Bekman, Machine Learning Engineering, compute/accelerator, at
github.com/stas00/ml-engineering: maximum sustainable FLOPS of H200 (755 TFLOP/s, the same chip as
H100) and B200 (1,429). These are 0.95 and 0.82 of the maximum achievable FLOPS in its table. FP8
and GB200 are those of that table (FP8 on H100 0.709, on B200 0.763; GB200 0.729 and 0.723) times
these. A100 is that of the table (271 of 312). Grace's cores have about 3/4 of the others' speed in
one thread (3.1 to 3.4 GHz compared with 3.8). Latencies and ``link_efficiency`` are estimates."""


GENERATIONS = ("ampere", "hopper", "blackwell")
"""Generations of GPUs for which the speed of attention is known."""

WHOLE = ("gpus_per_node", "joined_gpus", "processors", "cores")
"""Fields that are whole numbers."""

PARTS = {"inside": Link, "between": Link, "host": Host}
"""Fields of a machine that are objects."""


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
    for part, kind in PARTS.items():
        if values.get(part):
            values[part] = kind(**values[part])
    return Cluster(**values)


def _problems_of(
    values: Any,
    kind: type = Cluster,
    place: str = "",
) -> list[str]:
    """Return the problems of an object of a machine's file, and of the objects inside of it."""
    if not isinstance(values, dict):
        return [f"{place.removesuffix('.') or 'the file'} expects an object"]
    problems: list[str] = []
    declared = {field.name: field for field in fields(kind)}
    for name in sorted(set(values) - set(declared)):
        problems.append(f"unknown field {place}{name}")
    for name, field in declared.items():
        if name not in values and field.default is MISSING:
            problems.append(f"no field {place}{name}")
    for name in sorted(set(declared) & set(values)):
        value = values[name]
        if value is None and declared[name].default is None:
            continue
        if name in PARTS:
            problems += _problems_of(value, PARTS[name], f"{name}.")
            continue
        problem = _problem_of(name, value)
        if problem:
            problems.append(f"{place}{name}: {problem}")
    return problems


def _problem_of(name: str, value: Any) -> str:
    """Return what is wrong with a value, or an empty text."""
    if name == "name":
        if not isinstance(value, str):
            return f"expects a text but got {value!r}"
        return ""
    if name == "generation":
        if value not in GENERATIONS:
            return f"expects one of {', '.join(GENERATIONS)} but got {value!r}"
        return ""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        return f"expects a number above 0 but got {value!r}"
    if name in WHOLE and not isinstance(value, int):
        return f"expects a whole number but got {value!r}"
    return ""

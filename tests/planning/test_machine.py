# SPDX-License-Identifier: Apache-2.0
"""Machines: the time of collectives, and files that describe one."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron.planning.machine import MACHINES, Cluster, Host, Link, find_machine

GB = 10**9
PLAIN = Cluster("plain", 1e15, 80 * GB, 3e12, 8, Link(400e9, 0), Link(50e9, 0), 1.0, 1.0)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        ([0], 0),
        (range(8), 8 * GB * 7 / 8 / 400e9),  # over NVLink
        (range(16), 8 * GB * 15 / 16 / 400e9),  # eight adapters of a node are as fast together
        (range(0, 64, 8), 8 * GB * 7 / 8 / 50e9),  # one adapter of each node
        (range(0, 16, 4), 8 * GB / 2 / (2 * 50e9)),  # two bring half of it
    ],
    ids=["alone", "node", "two_nodes", "one_of_each_node", "two_of_each_node"],
)
def test_a_collective_is_as_fast_as_the_slowest_link(ranks: list[int], seconds: float) -> None:
    assert PLAIN.collective_seconds("all_gather", 8 * GB, ranks) == pytest.approx(seconds)
    assert PLAIN.collective_seconds("all_reduce", 8 * GB, ranks) == pytest.approx(2 * seconds)


def test_latency_and_efficiency_come_on_top() -> None:
    slow = replace(PLAIN, inside=Link(400e9, 1e-3), link_efficiency=0.5)
    fast = PLAIN.collective_seconds("all_gather", 8 * GB, range(8))
    slow_seconds = slow.collective_seconds("all_gather", 8 * GB, range(8))
    assert slow_seconds == pytest.approx(2 * fast + 3e-3)


def test_an_exchange_sends_what_leaves_the_node_through_one_adapter() -> None:
    assert PLAIN.exchange_seconds(8 * GB, range(8)) == pytest.approx(8 * GB * 7 / 8 / 400e9)
    assert PLAIN.exchange_seconds(8 * GB, range(16)) == pytest.approx(8 * GB / 2 / 50e9)


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(asdict(MACHINES["b200"])))
    assert find_machine(str(path)) == find_machine("B200") == MACHINES["b200"]


def test_a_host_is_shared_by_the_gpus_of_its_node(tmp_path: Path) -> None:
    host = Host(64, 10**12, 400e9, 32e9, memory_efficiency=0.5)
    machine = replace(MACHINES["h100"], host=host, link_efficiency=0.5)
    assert machine.copy_seconds(16 * GB) == 1
    assert machine.host_seconds(GB) == pytest.approx(8 * GB / 200e9)
    assert machine.host_share(64) == 0.9 * 10**12 / 8
    assert machine.host_share(2) == 0.9 * 10**12 / 2
    path = tmp_path / "own.json"
    path.write_text(json.dumps(asdict(machine)))
    assert find_machine(str(path)) == machine
    values = asdict(machine)
    del values["host"]
    path.write_text(json.dumps(values))
    assert find_machine(str(path)) == replace(machine, host=None)


def test_everything_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    values = asdict(MACHINES["h100"]) | {"flops": -1, "inside": 3, "colour": "red"}
    values |= {"generation": "turing", "processors": 1.5}
    values["between"]["latency"] = "short"
    values["host"]["disk_bytes_per_second"] = "fast"
    del values["gpus_per_node"], values["host"]["cores"]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        find_machine(str(path))
    message = str(caught.value)
    for part in (
        "unknown field colour",
        "no field gpus_per_node",
        "flops: expects a number above 0 but got -1",
        "inside expects an object",
        "no field host.cores",
        "generation: expects one of ampere, hopper, blackwell but got 'turing'",
        "processors: expects a whole number but got 1.5",
        "host.disk_bytes_per_second: expects a number above 0 but got 'fast'",
        "between.latency: expects a number above 0 but got 'short'",
    ):
        assert part in message


def test_a_machine_that_is_no_file_either_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of h100, h200, .*, and no file"):
        find_machine("abacus")

# SPDX-License-Identifier: Apache-2.0
"""The machine of a published run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from megatron.planning.machine import MACHINES, Cluster, Link
from megatron.planning.published.published_runs import PublishedRun
from megatron.planning.published.run_flags import NotExpressibleError

SHEET_WATTS = {
    "a100": 400,
    "a800": 400,
    "h100": 700,
    "h200": 700,
    "h800": 700,
    "b200": 1000,
    "gb200": 1200,
    "gb300": 1400,
}
"""The most power of GPUs in their data sheets (SXM); that of B300 is not known here."""


def machine_of(run: PublishedRun) -> Cluster:
    """Return the machine of a run: that of its kind, with the values in which the row differs.

    Raises:
        NotExpressibleError: if nothing is known of this kind of GPU.
    """
    hardware = run.hardware
    kind = str(hardware["kind"]).lower()
    if kind not in MACHINES:
        raise NotExpressibleError(f"no machine with GPUs of kind {kind} is described")
    changes: dict[str, Any] = {"gpus_per_node": hardware["gpus_per_node"]}
    machine = MACHINES[kind]
    if hardware.get("memory_gb"):
        changes["memory_bytes"] = int(hardware["memory_gb"] * 10**9)
    if hardware.get("memory_tb_per_s"):
        changes["memory_bytes_per_second"] = hardware["memory_tb_per_s"] * 1e12
    if hardware.get("between_gbit_per_s_per_gpu"):
        per_second = hardware["between_gbit_per_s_per_gpu"] / 8 * 1e9
        changes["between"] = Link(per_second, machine.between.latency)
    limit = re.search(r"limit (\d+) W", hardware.get("gpu") or "")
    if limit and kind not in SHEET_WATTS:
        raise NotExpressibleError(
            f"it has a limit of {limit[1]} W, but the power of {kind} is unknown"
        )
    if limit:
        changes["power_part"] = float(limit[1]) / SHEET_WATTS[kind]
    if hardware.get("nvlink_domain"):
        changes["joined_gpus"] = _power_of_two(hardware["nvlink_domain"])
    stated = re.search(r"([\d.]+) GB/s", hardware.get("inside") or "")
    if stated:  # of both directions
        per_second = float(stated[1]) / 2 * 1e9
        changes["inside"] = Link(per_second, machine.inside.latency)
    return replace(machine, **changes)


def _power_of_two(most: int) -> int:
    """Return the largest power of two up to a number: of 72 GPUs 64 are used together."""
    return 1 << (most.bit_length() - 1)

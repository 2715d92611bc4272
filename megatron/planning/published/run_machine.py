# SPDX-License-Identifier: Apache-2.0
"""The machine of a published run."""

from __future__ import annotations

import re
from dataclasses import replace

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
    """Return the machine of a run: that of its kind, with what the row says differently.

    Raises:
        NotExpressibleError: if nothing is known of this kind of GPU.
    """
    hardware = run.hardware
    kind = str(hardware["kind"]).lower()
    if kind not in MACHINES:
        raise NotExpressibleError(f"no machine with GPUs of kind {kind} is described")
    machine = replace(MACHINES[kind], gpus_per_node=int(hardware["gpus_per_node"]))
    if hardware.get("memory_gb"):
        machine = replace(machine, memory_bytes=int(hardware["memory_gb"] * 10**9))
    if hardware.get("memory_tb_per_s"):
        machine = replace(machine, memory_bytes_per_second=hardware["memory_tb_per_s"] * 1e12)
    if hardware.get("between_gbit_per_s_per_gpu"):
        per_second = hardware["between_gbit_per_s_per_gpu"] / 8 * 1e9
        machine = replace(machine, between=Link(per_second, machine.between.latency))
    limit = re.search(r"limit (\d+) W", str(hardware.get("gpu") or ""))
    if limit and kind not in SHEET_WATTS:
        raise NotExpressibleError(
            f"it has a limit of {limit[1]} W, but the power of {kind} is unknown"
        )
    if limit:
        machine = replace(machine, power_part=float(limit[1]) / SHEET_WATTS[kind])
    if hardware.get("nvlink_domain"):
        joined = 2 ** (int(hardware["nvlink_domain"]).bit_length() - 1)  # of 72, 64 are used
        machine = replace(machine, joined_gpus=joined)
    stated = re.search(r"([\d.]+) GB/s", str(hardware.get("inside") or ""))
    if stated:  # of both directions
        per_second = float(stated[1]) / 2 * 1e9
        machine = replace(machine, inside=Link(per_second, machine.inside.latency))
    return machine

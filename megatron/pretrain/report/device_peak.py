# SPDX-License-Identifier: Apache-2.0
"""The peak FLOP/s of a device, by which model FLOPs utilization (MFU) divides what a run reaches.

Of a GPU it is the figure of its data sheet for dense matrix products in bf16 (fp16 where the GPU
has no bf16), whatever the run computes in, or --device-peak-tflops. A CPU is measured.
"""

from __future__ import annotations

import argparse
import functools
import time

import torch

PEAK_TFLOPS = {
    "GB300": 2500,
    "GB200": 2500,
    "B300": 2250,
    "B200": 2250,
    "B100": 1750,
    "GH200": 989,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A30": 165,
    "A10G": 70,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 6000 Ada": 364,
    "RTX A6000": 155,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
    "MI355X": 2516,
    "MI325X": 1307,
    "MI300X": 1307,
    "MI250X": 383,
}
"""Part of the name that CUDA gives a GPU -> TFLOP/s of its data sheet, dense. The first that fits
counts, so that a longer name stands before those that it contains."""

MATRIX_SIZE = 768
MEASURED_SECONDS = 0.1


def peak_flops(args: argparse.Namespace) -> float | None:
    """Return the peak FLOP/s of this rank's device, None for a GPU that is not known.

    Args:
        args: of the run, with ``device_peak_tflops`` and ``params_dtype``.
    """
    if args.device_peak_tflops:
        return args.device_peak_tflops * 1e12
    if not torch.cuda.is_available():
        return measured_flops(args.params_dtype)
    return known_flops(torch.cuda.get_device_name())


def known_flops(name: str) -> float | None:
    """Return the peak FLOP/s of the GPU that CUDA calls ``name``, None if it is not in the list."""
    words = name.replace("-", " ").split()
    for part, tflops in PEAK_TFLOPS.items():
        wanted = part.split()
        starts = range(len(words) - len(wanted) + 1)
        if any(words[start : start + len(wanted)] == wanted for start in starts):
            return tflops * 1e12
    return None


@functools.cache
def measured_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matrix product on the threads of this process: the best of some.

    Measured once in a process, in a tenth of a second.
    """
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    out = torch.empty_like(matrix)
    best, end = float("inf"), time.perf_counter() + MEASURED_SECONDS
    with torch.no_grad():
        torch.mm(matrix, matrix, out=out)  # the first one loads kernels
        while best == float("inf") or time.perf_counter() < end:
            started = time.perf_counter()
            torch.mm(matrix, matrix, out=out)
            best = min(best, time.perf_counter() - started)
    return 2 * MATRIX_SIZE**3 / best

# SPDX-License-Identifier: Apache-2.0
"""The peak of a device: of the flag, of a list of GPUs, or measured on a CPU."""

import argparse

import pytest
import torch

from megatron.pretrain.report.speed import known_flops, measured_flops, peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA X900", None),
    ],
)
def test_gpus_are_known_by_the_name_that_cuda_gives_them(name: str, tflops: int | None) -> None:
    assert known_flops(name) == (None if tflops is None else tflops * 1e12)


def test_a_cpu_is_measured_once_and_the_flag_counts_more() -> None:
    args = argparse.Namespace(device_peak_tflops=None, params_dtype=torch.float32)
    peak = peak_flops(args)
    assert peak is not None and 1e8 < peak < 1e14
    assert peak_flops(args) == peak == measured_flops(torch.float32)
    args.device_peak_tflops = 2.5
    assert peak_flops(args) == 2.5e12

# SPDX-License-Identifier: Apache-2.0
"""Ranks leave together; settings of --tp-comm-overlap reach Transformer Engine (a stand-in)."""

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.pretrain import ranks
from tests.support.rank_pool import run_ranks

BACKENDS = {
    "offload": (True, "cuda", "cpu:gloo,cuda:nccl"),
    "no offload": (False, "cuda", "nccl"),
    "no GPU": (True, "cpu", "nccl"),
}
MODULE = "transformer_engine.pytorch.module.base"


@pytest.mark.parametrize(("offloads", "device", "expected"), BACKENDS.values(), ids=BACKENDS)
def test_groups_have_a_backend_for_host_memory_where_shards_lie_there(
    offloads: bool, device: str, expected: str
) -> None:
    args = argparse.Namespace(distributed_backend="nccl", optimizer_cpu_offload=offloads)
    assert ranks.backend_for(args, torch.device(device)) == expected


@pytest.mark.parametrize("is_new", [True, False], ids=["modes", "use_fp8"])
def test_user_buffers_have_the_shape_of_a_microbatch(is_new: bool, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def new(quantization_modes: list[str], **options: Any) -> None:
        seen.update(options, modes=quantization_modes)

    def old(use_fp8: bool, **options: Any) -> None:
        seen.update(options, use_fp8=use_fp8)

    base = ModuleType(MODULE)
    vars(base).update(
        initialize_ub=new if is_new else old,
        UserBufferQuantizationMode=SimpleNamespace(NONE="none"),
    )
    path = tmp_path / "buffers.yaml"
    path.write_text("qkv_fprop: {method: ring_exchange}")
    args = argparse.Namespace(
        tp_comm_overlap_cfg=str(path),
        seq_length=64,
        micro_batch_size=2,
        context_parallel_size=2,
        hidden_size=16,
        tensor_model_parallel_size=4,
        tp_comm_bootstrap_backend="nccl",
    )
    with patch.dict(sys.modules, {MODULE: base}):
        ranks.start_user_buffers(args)
    assert seen["shape"] == [64, 16] and seen["tp_size"] == 4
    assert seen["ub_cfgs"] == {"qkv_fprop": {"method": "ring_exchange"}}
    assert seen["modes"] == ["none"] if is_new else not seen["use_fp8"]


def test_a_rank_that_wakes_late_in_the_last_barrier_reports_no_error() -> None:
    left: list[str] = []

    def barrier() -> None:
        left.append("barrier")
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4767")

    with (
        patch.object(ranks.dist, "is_initialized", lambda: True),
        patch.object(ranks.dist, "barrier", barrier),
        patch.object(ranks.parallel_state, "destroy_model_parallel", lambda: left.append("model")),
        patch.object(ranks.dist, "destroy_process_group", lambda: left.append("groups")),
    ):
        ranks.stop()
    assert left == ["barrier", "model", "groups"]


def message_of_command_lines(values: list[dict[str, Any]]) -> str:
    """Job: compare the command line of this rank with those of the others."""
    args = argparse.Namespace(micro_batch_size=2, seed=1, **values[dist.get_rank()])
    try:
        ranks.agree_on_arguments(args)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_ranks_with_other_command_lines_are_refused_with_flags_values_and_ranks() -> None:
    lines = [{"lr": 1e-3, "data_path": "a"}, {"lr": 2e-3, "data_path": "b"}]
    lines.append(lines[0])
    for message in run_ranks(3, message_of_command_lines, lines):
        assert message.splitlines() == [
            "--data-path differs between ranks: 'a' on ranks 0, 2; 'b' on rank 1",
            "--lr differs between ranks: 0.001 on ranks 0, 2; 0.002 on rank 1",
        ]
    folders = [{"tensorboard_dir": "a"}, {"tensorboard_dir": "b"}]
    assert run_ranks(2, message_of_command_lines, folders) == ["accepted"] * 2

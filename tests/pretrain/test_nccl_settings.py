# SPDX-License-Identifier: Apache-2.0
"""Settings of NCCL's communicators are checked, and reach Megatron-Core and FSDP's own group."""

import re
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.mcore_adapter.releases import process_groups
from megatron.mcore_adapter.run.model_parallel import initialize_model_parallel
from megatron.pretrain.arguments.parallel_rules import NCCL_GROUPS, NCCL_SETTINGS
from tests.support.pretrain.arguments.command_lines import MOCK, parse, problems

GPU = {"cuda": True, "transformer_engine": True}


def test_names_of_groups_and_settings_are_those_of_core() -> None:
    source = getsource(parallel_state)
    assert set(re.findall(r'get_nccl_options\(\s*"(\w+)"', source)) == set(NCCL_GROUPS)
    settings = getsource(parallel_state.get_nccl_options)
    read = re.findall(r'nccl_comm_cfgs\[pg_name\](?:\.get\(|\[)"(\w+)"', settings)
    assert set(read) == set(NCCL_SETTINGS)


def test_settings_reach_core(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text("dp_cp: {max_ctas: 16, min_ctas: 2}\nep_dp: {net_name: IB}\n")
    line = f"{MOCK} --nccl-communicator-config-path {path} --high-priority-stream-groups dp_cp tp"
    args, _ = parse(line, **GPU)
    with patch.object(parallel_state, "initialize_model_parallel") as initialize:
        initialize_model_parallel(args)
    keywords = initialize.call_args.kwargs
    assert keywords["nccl_communicator_config_path"] == str(path)
    assert keywords["high_priority_stream_groups"] == ["dp_cp", "tp"]
    assert keywords["use_sharp"] is False and keywords["sharp_enabled_group"] is None


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--high-priority-stream-groups dp data", "data is no group: the names are dp_cp, "),
        ("--sharp-enabled-group dp", "--sharp-enabled-group needs --use-sharp"),
        (
            "--use-sharp --sharp-enabled-group dp_replica",
            "dp_replica needs --num-distributed-optimizer-instances",
        ),
        ("--use-sharp --distributed-backend gloo", "--use-sharp: for NCCL, which needs GPUs"),
        ("--nccl-communicator-config-path missing.yaml", "No such file or directory"),
    ],
)
def test_wrong_settings_are_named(flags: str, problem: str) -> None:
    assert any(problem in text for text in problems(f"{MOCK} {flags}", **GPU))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dp_cp: {max_cta: 16}", "max_cta is none of is_high_priority_stream, cga_cluster_size"),
        ("data: {max_ctas: 16}", "data is no group"),
        ("dp_cp", "expected are lines as dp_cp: {max_ctas: 32}"),
        ("", "expected are lines as dp_cp: {max_ctas: 32}"),
        ("dp_cp: 1", "expected are lines as dp_cp: {max_ctas: 32}"),
        ("dp_cp: {", "while parsing"),
    ],
)
def test_a_wrong_file_of_settings_is_named(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    found = problems(f"{MOCK} --nccl-communicator-config-path {path}", **GPU)
    assert any(problem in each for each in found), found


def test_without_gpus_all_of_them_are_refused_in_one_line() -> None:
    flags = "--use-sharp --high-priority-stream-groups dp_cp"
    (problem,) = problems(f"{MOCK} {flags}")
    assert problem.startswith("--use-sharp, --high-priority-stream-groups: for NCCL")


def test_fsdps_own_group_for_gathers_has_the_settings_of_the_group_beside_it() -> None:
    """Made by this project where Megatron-Core no longer does; a stand-in for NCCL's options."""
    config = object()
    own = SimpleNamespace(is_high_priority_stream=True, config=config)
    group = Mock(_get_backend=lambda device: SimpleNamespace(options=own))  # hashable
    made: list[dict[str, Any]] = []

    def options(is_high_priority_stream: bool) -> SimpleNamespace:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream)

    with (
        patch.object(process_groups, "accepts", lambda function, name: False),
        patch.object(process_groups, "_made", {}),
        patch.object(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl"),
        patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), create=True),
        patch.object(dist, "get_process_group_ranks", lambda group: [0, 1]),
        patch.object(process_groups, "local_group", lambda ranks, **given: made.append(given)),
    ):
        process_groups.all_gather_group(None, group)
    assert made[0]["pg_options"].is_high_priority_stream
    assert made[0]["pg_options"].config is config and made[0]["pg_options"] is not own

# SPDX-License-Identifier: Apache-2.0
"""Programs that name "cuda" and "nccl" run on the model, and their races are printed."""

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.support.examples.blocks import blocks_of
from tests.support.fsdp.reference import Ranks
from tools.cuda_model import cuda_model
from tools.cuda_model.__main__ import main
from tools.cuda_model.reports import EARLY_RELEASE, HOST_READ, RACE
from tools.cuda_model.streams import ModelEvent

PROGRAM, REPORT = blocks_of("tools/cuda_model/README.md")[1:3]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], int]:
    """Return a function that runs a program as the command line does."""
    monkeypatch.setattr(sys, "argv", ["tools.cuda_model"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    def run_program(source: str) -> int:
        (tmp_path / "prefetch.py").write_text(source)
        return main([str(tmp_path / "prefetch.py")])

    return run_program


def test_the_program_of_the_readme_has_its_report(
    run: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PROGRAM.code) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(REPORT.code), printed
    assert f": {EARLY_RELEASE}: " in printed


def test_the_lines_that_it_leaves_out_put_it_in_order(
    run: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PROGRAM.code.replace("# torch", "torch").replace("# batch", "batch")) == 0
    assert capsys.readouterr().err.startswith("0 reports of")


@pytest.mark.parametrize(
    ("source", "status"), [("raise SystemExit(3)", 1), ("raise SystemExit", 0), ("1 / 0", 1)]
)
def test_a_program_that_fails_has_a_status(
    run: Callable[[str], int], source: str, status: int
) -> None:
    assert run(source) == status
    assert main([]) == 2


# ---- names


def test_tensors_are_where_a_gpu_has_them() -> None:
    host, zeros = torch.ones(2), torch.zeros
    with cuda_model(names_cuda=True) as model:
        with torch.device("cuda"):
            made = torch.zeros(2)
        moved = host.cuda()
        on_device = [made, moved, torch.empty(0, device="cuda"), moved.new_zeros(1), moved * 2]
        on_device += [torch.ones_like(host, device="cuda"), copy.deepcopy(moved), moved[1:]]
        on_device.append(torch.as_tensor(host, device=made.device))
        on_device += nn.Linear(2, 1).cuda().parameters()
        on_host = [host, host * 2, torch.zeros(2), moved.cpu()]
        on_host.append(torch.ones_like(moved, device="cpu"))
        assert [str(each.device) for each in on_device] == ["cuda:0"] * len(on_device)
        assert all(each.is_cuda and not each.is_cpu for each in on_device)
        assert [str(each.device) for each in on_host] == ["cpu"] * len(on_host)
        assert not any(each.is_cuda for each in on_host)
        moved.add_(1)
        host.copy_(moved)
        with pytest.raises(TypeError, match="to numpy"):
            moved.numpy()
        assert moved.cpu().numpy().tolist() == host.tolist() == [2.0, 2.0]
    assert not model.reports
    assert str(moved.device) == "cpu" and torch.zeros is zeros


def test_work_on_the_host_is_no_kernel_and_copies_let_the_host_wait() -> None:
    with cuda_model(names_cuda=True) as model:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.ones(3).mul_(2)
            assert model.detector.num_events == 0
            device = x.to("cuda")
        assert device.sum().item() == 6
        with torch.cuda.stream(side):
            late = x.to("cuda", non_blocking=True)
        late.sum()
    assert {report.kind for report in model.reports} == {RACE}


def test_autocast_of_the_device_computes_in_bfloat16() -> None:
    with cuda_model(names_cuda=True), torch.autocast("cuda", torch.bfloat16):
        x = torch.ones(2, 2, device="cuda")
        assert (x @ x).dtype == torch.bfloat16


# ---- FSDP2


def trained_with_fsdp2(device_type: str, offload: OffloadPolicy | None = None) -> list[float]:
    """Train four layers on all ranks; return the losses."""
    settings = {"offload_policy": offload or OffloadPolicy()}
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    if offload is None:
        model = model.to(device_type)
    for layer in model:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    losses = []
    for number in range(3):
        x = torch.full((2, 6), number + dist.get_rank() + 1.0, device=device_type)
        loss = model(x).square().mean()
        loss.backward()
        if offload is None:  # otherwise the norm would need a group for the host's memory
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def fsdp2_on_the_model() -> None:
    expected = trained_with_fsdp2("cpu")
    with cuda_model(names_cuda=True) as model:
        losses = trained_with_fsdp2("cuda")
    assert not model.reports, "\n".join(map(str, model.reports))
    assert losses == expected and len(model.streams.names) > 3


def fsdp2_with_offload(pins: bool, waits: bool) -> set[str]:
    """Train with weights and gradients on the host; return the kinds of reports."""
    expected = trained_with_fsdp2("cpu", CPUOffloadPolicy(pin_memory=False))
    does_nothing = patch.object(ModelEvent, "synchronize", lambda event: None)
    with cuda_model(names_cuda=True) as model, nullcontext() if waits else does_nothing:
        losses = trained_with_fsdp2("cuda", CPUOffloadPolicy(pin_memory=pins))
    assert losses == expected and model.detector.host.is_used
    return {report.kind for report in model.reports}


def fsdp2_without_a_wait() -> set[str]:
    copy_out = _fsdp_param_group.foreach_all_gather_copy_out

    def copy_out_early(result: Any, *args: Any) -> None:
        copy_out(result._replace(all_gather_event=None), *args)

    early = patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", copy_out_early)
    with cuda_model(names_cuda=True) as model, early:
        trained_with_fsdp2("cuda")
    return {report.kind for report in model.reports}


def test_fsdp2_has_the_losses_of_the_cpu_and_no_reports(ranks: Ranks) -> None:
    ranks(2, fsdp2_on_the_model)


@pytest.mark.exhaustive
def test_a_gather_that_fsdp2_does_not_wait_for_is_reported(ranks: Ranks) -> None:
    assert all(RACE in kinds for kinds in ranks(2, fsdp2_without_a_wait))


@pytest.mark.exhaustive
def test_offload_of_fsdp2_is_waited_for_by_the_host(ranks: Ranks) -> None:
    assert ranks(2, fsdp2_with_offload, True, True) == [set(), set()]
    assert all(HOST_READ in kinds for kinds in ranks(2, fsdp2_with_offload, True, False))
    # With pageable memory FSDP2 asks no copy to go on.
    assert ranks(2, fsdp2_with_offload, False, False) == [set(), set()]

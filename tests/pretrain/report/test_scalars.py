# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases gets what TensorBoard gets, and training goes on where it fails."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain.report.test_report import VALUES, namespace, steps

wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # it writes nothing into one that is not there


@pytest.mark.exhaustive
def test_a_run_of_wandb_gets_all_numbers_and_all_arguments(tmp_path: Path) -> None:
    args = namespace(
        wandb_project="counting",
        wandb_exp_name="seven",
        wandb_entity="nobody",
        wandb_save_dir=str(tmp_path / "runs"),
        log_validation_ppl_to_tensorboard=True,
    )
    report, progress = steps(args, [5.0, 4.0], **{"z_loss": 0.25})
    report.evaluation(progress, 2.0)
    report.end()
    (file,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 120
    while b"nobody" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)  # another process writes it
    records = file.read_bytes()
    names = [name for name, value in VALUES.items() if value is not None]
    validation = ["lm loss validation", "lm loss validation ppl"]
    for name in (*names, *validation, "z_loss", "samples vs steps"):
        assert name.encode() in records, name
    for word in ("counting", "seven", "nobody", "global_batch_size"):
        assert word.encode() in records, word


class BrokenRun:
    """A run of a service that has gone away."""

    def log(self, values: dict[str, float], step: int) -> None:
        raise RuntimeError("no network")

    def finish(self) -> None:
        raise RuntimeError("no network")


def fail(**kwargs: Any) -> None:
    raise RuntimeError("no network")


@pytest.mark.parametrize("init", [fail, lambda **kwargs: BrokenRun()], ids=["begin", "middle"])
def test_a_service_that_fails_is_told_once_and_training_goes_on(
    init: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    args = namespace(wandb_project="counting", wandb_save_dir=str(tmp_path))
    monkeypatch.setattr(wandb, "init", init)
    steps(args, [5.0, 4.0])[0].end()
    lines = capsys.readouterr().out.splitlines()
    message = "Weights & Biases cannot be written, training continues without: no network"
    assert lines.count(message) == 1 and sum("no network" in line for line in lines) == 1
    assert sum(line.startswith("iteration") for line in lines) == 2


def test_other_ranks_open_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(wandb, "init", lambda **kwargs: pytest.fail("opened"))
    args = namespace(wandb_project="counting", wandb_save_dir=str(tmp_path / "runs"))
    steps(args, [5.0])[0].end()
    assert not (tmp_path / "runs").exists()

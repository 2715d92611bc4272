# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: lines, the history of its losses, TensorBoard."""

import argparse
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.checkpoint.hugging_face.model_directory import CONFIG
from megatron.mcore_adapter.run.report_files import HISTORY, PICTURE, PROGRESS
from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain.loop import TrainingRun
from megatron.pretrain.report.report import Report
from megatron.pretrain.report.run_files import write_config
from megatron.pretrain.stopping import StopRequest
from tests.support.pretrain.arguments.command_lines import MOCK, parse

VALUES = {
    "lm loss": 2.5,
    "learning-rate": 1e-3,
    "batch-size": 4,
    "grad-norm": 1.25,
    "num-zeros": None,
    "loss-scale": None,
    "params-norm": None,
}


@cache
def arguments() -> dict[str, Any]:
    """Return the arguments of a command line."""
    return vars(parse(MOCK)[0])


def namespace(**given: Any) -> argparse.Namespace:
    """Return arguments for ten steps of four samples, but for what is given."""
    run: dict[str, Any] = {"log_interval": 1, "device_peak_tflops": 1.0, "train_iters": 10}
    run |= {"global_batch_size": 4, "seq_length": 8, "load": given.get("save")}
    return argparse.Namespace(**{**arguments(), **run, **given})


def steps(
    args: argparse.Namespace,
    losses: list[float],
    *,
    iteration: int = 0,
    skipped: tuple[int, ...] = (),
    flops: float = 1e6,
    **values: float,
) -> tuple[Report, Progress]:
    """Return a report of these steps after `iteration`, and the progress then."""
    report, progress = Report(args), Progress(iteration)
    report.begin(progress)
    for loss in losses:
        progress.count_step(args.global_batch_size, flops)
        report.step(
            progress,
            {**VALUES, "lm loss": loss, **values},
            skipped=progress.iteration in skipped,
        )
    return report, progress


def history(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]


def test_a_line_is_printed_every_interval_with_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps(namespace(log_interval=3), [5.0, 4.0, 3.0, 2.0])
    first, of_first, third, of_third = capsys.readouterr().out.splitlines()
    assert first.startswith("iteration  1/10 | consumed samples: 4 | lm loss: 5.000000E+00 | ")
    assert third == (
        "iteration  3/10 | consumed samples: 12 | lm loss: 3.000000E+00 | lr: 1.0000E-03"
        " | grad norm: 1.250"
    )
    speed = r"  step \S+ ms \| \S+ tokens/s \| \S+ TFLOP/s \(\S+ % MFU\) \| \S+ MiB \| ETA 0:0\d"
    assert re.fullmatch(speed, of_first) and re.fullmatch(speed, of_third)


@pytest.mark.parametrize("is_last", [False, True], ids=["goes_on", "stops"])
def test_the_first_and_the_last_step_of_a_run_have_a_line(
    is_last: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    args = namespace(log_interval=100, train_iters=12)
    report, progress = steps(args, [5.0] * 4, iteration=7)
    progress.count_step(4, 1e6)
    assert report.is_due(progress, is_last=True) and report.is_due(progress)  # it is the 12th
    args.train_iters = 50
    assert report.is_due(progress, is_last) == is_last
    report.step(progress, VALUES, skipped=False, is_last=is_last)
    numbers = re.findall(r"^iteration +(\d+)/", capsys.readouterr().out, re.MULTILINE)
    assert numbers == ["8", "12"][: 1 + is_last]


@pytest.mark.parametrize(
    ("iteration", "stop", "ends"),
    [
        (10, StopRequest(), True),
        (9, StopRequest(), False),
        (8, StopRequest(), True),  # --exit-interval 4
        (7, StopRequest(agreed=True), True),
        (7, StopRequest(interrupted=True), True),
    ],
)
def test_every_reason_to_leave_the_loop_makes_the_last_line(
    iteration: int, stop: StopRequest, ends: bool
) -> None:
    args: Any = namespace(exit_interval=4)
    nothing: Any = None
    run = TrainingRun([], args=args, device=nothing, report=nothing)
    run.progress, run.stop = Progress(iteration), stop
    assert run.stops_here == ends


def test_lines_fit_100_columns_and_no_number_is_shown_as_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = namespace(train_iters=500_000, log_interval=1)
    tiny = {"params-norm": 3.2e-7, "grad-norm": 4e-9, "num-zeros": 12345.0, "loss-scale": 2.0**32}
    losses = {"load_balancing_loss": 1e-9, "mtp_1 loss": 12.0}
    steps(args, [1e-9, 5.0], iteration=123_456, skipped=(123_458,), **tiny, **losses)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert not re.search(r"(?<![\d.])0\.0+(?![\d.])", text), text
    for part in ("grad norm: 4.000e-09", "params norm: 3.200e-07"):
        assert part in text


def test_optional_numbers_have_their_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    steps(namespace(), [5.0], **{"num-zeros": 12.0, "params-norm": 3.5, "loss-scale": 1024.0})
    line = capsys.readouterr().out
    for part in ("num zeros: 12 |", "params norm: 3.500 |", "loss scale: 1,024 |"):
        assert part in line


def test_skipped_iterations_are_counted_and_left_out_of_the_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = steps(
        namespace(save=str(tmp_path), log_interval=4),
        [5.0, float("inf"), 4.0, 3.0],
        skipped=(2,),
        **{"grad-norm": None},
    )
    report.keep()
    assert "skipped iterations: 1" in capsys.readouterr().out
    assert [entry["iteration"] for entry in history(tmp_path)] == [1, 3, 4]


def test_the_history_of_a_resumed_run_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    args = namespace(save=str(tmp_path))
    first, progress = steps(args, [5.0, 4.0, 3.0])
    first.evaluation(progress, 3.5)
    first.keep()
    resumed, progress = steps(args, [3.1, 2.1], iteration=2)
    resumed.evaluation(progress, 2.5)
    resumed.evaluation(progress, 9.9, "test")
    resumed.keep()
    assert history(tmp_path) == [
        {"iteration": 1, "train": 5.0},
        {"iteration": 2, "train": 4.0},
        {"iteration": 3, "train": 3.1},
        {"iteration": 4, "train": 2.1},
        {"iteration": 4, "validation": 2.5},
    ]
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {HISTORY, PICTURE, CONFIG}


def test_tensorboard_has_every_number_by_iteration_and_losses_by_samples(tmp_path: Path) -> None:
    args = namespace(
        tensorboard_dir=str(tmp_path),
        log_memory_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
    )
    report, progress = steps(args, [5.0, 4.0], **{"params-norm": 3.5})
    report.evaluation(progress, 2.0)
    report.evaluation(progress, 3.0, "test")
    report.end()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    by_samples = {"lm loss", "learning-rate", "grad-norm", "params-norm", "batch-size"}
    by_samples |= {"lm loss validation", "lm loss test"}
    others = {"mem-allocated-bytes", "memory-bytes", "iteration-time", "tokens-per-second"}
    others |= {"throughput", "mfu", "lm loss validation ppl", "lm loss test ppl"}
    assert set(events.Tags()["scalars"]) == (
        by_samples | others | {f"{name} vs samples" for name in by_samples}
    )
    curves = {"lm loss": [(1, 5.0), (2, 4.0)], "lm loss vs samples": [(4, 5.0), (8, 4.0)]}
    for name, points in curves.items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == points
    assert events.Scalars("lm loss validation ppl")[0].value == pytest.approx(7.389056)


def test_flags_choose_what_tensorboard_gets_beside_the_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = namespace(
        tensorboard_dir=str(tmp_path),
        world_size=3,
        device_peak_tflops=2.0,
        log_loss_scale_to_tensorboard=False,
        log_interval=2,
        num_layers=1,
    )
    steps(args, [5.0, 4.0], flops=3e12, **{"loss-scale": 1024.0, "z_loss": 0.5})[0].end()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert "loss-scale" not in tags and {"z_loss", "iteration-time", "throughput"} <= tags
    seconds, speeds, shares, tokens = (
        [event.value for event in events.Scalars(name)]
        for name in ("iteration-time", "throughput", "mfu", "tokens-per-second")
    )
    assert speeds == pytest.approx([1 / each for each in seconds], rel=1e-3)
    assert shares == pytest.approx([each / 2 for each in speeds], rel=1e-3)
    assert tokens == pytest.approx([4 * 8 / each for each in seconds], rel=1e-3)
    lines = capsys.readouterr().out.splitlines()
    assert any("z_loss: 5.000000E-01 |" in line for line in lines)


def test_only_the_first_rank_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    args = namespace(save=str(tmp_path), tensorboard_dir=str(tmp_path))
    report, progress = steps(args, [5.0])
    report.log("a line")
    report.evaluation(progress, 2.0)
    report.keep()
    report.end()
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_what_only_decorates_may_fail_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, progress = steps(namespace(save=str(tmp_path), log_progress=True), [5.0])
    capsys.readouterr()
    (tmp_path / CONFIG).unlink()
    for name in (HISTORY, PICTURE, PROGRESS):
        (tmp_path / name).mkdir()
    for _ in range(2):
        report.keep_history()
        report.saved(progress)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for name, line in zip((HISTORY, PICTURE, PROGRESS), lines):
        assert line.startswith(f"{name} cannot be written, training continues without: ")
        (tmp_path / name).rmdir()
    report.keep_history()
    report.saved(progress)
    assert history(tmp_path) == [{"iteration": 1, "train": 5.0}]
    assert (tmp_path / PROGRESS).read_text().startswith("iteration 1\tsamples 4\toperations ")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, progress = steps(namespace(save=str(tmp_path), log_progress=True), [5.0])
    os.mkfifo(tmp_path / PROGRESS)
    report.saved(progress)
    assert "this is a pipe or a device" in capsys.readouterr().out


def test_training_goes_on_where_tensorboard_cannot_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rules refuse a file; what is put there later, or cannot be written, is told once."""
    (tmp_path / "file").touch()
    report, _ = steps(namespace(tensorboard_dir=str(tmp_path / "file" / "logs")), [5.0, 4.0])
    report.end()
    told = [line for line in capsys.readouterr().out.splitlines() if "TensorBoard" in line]
    assert len(told) == 1 and "cannot be written, training continues without: " in told[0]


def test_a_run_leaves_the_settings_of_a_model_of_hugging_face_alone(tmp_path: Path) -> None:
    settings = '{"model_type": "llama"}'
    (tmp_path / "config.json").write_text(settings)
    with pytest.raises(OSError, match="directory of a Hugging Face model"):
        write_config(tmp_path, argparse.Namespace(), 0)
    assert (tmp_path / "config.json").read_text() == settings

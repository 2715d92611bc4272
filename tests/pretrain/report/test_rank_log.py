# SPDX-License-Identifier: Apache-2.0
"""With --log-dir each rank has a log of its own, and the terminal the lines of the first rank."""

import contextlib
import io
import logging
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pretrain_gpt
from megatron.pretrain.report import terminal
from megatron.pretrain.report.rank_log import RankLog
from tests.pretrain.test_pretrain_gpt import run_main
from tests.support.pretrain.training_runs import SMALL
from tests.support.rank_pool import run_ranks

LINE = f"{SMALL} --use-megatron-fsdp --train-iters 2 --lr-decay-iters 20"


def speak(folder: str) -> tuple[str, str]:
    """Job: print, log and complain with a log; return what the terminal got."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), RankLog(folder):
        print("a line")
        logging.getLogger("library").warning("a warning")
        os.write(2, b"from a library in C++\n") if os.environ["RANK"] != "0" else None
        terminal.complain("an error of the run")
    assert sys.stdout is not output and terminal.errors() is sys.stderr
    return output.getvalue(), errors.getvalue()


def test_other_ranks_speak_to_their_logs_and_complain_to_the_terminal(tmp_path: Path) -> None:
    first, second = run_ranks(2, speak, str(tmp_path))
    assert first[0] == "a line\n" and "an error of the run\n" in first[1]
    assert second == ("", "")  # its errors go to the descriptor of the terminal
    for rank in (0, 1):
        text = (tmp_path / f"rank{rank}.log").read_text()
        assert text.startswith("---- ") and "process " in text.splitlines()[0]
        for each in ("a line\n", "WARNING library: a warning\n", "an error of the run\n"):
            assert text.count(each) == 1
    assert "from a library in C++\n" in (tmp_path / "rank1.log").read_text()


def break_down(*args: object) -> None:
    raise TypeError("a defect\nof this rank")


def run_with_a_defect(command_line: str) -> tuple[int, str, str]:
    """Job: a run of the program that fails on every rank."""
    with patch.object(pretrain_gpt, "pretrain", break_down):
        return run_main(command_line)


def test_a_traceback_goes_to_a_file_and_one_line_to_the_terminal(tmp_path: Path) -> None:
    (code, _, errors), _ = run_ranks(2, run_with_a_defect, f"{LINE} --log-dir {tmp_path}/logs")
    assert code == 1
    (line,) = errors.splitlines()
    assert line.startswith("error: rank 0: TypeError: a defect of this rank (at ")
    assert line.endswith(f"in break_down); traceback: {tmp_path}/logs/rank0.txt")
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank{rank}.txt").read_text()
        assert "Traceback (most recent call last)" in text and "in break_down\n" in text


def test_a_log_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    (code, _, errors), _ = run_ranks(2, run_main, f"{LINE} --log-dir {tmp_path}/taken")
    assert code == 2 and f"--log-dir {tmp_path}/taken: {tmp_path}/taken is a file" in errors


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def speak_on_a_full_disk(folder: str) -> tuple[str, str]:
    """Job: print and log twice where the log cannot grow; return what the terminal got."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        RankLog(folder),
        full_disk(),
    ):
        for _ in range(2):
            print("a line")
            logging.getLogger("library").warning("a warning")
        terminal.complain("an error of the run")
    return output.getvalue(), errors.getvalue()


def test_a_full_disk_below_the_log_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    (first,) = run_ranks(1, speak_on_a_full_disk, str(tmp_path))
    assert first[0] == "a line\n" * 2 and first[1].count("an error of the run\n") == 1
    told = f"{tmp_path}/rank0.log cannot be written, training goes on without: "
    assert first[1].count(told) == 1

# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: bars on terminals only, elsewhere a plain line now and then."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.checkpoint.commands.command import Printer
from megatron.checkpoint.core import parts
from megatron.checkpoint.core.parts import ProgressLines, progress_of, terminal_bar
from megatron.pretrain.data.corpus import write_corpus
from megatron.pretrain.data.tokenizers import ByteTokenizer


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock))
    return clock


def test_a_terminal_gets_a_bar() -> None:
    terminal = FakeTerminal()
    with progress_of("converting", 4000, stream=terminal) as advance:
        advance(1000)
    assert "converting" in terminal.getvalue() and "\r" in terminal.getvalue()
    bar = terminal_bar(terminal, total=3)
    assert bar is not None
    bar.close()


def test_short_work_prints_nothing_without_a_terminal(clock: FakeClock) -> None:
    stream = io.StringIO()
    with progress_of("converting", 4000, stream=stream) as advance:
        for _ in range(9):
            clock.now += 1.1
            advance(400)
    assert stream.getvalue() == "" and terminal_bar(stream, total=3) is None


def test_long_work_prints_a_line_every_ten_seconds_without_a_terminal(clock: FakeClock) -> None:
    stream = io.StringIO()
    with progress_of("converting", 4_000_000_000, stream=stream) as advance:
        for _ in range(40):
            clock.now += 1
            advance(100_000_000)
    assert stream.getvalue().splitlines() == [
        "converting: 25 %, 1.00GB of 4.00GB in 10 s",
        "converting: 50 %, 2.00GB of 4.00GB in 20 s",
        "converting: 75 %, 3.00GB of 4.00GB in 30 s",
        "converting: 100 %, 4.00GB of 4.00GB in 40 s",
    ]


def test_lines_are_as_far_apart_as_the_work_is_slow_and_leave_an_unknown_total_out(
    clock: FakeClock,
) -> None:
    stream = io.StringIO()
    lines = ProgressLines("drawing", 0, "draws", stream, clock)
    for seconds in (25, 1, 8, 1):
        clock.now += seconds
        lines.advance(1)
    assert stream.getvalue().splitlines() == [
        "drawing: 1 draws in 25 s",
        "drawing: 4 draws in 35 s",
    ]


@pytest.mark.parametrize(
    ("as_json", "show_progress"), [(True, True), (False, False)], ids=["json", "quiet"]
)
@pytest.mark.parametrize("stream", [io.StringIO, FakeTerminal], ids=["pipe", "terminal"])
def test_quiet_and_json_are_silent(
    as_json: bool,
    show_progress: bool,
    stream: type[io.StringIO],
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    with Printer(as_json, show_progress).progress("verifying", 100) as advance:
        clock.now += 60
        advance(100)
    assert stderr.getvalue() == ""


def test_only_the_first_rank_shows_progress(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, expected in (("0", "verifying: 100 %"), ("1", "")):
        stderr = io.StringIO()
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setenv("RANK", rank)
        with Printer(as_json=False, show_progress=True).progress("verifying", 100) as advance:
            clock.now += 60
            advance(100)
        assert stderr.getvalue().startswith(expected) and bool(stderr.getvalue()) == bool(expected)


def test_preprocessing_prints_plain_lines_without_a_terminal(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_text("words")
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    tokenizer = ByteTokenizer()
    tokenize = tokenizer.tokenize

    def slow(text: str | bytes) -> np.ndarray:
        clock.now += 15
        return tokenize(text)

    monkeypatch.setattr(tokenizer, "tokenize", slow)
    write_corpus([tmp_path / "in.txt"], tmp_path / "out", tokenizer)
    assert stderr.getvalue() == "tokenizing: 100 %, 5.00B of 5.00B in 15 s\n"

# SPDX-License-Identifier: Apache-2.0
"""Conversions resume after interruptions, are divided among ranks, and are whole or not there."""

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.command_line import main
from megatron.checkpoint.commands.comparison import compare_entries
from megatron.checkpoint.commands.conversion import ConversionError, convert, fingerprint
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.core.parts import Part, Progress
from megatron.checkpoint.core.spelling import choose_spelling
from megatron.checkpoint.dcp import dcp_target
from megatron.checkpoint.fsdp_dtensor import dtensor_writer as fsdp_dtensor
from megatron.checkpoint.store.directory import OutputDirectory, new_checkpoint
from tests.support.checkpoint import samples, small_models
from tests.support.checkpoint.changed_checkpoints import flip_a_bit, without_manifest


class Lines:
    """A target of text files, one for each part, that notes in ``log`` which rank wrote what."""

    def __init__(
        self, log: Path, count: int = 6, fails: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._log, self._fails = log, fails
        self.parts = [
            Part(f"part{number}", 10 * (number + 1), self._writer(f"part{number}"))
            for number in range(count)
        ]

    def _writer(self, name: str) -> Callable[[Path, Progress], Any]:
        def write(staging: Path, progress: Progress) -> Any:
            if self._fails(name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            (staging / name).write_text(f"content of {name}")
            with open(self._log, "a") as log:
                log.write(f"{name} {dist.get_rank() if dist.is_initialized() else 0}\n")
            progress(10)
            return {"name": name, "notes": [f"note of {name}"]}

        return write

    def finish(self, staging: Path, results: dict[str, Any]) -> None:
        assert all(results[part.name]["name"] == part.name for part in self.parts)
        (staging / "end").write_text("all")


def convert_in(root: Path, identity: str | None = "a", **settings: Any) -> list[str]:
    """Convert to `out` in a folder, and return the notes."""
    target = Lines(root / "log", **settings)
    return convert(target, OutputDirectory(root / "out"), identity, show_progress=False)


def written(log: Path) -> list[str]:
    return sorted(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else []


def content(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(path.iterdir())}


COMPLETE = {"end": "all", **{f"part{number}": f"content of part{number}" for number in range(6)}}


def test_the_output_appears_when_it_is_complete(tmp_path: Path) -> None:
    notes = convert_in(tmp_path)
    assert content(tmp_path / "out") == COMPLETE
    assert notes == [f"note of part{number}" for number in range(6)]
    assert {path.name for path in tmp_path.iterdir()} == {"log", "out"}


def test_the_tracker_names_the_iteration(tmp_path: Path) -> None:
    output = new_checkpoint(tmp_path / "out", 7)
    convert(Lines(tmp_path / "log"), output, "a", show_progress=False)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert content(tmp_path / "out" / "iter_0000007") == COMPLETE


def killed_after(num_parts: int) -> Callable[[str], bool]:
    """Kill the process without a word in the middle of a part, as SIGKILL does."""
    seen: list[str] = []

    def fails(name: str) -> bool:
        seen.append(name)
        if len(seen) > num_parts:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return fails


def in_a_child(action: Callable[[], Any]) -> int:
    """Run the action in a forked process and return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def interrupted(tmp_path: Path, identity: str | None = "a") -> OutputDirectory:
    """Two parts are done, the third was begun."""
    status = in_a_child(lambda: convert_in(tmp_path, identity, fails=killed_after(2)))
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert written(tmp_path / "log") == ["part0", "part1"]
    output = OutputDirectory(tmp_path / "out")
    assert not output.final.exists()
    return output


def test_a_killed_conversion_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    output = interrupted(tmp_path)
    notes = convert_in(tmp_path)
    assert written(tmp_path / "log") == [f"part{number}" for number in range(6)]
    assert content(output.final) == COMPLETE
    assert len(notes) == 6  # those of the first run too


def test_an_error_of_a_continued_conversion_leaves_nothing(tmp_path: Path) -> None:
    output = interrupted(tmp_path)
    with pytest.raises(ConversionError, match="No space left"):
        convert_in(tmp_path, fails=lambda name: name == "part5")
    assert {path.name for path in tmp_path.iterdir()} == {"log"}
    convert_in(tmp_path)
    assert content(output.final) == COMPLETE


@pytest.mark.parametrize(("first", "second"), [(None, None), ("a", "b")], ids=["none", "another"])
def test_a_conversion_with_another_identity_or_none_begins_anew(
    first: str | None, second: str | None, tmp_path: Path
) -> None:
    output = interrupted(tmp_path, first)
    (output.staging / "left over").write_text("x")
    convert_in(tmp_path, second)
    assert written(tmp_path / "log").count("part0") == 2
    assert content(output.final) == COMPLETE


def test_a_conversion_killed_while_it_is_published_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(
            OutputDirectory, "publish", lambda self: os.kill(os.getpid(), signal.SIGKILL)
        )
        in_a_child(lambda: convert_in(tmp_path))
    assert not (tmp_path / "out").exists()
    convert_in(tmp_path)
    assert content(tmp_path / "out") == COMPLETE


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    output = new_checkpoint(tmp_path / "new" / "out", 3)
    with pytest.raises(ConversionError, match="No space left"):
        target = Lines(tmp_path / "log", fails=lambda name: name == "part3")
        convert(target, output, "a", show_progress=False)
    assert not output.final.exists() and not output.staging.exists()
    assert not list(tmp_path.rglob("*.txt")) and not list(tmp_path.rglob("part*"))


def test_a_failure_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: Lines, staging: Path, results: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Lines, "finish", finish)
    with pytest.raises(ConversionError, match="No space left"):
        convert_in(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"log"}


def test_fingerprints_tell_conversions_apart() -> None:
    assert fingerprint("a", 1, {"x": 1, "y": 2}) == fingerprint("a", 1, {"y": 2, "x": 1})
    others = [("a", 1), ("a", 2), ("b", 1), ("a", {"x": None})]
    assert len({fingerprint(*each) for each in others}) == 4


def convert_lines(root: str, fails_on: int | None = None) -> tuple[list[str], str]:
    """Job: notes and error."""
    try:
        return convert_in(Path(root), fails=lambda name: fails_on == dist.get_rank()), ""
    except ConversionError as error:
        return [], str(error)


def on_first(num_ranks: int) -> list[tuple[list[str], str]]:
    """No errors, and the notes where they are printed."""
    return [([f"note of part{number}" for number in range(6)], "")] + [([], "")] * (num_ranks - 1)


@pytest.mark.always("2")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_the_parts(ranks: Any, num_ranks: int, tmp_path: Path) -> None:
    results = ranks(num_ranks, convert_lines, str(tmp_path))
    assert results == on_first(num_ranks)
    assert content(tmp_path / "out") == COMPLETE
    lines = (tmp_path / "log").read_text().split()
    assert sorted(lines[::2]) == [f"part{number}" for number in range(6)]
    assert set(lines[1::2]) == set(map(str, range(num_ranks)))


def test_ranks_take_up_what_one_process_began(ranks: Any, tmp_path: Path) -> None:
    output = interrupted(tmp_path)
    ranks(2, convert_lines, str(tmp_path))
    assert written(tmp_path / "log") == [f"part{number}" for number in range(6)]
    assert content(output.final) == COMPLETE


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_its_parts_leaves_nothing_and_those_of_an_interrupted_conversion(
    ranks: Any, failing: int, tmp_path: Path
) -> None:
    error = ["this rank cannot read the source"] * 2
    assert ranks(2, fail_before, str(tmp_path), failing) == error
    assert list(tmp_path.iterdir()) == []
    interrupted(tmp_path)
    assert ranks(2, fail_before, str(tmp_path), failing) == error
    assert ranks(3, convert_lines, str(tmp_path)) == on_first(3)
    assert written(tmp_path / "log") == [f"part{number}" for number in range(6)]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_failing_rank_ends_all_with_one_message(
    ranks: Any, failing: int, tmp_path: Path
) -> None:
    results = ranks(2, convert_lines, str(tmp_path), fails_on=failing)
    assert results[0] == results[1]
    assert results[0][1].count("No space left") == 1 and f"rank {failing}" in results[0][1]
    assert {path.name for path in tmp_path.iterdir()} <= {"log"}
    assert ranks(2, convert_lines, str(tmp_path)) == on_first(2)


def fail_before(root: str, failing: int) -> str:
    """Job: one rank fails while it plans, the others are in the conversion by then; the error."""

    def action() -> None:
        if dist.get_rank() == failing:
            raise OSError("this rank cannot read the source")
        convert_in(Path(root))

    try:
        conversion.agreed(action, str)
    except ConversionError as error:
        return str(error)
    return ""


def convert_sample(source: str, target: str) -> None:
    """Job."""
    state = open_checkpoint(source).state()
    parts = fsdp_dtensor.target(state, choose_spelling(state))
    convert(parts, new_checkpoint(target, 3), "a", show_progress=False)


def test_two_ranks_write_what_one_writes(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = str(samples.torch_dist(samples.EXPERTS))
    monkeypatch.setattr(dcp_target, "PART_BYTES", 1 << 16)
    convert_sample(sample, str(tmp_path / "one"))
    ranks(2, convert_with_small_parts, sample, str(tmp_path / "two"))
    one, two = (open_checkpoint(tmp_path / name).stored for name in ("one", "two"))
    assert len(list(one.directory.glob("*.distcp"))) > 10
    assert not compare_entries(one, two).differs
    assert one.metadata.planner_data == two.metadata.planner_data


def convert_with_small_parts(source: str, target: str) -> None:
    """Job."""
    dcp_target.PART_BYTES = 1 << 16
    try:
        convert_sample(source, target)
    finally:
        dcp_target.PART_BYTES = 256 << 20


def test_a_damaged_source_leaves_no_output(tmp_path: Path) -> None:
    path = small_models.write(small_models.state_of(small_models.shapes_of()), tmp_path / "in")
    flip_a_bit(without_manifest(path), "output_layer.weight")
    with pytest.raises(ConversionError, match="checksum"):
        convert_sample(str(path), str(tmp_path / "out"))
    assert not list(tmp_path.rglob(".writing*"))
    assert not (tmp_path / "out" / "iter_0000003").exists()


@pytest.mark.exhaustive
def test_a_process_that_is_killed_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, out = samples.torch_dist(samples.DENSE), tmp_path / "out"
    words = ["convert-torch-dist-to-fsdp-dtensor", "--quiet", str(sample), str(out)]
    monkeypatch.setattr(dcp_target, "PART_BYTES", 1 << 14)
    journal = out / ".writing_iter_0000003" / ".conversion"
    child = os.fork()
    if child == 0:
        resolve = dcp_target.EntryPlanner.resolve_data

        def resolve_slowly(*args: Any) -> Any:
            time.sleep(0.05)
            return resolve(*args)

        monkeypatch.setattr(dcp_target.EntryPlanner, "resolve_data", resolve_slowly)
        try:
            main(words)
        finally:
            os._exit(1)
    try:
        limit = time.monotonic() + 300
        while len(list(journal.glob("0*[0-9]"))) < 3:
            assert os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < limit
            time.sleep(0.02)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    done = {path.name: path.stat().st_mtime_ns for path in journal.parent.glob("*.distcp")}
    finished = {f"__{int(path.name)}_0.distcp" for path in journal.glob("0*[0-9]")}
    assert not (out / "iter_0000003").exists()
    assert not (out / "latest_checkpointed_iteration.txt").exists()
    main(words, standalone_mode=False)
    after = {path.name: path.stat().st_mtime_ns for path in (out / "iter_0000003").glob("*.distcp")}
    assert len(finished) >= 3 and all(after[name] == done[name] for name in finished)
    convert_sample(str(sample), str(tmp_path / "other"))
    assert not compare_entries(
        open_checkpoint(out).stored, open_checkpoint(tmp_path / "other").stored
    ).differs


def test_a_full_disk_leaves_no_half_output(tmp_path: Path) -> None:
    sample = samples.writable_copy(samples.torch_dist(samples.DENSE), tmp_path / "in")
    before = {path: path.read_bytes() for path in sample.rglob("*") if path.is_file()}
    printed = tmp_path / "printed"

    def convert_with_small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 10, 200 << 10))
        words = ["convert-torch-dist-to-fsdp-dtensor", "--json", str(sample), f"{tmp_path}/out"]
        result = CliRunner().invoke(main, words)
        printed.write_text(json.dumps([result.exit_code, result.stdout, result.stderr]))

    in_a_child(convert_with_small_files)
    code, output, errors = json.loads(printed.read_text())
    assert code == 1, errors
    assert "Traceback" not in errors and "File too large" in errors
    assert output.count("\n") == 1 and '"error"' in output
    assert not list(tmp_path.glob("out/**/*"))
    assert {path: path.read_bytes() for path in sample.rglob("*") if path.is_file()} == before

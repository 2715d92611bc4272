# SPDX-License-Identifier: Apache-2.0
"""--profile writes traces of the steps that are asked for, and changes no number."""

import contextlib
import csv
import errno
import io
import json
import os
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.fsdp.trace import recording
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import SMALL, Record, refuse, train
from tests.support.rank_pool import run_ranks

LINE = f"{SMALL} {FSDP} --data-parallel-sharding-strategy optim_grads_params --exit-interval 4"
RANKS = "--profile-ranks 0 1"


def train_in(folder: Path, *command_lines: str) -> list[Record]:
    os.chdir(folder)
    return train(*command_lines)


def refuse_in(folder: Path, command_line: str) -> str:
    os.chdir(folder)
    return refuse(command_line)


@pytest.mark.exhaustive
def test_the_steps_between_start_and_end_are_recorded(tmp_path: Path) -> None:
    profile = (
        "--profile --profile-step-start 1 --profile-step-end 3 --profile-ranks 1"
        " --use-pytorch-profiler"
    )
    plain, profiled = run_ranks(2, train_in, tmp_path, LINE, f"{LINE} {profile}")[0]
    assert profiled.losses == plain.losses and len(plain.losses) == 4
    assert "profiling steps 1 to 2: see profile" in profiled.lines

    files = {path.name for path in (tmp_path / "profile").iterdir()}
    by_torch = files - {"rank1.json", "rank1.tsv"}
    assert len(by_torch) == len(files) - 2 == 1
    ranges = json.loads((tmp_path / "profile" / by_torch.pop()).read_text())["traceEvents"]
    names = {event["name"] for event in ranges}
    assert any(name.startswith("FSDP::unshard (") for name in names)
    assert json.loads((tmp_path / "profile" / "rank1.json").read_text())["traceEvents"]
    with (tmp_path / "profile" / "rank1.tsv").open() as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    reductions = Counter(row["unit"] for row in rows if row["track"] == "reduce")
    assert len(reductions) > 2
    assert set(reductions.values()) == {4}  # two steps of two microbatches
    assert {row["microbatch"] for row in rows if row["track"] == "reduce"} == {"0", "1"}


@pytest.mark.exhaustive
def test_a_profile_that_shows_nothing_is_told(tmp_path: Path) -> None:
    line = f"{SMALL} --exit-interval 2 --profile --profile-step-start 1 --profile-step-end 2"
    (record,) = run_ranks(1, train_in, tmp_path, line)[0]
    told = [line for line in record.lines if line.startswith("profiling")]
    assert told == [
        "profiling steps 1 to 1: see profile",
        "profiling: only --use-megatron-fsdp is traced; --use-pytorch-profiler shows this run",
    ]


def train_and_complain(folder: Path, command_line: str) -> tuple[int, str]:
    """Train where traces cannot be written; return the last iteration and what was complained."""
    errors = io.StringIO()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        contextlib.redirect_stderr(errors),
        patch.object(recording, "write_trace", side_effect=full),
    ):
        (record,) = train_in(folder, command_line)
    return record.iteration, errors.getvalue()


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [3, 9], ids=["in_mid_run", "at_its_end"])
def test_a_full_disk_loses_the_profile_and_not_the_last_checkpoint(
    tmp_path: Path, end: int
) -> None:
    line = f"{LINE} --save {tmp_path}/run --profile --profile-step-start 1 --profile-step-end {end}"
    for iteration, complaint in run_ranks(2, train_and_complain, tmp_path, f"{line} {RANKS}"):
        assert iteration == 4
        assert complaint.count("cannot be written, training continues without: [Errno 28]") == 1
    assert (tmp_path / "run" / "iter_0000004" / ".metadata").is_file()


def test_a_profile_that_cannot_be_written_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "profile").touch()
    # The last rank alone writes, but all ranks have the error.
    flags = "--profile --profile-step-start 0 --profile-ranks 1"
    errors = run_ranks(2, refuse_in, tmp_path, f"{LINE} {flags}")
    message = "ValueError: cannot write traces to profile: it is a file, not a directory"
    assert errors == [message, message]

# SPDX-License-Identifier: Apache-2.0
"""Traces: their files, their errors, ranges in torch.profiler, and ranks that differ."""

import contextlib
import io
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp import trace
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.trace.divergence import PublishedCollective, first_difference
from megatron.fsdp.trace.recorder import STORAGE, CollectiveError
from megatron.fsdp.trace.recording import COLUMNS, lane_for
from tests.support.fsdp.models import BATCH, WIDTH
from tests.support.fsdp.recorded_steps import build_recorded, record_step, train_step
from tests.support.fsdp.reference import Ranks, loss_of, on_ranks


def read_events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def test_every_rank_writes_a_chrome_trace_and_a_table(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, record_step, 3, "flat", 1, tmp_path / "new" / "traces")
    for rank in range(2):
        events = read_events(tmp_path / "new" / "traces" / f"rank{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        assert {event["ph"] for event in events} == {"M", "X", "C"}
        threads = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["name"] == "thread_name"
        }
        assert set(threads.values()) == {"compute", "gather", "reduce"}
        spans = [event for event in events if event["ph"] == "X"]
        for span in spans:
            assert span["ts"] >= 0 and span["dur"] >= 0 and span["tid"] in threads
        gathers = [span for span in spans if threads[span["tid"]] == "gather"]
        assert {"name": "all_gather root", "cat": "forward"}.items() <= gathers[0].items()
        arguments = {"bytes": 256, "dtype": "float32", "ranks": [0, 1], "microbatch": 0}
        assert arguments.items() <= gathers[0]["args"].items()
        sizes = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
        assert min(sizes) == 0 < max(sizes)

        lines = (tmp_path / "new" / "traces" / f"rank{rank}.tsv").read_text().splitlines()
        rows = [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines]
        assert tuple(rows[0]) == COLUMNS
        assert len(rows) - 1 == len(spans) + len(sizes)
        assert {"all_gather", "reduce_scatter", "allocate", "unshard"} <= {
            row["name"] for row in rows
        }


def test_spans_that_overlap_are_in_different_lanes() -> None:
    lanes: list[list[float]] = []
    spans = [(0, 10), (1, 4), (2, 5), (4, 9), (9, 12), (12, 13)]
    assert [lane_for(lanes, *span) for span in spans] == [0, 0, 1, 0, 1, 0]
    assert len(lanes) == 2


def record_files(folders: list[Path], ranks: list[int] | None) -> list[str]:
    with trace.record(folders[dist.get_rank()], ranks=ranks):
        dist.barrier()
    return sorted(path.name for path in folders[dist.get_rank()].iterdir())


def test_only_the_named_ranks_write_files(ranks: Ranks, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    assert ranks(2, record_files, folders, [1]) == [[], ["rank1.json", "rank1.tsv"]]


def error_of_record(folders: list[Path], **options: Any) -> str:
    with pytest.raises(ValueError) as caught, trace.record(folders[dist.get_rank()], **options):
        pytest.fail("the body must not run")
    assert not observe.observers
    return str(caught.value)


def test_a_file_in_the_place_of_the_directory_is_one_error(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    # One rank alone cannot write, as on a host of its own.
    for folders, reason in (
        ([file, file], "it is a file, not a directory"),
        ([tmp_path, file / "traces"], "Not a directory"),
    ):
        message = f"cannot write traces to {folders[1]}: {reason}"
        assert ranks(2, error_of_record, folders) == [message, message]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks expects a collection of ranks from 0 to 1 or None but got 0"),
        ({"ranks": [2]}, "ranks expects a collection of ranks from 0 to 1 or None but got [2]"),
        ({"ranks": "1"}, "ranks expects a collection of ranks from 0 to 1 or None but got '1'"),
    ],
    ids=str,
)
def test_wrong_options_are_one_error(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    assert ranks(2, error_of_record, [tmp_path] * 2, **options) == [message] * 2


@on_ranks(1)
def test_a_trace_inside_of_another_records_its_part() -> None:
    with trace.record() as outer:
        with trace.record() as inner:
            agree([])
        agree([])
    assert not observe.observers
    assert [each.name for each in outer.collectives] == ["all_gather_object"] * 4
    assert [each.name for each in inner.collectives] == ["all_gather_object"]


@on_ranks(2)
def test_memory_slots_are_allocated_once() -> None:
    """After the first step; then gradient shards alone are allocated and released."""
    model, optimizer = build_recorded(3, fsdp_double_buffer=True)
    steps = []
    for _ in range(2):
        with trace.record() as own:
            train_step(model, optimizer)
        entries = [entry for entry in own.entries if entry.track == STORAGE]
        steps.append([(entry.name, entry.num_bytes) for entry in entries])
    slots, (first, second) = model.memory_slots, steps
    assert set(slots["weights"]) & {size for name, size in first if name == "release"}
    for size in {*slots["weights"], *slots["gradients"]}:
        allocated, released = (first.count((name, size)) for name in ("allocate", "release"))
        assert allocated >= released + 1
    assert [name for name, _ in second] == ["allocate"] * 4 + ["release"] * 4
    assert sum(size for _, size in second[:4]) == sum(size for _, size in second[4:])


def test_nothing_is_wrapped_where_nothing_is_recorded() -> None:
    def collective(asynchronous: bool) -> None:
        raise AssertionError

    assert observe.work("unit", "work") is observe.NOTHING
    assert observe.observing("broadcast", None, None) is observe.NOTHING
    operand = torch.empty(0)
    assert observe.observed("gather", "all_gather", (operand,), None, collective) is collective


@on_ranks(2)
def test_ranges_of_torch_profiler_name_unit_and_phase() -> None:
    model, optimizer = build_recorded(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train_step(model, optimizer)
    names = {event.key for event in profiler.key_averages()}
    for unit in ("root", "blocks.0", "blocks.1", "blocks.2"):
        assert {
            f"FSDP::forward ({unit}, forward)",
            f"FSDP::unshard ({unit}, forward)",
            f"FSDP::unshard ({unit}, backward)",
            f"FSDP::accumulate gradients ({unit}, backward)",
            f"FSDP::reduce ({unit}, backward)",
        } <= names


def mesh_of_a_new_group() -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("dp_shard",))


def end_patience(mesh: DeviceMesh) -> None:
    """Let collectives that a rank begins from now on fail soon, when all earlier ones are over."""
    dist.barrier()  # of another group
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), mesh.get_group())


def leave_one_rank_behind(directory: Path) -> str:
    """Train on two ranks, of which one runs no backward; return what each of them tells."""
    mesh = mesh_of_a_new_group()
    model, optimizer = build_recorded(3, mesh)
    train_step(model, optimizer)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), trace.record(directory):
        loss = loss_of(model(torch.randn(BATCH, WIDTH)))
        end_patience(mesh)
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveError) as caught:
                loss.backward()
            assert "imed out" in str(caught.value.__cause__)
            return str(caught.value)
        deadline = time.monotonic() + 60
        while "last collectives" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    return printed.getvalue()


@pytest.mark.exhaustive
def test_a_timeout_names_the_first_rank_that_differs(ranks: Ranks, tmp_path: Path) -> None:
    error, printed = ranks(2, leave_one_rank_behind, tmp_path)
    what = "all_gather of 448 bytes float32 of blocks.1"
    assert error.startswith("failed: all_gather 4 of ranks [0, 1]: 448 bytes float32, blocks.1")
    assert error.endswith(
        "rank 1 is the first that differs, in collective 4 of ranks [0, 1]:\n"
        f"  rank 0: {what}\n"
        "  rank 1: not started"
    )
    last = "all_gather 3 of ranks [0, 1]: 448 bytes float32, blocks.2, forward, microbatch 0"
    assert "the last collectives of rank 0:" in error and last in error
    assert printed.startswith("the last collectives of rank 1:\n") and last in printed
    # What was recorded until then is written.
    cells = [event["args"] for event in read_events(tmp_path / "rank0.json")]
    under_way = [each["unit"] for each in cells if each.get("is_over") is False]
    assert under_way == ["blocks.1", "blocks.2"]  # a gather, and the reduction behind it


def end_one_rank_early(fails: bool) -> str:
    """Train on two ranks, of which one has no more data, or fails; return what the other tells."""
    mesh = mesh_of_a_new_group()
    model, optimizer = build_recorded(3, mesh)
    train_step(model, optimizer)
    try:
        with trace.record():
            train_step(model, optimizer)
            end_patience(mesh)
            if dist.get_rank() == 0:
                train_step(model, optimizer)
            elif fails:
                raise ZeroDivisionError
    except (CollectiveError, ZeroDivisionError) as error:
        return str(error)
    return ""


@pytest.mark.always("ends")
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_a_rank_that_has_ended_its_recording_is_compared_too(ranks: Ranks, fails: bool) -> None:
    error, _ = ranks(2, end_one_rank_early, fails)
    assert "no answer" not in error
    assert "rank 1 is the first that differs, in collective 10 of ranks [0, 1]:" in error
    assert error.endswith("rank 1: not started")


def sequence(
    *whats: str, ranks: tuple[int, ...] = (0, 1, 2), first: int = 0, begin: float = 0.0
) -> list[PublishedCollective]:
    return [
        PublishedCollective(ranks, first + place, begin + place, what)
        for place, what in enumerate(whats)
    ]


@pytest.mark.parametrize(
    ("sequences", "difference"),
    [
        ({0: sequence("a", "b"), 1: sequence("a", "b"), 2: sequence("a", "b")}, None),
        (
            {0: sequence("a", "c"), 1: sequence("a", "b"), 2: sequence("a", "b")},
            "rank 0 is the first that differs, in collective 1 of ranks [0, 1, 2]:"
            "\n  rank 0: c\n  rank 1: b\n  rank 2: b",
        ),
        (
            {0: sequence("a"), 1: sequence("a", "b"), 2: sequence("a", "b")},
            "rank 0 is the first that differs, in collective 1 of ranks [0, 1, 2]:"
            "\n  rank 0: not started\n  rank 1: b\n  rank 2: b",
        ),
        # Rank 0 has forgotten its first collectives, and rank 1 does not answer.
        (
            {0: sequence("b", "c", first=1), 2: sequence("a", "b", "d")},
            "rank 2 is the first that differs, in collective 2 of ranks [0, 1, 2]:"
            "\n  rank 0: c\n  rank 2: d",
        ),
        # Rank 1 has skipped a collective with rank 0, which therefore never meets rank 2.
        (
            {
                0: sequence("a", ranks=(0, 1), begin=1.0),
                1: [],
                2: sequence("b", ranks=(0, 2), begin=2.0),
            },
            "rank 1 is the first that differs, in collective 0 of ranks [0, 1]:"
            "\n  rank 0: a\n  rank 1: not started",
        ),
        ({0: [], 1: []}, None),
    ],
    ids=["same", "other_operation", "behind", "forgotten", "two_groups", "none"],
)
def test_the_first_difference_is_found(
    sequences: dict[int, list[PublishedCollective]], difference: str | None
) -> None:
    assert first_difference(sequences) == difference

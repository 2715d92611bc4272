# SPDX-License-Identifier: Apache-2.0
"""Traces: their files, their errors, ranges in torch.profiler."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp import trace
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.trace.recorder import STORAGE
from megatron.fsdp.trace.recording import COLUMNS, lane_for
from tests.support.fsdp.recorded_steps import build_recorded, record_step, train_step
from tests.support.fsdp.reference import Ranks, on_ranks


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


@on_ranks(2)
def test_a_trace_inside_of_another_records_its_part() -> None:
    with trace.record() as outer:
        with trace.record() as inner:
            agree([])
        agree([])
    assert not observe.observers
    names = [each.name for each in outer.collectives]
    assert names.count("all_reduce") > 2 and names[-1] == "all_reduce"
    assert [each.name for each in inner.collectives] == ["all_reduce"]


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


def test_nothing_is_wrapped_before_a_model_is_sharded() -> None:
    def collective(asynchronous: bool) -> None:
        raise AssertionError

    assert observe.failure_observer is None
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

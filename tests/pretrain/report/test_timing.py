# SPDX-License-Identifier: Apache-2.0
"""Times of phases: on the log and in TensorBoard at each interval, and nothing at level 0."""

import re
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from megatron.core import timers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.mcore_adapter import cpu
from megatron.pretrain.report.timing import BATCH, PhaseTimes
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import SMALL, Record, pretrain, trained
from tests.support.rank_pool import run_ranks

SHARDED = f"{SMALL} {FSDP} --data-parallel-sharding-strategy optim_grads_params"
LINE = f"{SHARDED} --log-interval 2 --exit-interval 4"
MIN_AND_MAX = re.compile(r"^    (\S+) \.+: \((\d+\.\d+), (\d+\.\d+)\)$", re.MULTILINE)


def times_of(text: str) -> dict[str, tuple[float, float]]:
    """Return name -> milliseconds of the fastest and of the slowest rank."""
    return {name: (float(low), float(high)) for name, low, high in MIN_AND_MAX.findall(text)}


def scalars(folder: Path) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.exhaustive
def test_phases_of_a_sharded_run_are_timed_on_the_log_and_in_tensorboard(tmp_path: Path) -> None:
    line = f"{LINE} --tensorboard-dir {tmp_path}/board"
    timed = f"{line} --timing-log-level 2 --log-timers-to-tensorboard --save {tmp_path}/run"
    plain, record = trained(LINE, f"{timed} --save-interval 4")
    assert record.losses == plain.losses
    texts = [each for each in record.lines if each.startswith("(min, max) time across ranks (ms)")]
    load, first, last, second, save = map(times_of, texts)
    assert set(load) == {"load-checkpoint"} and set(save) == {"save-checkpoint"}
    assert set(first) == set(last) == set(second)
    phases = {"forward-backward", "optimizer", "all-grads-sync", "optimizer-inner-step"}
    parts = {"forward-compute", "backward-compute", "batch-generator"}
    assert phases | parts | {"interval-time"} <= set(second)
    for low, high in second.values():
        assert 0 <= low <= high
    for name in phases | parts:
        assert second[name][1] > 0 or name == "all-grads-sync"  # over when backward is
    compute = second["forward-compute"][1] + second["backward-compute"][1]
    assert compute < 1.1 * second["forward-backward"][1] < 1.1 * second["interval-time"][1]

    points = scalars(tmp_path / "board")
    assert points["forward-backward-time"] == [1, 2, 4]
    assert points["save-checkpoint-time"] == [4] and points["load-checkpoint-time"] == [0]
    assert points["iteration-time"] == points["throughput"] == points["mfu"] == [1, 2, 4]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ("max", r"max time across ranks \(ms\):\n(    .*\n)*    optimizer \.+: \d+\.\d\d"),
        ("all", r"times across ranks \(ms\):\n( .*\n)*  optimizer:\n +rank  0: .*\n +rank  1: "),
    ],
)
def test_times_of_ranks_are_shown_as_asked(option: str, shown: str) -> None:
    line = f"{LINE} --exit-interval 2 --timing-log-level 1 --timing-log-option {option}"
    lines = trained(f"{line} --no-barrier-with-level-1-timing")[0].lines
    assert any(re.search(shown, each) for each in lines)
    assert not any("forward-compute" in each for each in lines)


def count_collectives(command_line: str) -> tuple[Counter[str], Record]:
    """Job: return how often a run calls the collectives that timing needs, and its record."""
    counts: Counter[str] = Counter()
    barrier, gather = dist.barrier, timers.dist_all_gather_func

    def counted_barrier(*args: object, **kwargs: object) -> object:
        counts["barrier"] += 1
        return barrier(*args, **kwargs)

    def counted_gather(*args: object, **kwargs: object) -> object:
        counts["all-gather"] += 1
        return gather(*args, **kwargs)

    with (
        patch.object(dist, "barrier", counted_barrier),
        patch.object(timers, "dist_all_gather_func", counted_gather),
    ):
        return counts, pretrain(command_line)


@pytest.mark.exhaustive
def test_level_0_calls_no_collective_and_level_1_waits_unless_told() -> None:
    line = f"{LINE} --exit-interval 2"
    plain, _ = run_ranks(2, count_collectives, line)[0]
    waiting, _ = run_ranks(2, count_collectives, f"{line} --timing-log-level 1")[0]
    eager, _ = run_ranks(
        2, count_collectives, f"{line} --timing-log-level 1 --no-barrier-with-level-1-timing"
    )[0]
    assert plain["all-gather"] == 0
    assert waiting["all-gather"] == eager["all-gather"] == 3  # after loading, first and last line
    assert waiting["barrier"] > eager["barrier"] == plain["barrier"]


@pytest.mark.exhaustive
def test_an_evaluation_is_not_timed() -> None:
    line = LINE.replace("--eval-iters 0", "--eval-iters 4 --eval-interval 1")
    record = trained(f"{line} --timing-log-level 2")[0]
    times = [times_of(each) for each in record.lines if "forward-compute" in each]
    assert record.evaluations["validation"] and len(times) == 3
    for each in times:
        assert each["forward-compute"][1] < each["interval-time"][1]


def measure_paused() -> list[bool]:
    """Job: whether there is a timer of batches after a paused context, and after another."""
    args = Namespace(
        timing_log_level=2,
        timing_log_option="max",
        barrier_with_L1_time=False,
        log_timers_to_tensorboard=False,
        use_megatron_fsdp=False,
    )
    cpu.install()  # timers synchronise with the device
    times = PhaseTimes(args, print)
    assert times.timers is not None
    found = []
    for context in (times.paused(), nullcontext()):
        with context, times.measured(BATCH, level=2):
            pass
        found.append(BATCH in times.timers._timers)
    return found


def test_nothing_is_measured_while_times_are_paused() -> None:
    assert run_ranks(1, measure_paused)[0] == [False, True]

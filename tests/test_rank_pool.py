# SPDX-License-Identifier: Apache-2.0
"""The pool of warm ranks: ordered results, failures named at once, no leaks between tests."""

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.engine import collectives
from megatron.mcore_adapter import cpu
from tests.support import megatron_release, rank_pool
from tests.support.fork_servers import Packages
from tests.support.model_parallel import ONE_AXIS, initialize
from tests.support.rank_pool import MAX_GROUPS, RankFailure, run_apart, run_ranks, shut_down
from tests.support.rank_process import JOBS_BETWEEN_FULL_COLLECTIONS

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="module")
def fresh_ranks() -> None:
    """Begin without what other files' jobs left: ranks are replaced once they have many threads."""
    shut_down()


def process_id() -> int:
    return os.getpid()


def rank_and_world_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(value: torch.Tensor, *, scale: float) -> torch.Tensor:
    result = value * scale * (dist.get_rank() + 1)
    dist.all_reduce(result)
    return result


def raise_on_rank_one() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise KeyError("no such parameter")
    dist.all_reduce(torch.ones(1))


def raise_everywhere() -> None:
    raise ValueError("the same everywhere")


def print_a_line(line: str) -> None:
    print(line)


def abort_on_rank_one() -> None:
    print_a_line("a warning of this job")
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)


def leave_a_mess() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.disable()
    logging.getLogger("megatron.fsdp").setLevel(logging.ERROR)
    sys.path.append("/left/behind")


def look_for_a_mess() -> tuple[object, ...]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(
        torch.ones(())
    )  # refused where one of another shape was left
    dist.all_reduce(torch.ones(1))
    return (
        parallel_state.model_parallel_is_initialized(),
        torch.get_default_dtype(),
        torch.rand(1).item(),
        "LEFT_BEHIND" in os.environ,
        os.getcwd(),
        signal.getsignal(signal.SIGTERM),
        logging.root.manager.disable,
        logging.getLogger("megatron.fsdp").level,
        "/left/behind" in sys.path,
    )


def patch_torch() -> None:
    torch.relu = torch.tanh


def patch_the_engine() -> None:
    collectives.agree = print


def hook_all_modules() -> None:
    nn.modules.module.register_module_forward_hook(print)


def make_groups(count: int, members: list[int]) -> None:
    for _ in range(count):
        dist.new_group(members)


def count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def threads_of_new_groups(count: int) -> int:
    before = psutil.Process().num_threads()
    make_groups(count, [0, 1])
    return psutil.Process().num_threads() - before


def initialize_pipeline() -> None:
    """Of three stages, whose middle one is in fewer groups than the others."""
    initialize(Namespace(**{**vars(ONE_AXIS), "pipeline_model_parallel_size": 3}))


class Cycle:
    """Freed by nothing but a garbage collection."""

    watched: ClassVar[list["weakref.ref[Cycle]"]] = []
    held: ClassVar[list["Cycle"]] = []

    def __init__(self) -> None:
        self.itself = self


def leave_a_cycle(held: bool) -> None:
    cycle = Cycle()
    Cycle.watched.append(weakref.ref(cycle))
    if held:
        Cycle.held.append(cycle)


def let_go() -> None:
    Cycle.held.clear()


def num_cycles_left() -> int:
    return sum(reference() is not None for reference in Cycle.watched)


def take_the_world_down() -> None:
    dist.destroy_process_group()


def return_something_unpicklable() -> object:
    return lambda: None


def warn_from(module: str) -> None:
    warnings.warn_explicit("going away", FutureWarning, "file.py", 1, module=module)


def start_a_child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    assert run_ranks(world_size, rank_and_world_size) == [
        (rank, world_size) for rank in range(world_size)
    ]


def test_tensors_travel_by_value_and_collectives_work() -> None:
    results = run_ranks(2, sum_over_ranks, torch.arange(3.0), scale=2.0)
    for result in results:
        torch.testing.assert_close(result, torch.tensor([0.0, 6.0, 12.0]))


def test_ranks_stay_warm_between_jobs() -> None:
    assert run_ranks(2, process_id) == run_ranks(2, process_id)


def test_failure_of_one_rank_is_noticed_while_the_other_waits_in_a_collective() -> None:
    before = run_ranks(2, process_id)
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, raise_on_rank_one, timeout=300)
    assert time.monotonic() - start < 100
    message = str(failure.value)
    assert message.startswith("rank 1 of 2 failed:")
    assert "in raise_on_rank_one" in message and "KeyError: 'no such parameter'" in message
    assert "rank 0 was still running" in message and "all_reduce" in message
    assert all(is_gone(pid) for pid in before)
    assert set(run_ranks(2, process_id)).isdisjoint(before)


def test_same_failure_of_all_ranks_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "GRACE", 60.0)  # both report, however slow the machine is
    with pytest.raises(RankFailure, match="ranks 0, 1 of 2 failed") as failure:
        run_ranks(2, raise_everywhere)
    assert str(failure.value).count("ValueError: the same everywhere") == 1


def test_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(
        RankFailure, match=r"rank 1 of 2 failed:\nthe process died with exit code 7"
    ):
        run_ranks(2, die_on_rank_one, timeout=60)
    assert run_ranks(2, rank_and_world_size) == [(0, 2), (1, 2)]


def test_rank_that_aborts_shows_where_and_what_it_printed_in_this_job_and_the_one_before() -> None:
    run_ranks(2, print_a_line, "a warning of the job before")
    with pytest.raises(RankFailure, match="exit code -6") as failure:
        run_ranks(2, abort_on_rank_one, timeout=60)
    message = str(failure.value)
    assert "a warning of this job" in message
    assert "Fatal Python error: Aborted" in message and "in abort_on_rank_one" in message
    assert "rank 1 had printed in the job before:\na warning of the job before" in message


def test_rank_killed_between_jobs_is_reported_and_replaced() -> None:
    os.kill(run_ranks(2, process_id)[0], signal.SIGKILL)
    with pytest.raises(
        RankFailure, match="rank 0 of 2 failed:\nthe process died with exit code -9"
    ):
        run_ranks(2, rank_and_world_size)
    assert run_ranks(2, rank_and_world_size) == [(0, 2), (1, 2)]


@pytest.mark.exhaustive
def test_timeout_shows_the_stack_of_the_rank_that_hangs() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 0 of 2 did not finish within 3 s") as failure:
        run_ranks(2, hang_on_rank_zero, timeout=3)
    assert time.monotonic() - start < 100
    assert "in hang_on_rank_zero" in str(failure.value)
    assert "rank 1 was" not in str(failure.value)


def test_job_does_not_leak_into_the_next_one() -> None:
    clean = run_ranks(2, look_for_a_mess)
    run_ranks(2, leave_a_mess)
    assert run_ranks(2, look_for_a_mess) == clean
    defaults = (signal.SIG_DFL, 0, logging.NOTSET, False)
    assert clean == [(False, torch.float32, clean[0][2], False, os.getcwd(), *defaults)] * 2


@pytest.mark.seldom("hook_all_modules")
@pytest.mark.parametrize("job", [patch_torch, patch_the_engine, hook_all_modules, cpu.install])
def test_ranks_that_a_job_has_changed_for_good_are_replaced(job: Callable[[], object]) -> None:
    before = run_ranks(1, process_id)
    run_ranks(1, job)
    assert run_ranks(1, process_id) != before


@pytest.mark.always("on some ranks only")
@pytest.mark.parametrize(
    ("count", "members"), [(MAX_GROUPS, [0, 1]), (1, [0])], ids=["too many", "on some ranks only"]
)
def test_world_with_worn_groups_is_rebuilt(count: int, members: list[int]) -> None:
    before = run_ranks(2, process_id)
    run_ranks(2, make_groups, count, members)
    assert run_ranks(2, count_groups) == [1, 1]
    assert run_ranks(2, process_id) == before


def test_groups_share_the_thread_that_polls() -> None:
    assert run_ranks(2, threads_of_new_groups, 5) == [2 * 5] * 2


def test_a_layout_is_kept_though_its_ranks_are_in_different_numbers_of_groups() -> None:
    run_ranks(3, initialize_pipeline)
    counts = run_ranks(3, count_groups)
    assert counts == [counts[0]] * 3 and counts[0] > 1
    run_ranks(3, initialize_pipeline)
    assert run_ranks(3, count_groups) == counts


def test_what_a_job_leaves_is_collected_before_the_next_one_and_what_is_let_go_later_in_time() -> (
    None
):
    run_ranks(1, leave_a_cycle, held=False)
    assert run_ranks(1, num_cycles_left) == [0]
    run_ranks(1, leave_a_cycle, held=True)
    assert run_ranks(1, num_cycles_left) == [1]
    run_ranks(1, let_go)
    assert [0] in [run_ranks(1, num_cycles_left) for _ in range(JOBS_BETWEEN_FULL_COLLECTIONS)]


def test_world_taken_down_by_a_job_is_rebuilt_with_the_same_processes() -> None:
    before = run_ranks(2, process_id)
    run_ranks(2, take_the_world_down)
    assert run_ranks(2, rank_and_world_size) == [(0, 2), (1, 2)]
    assert run_ranks(2, process_id) == before


def test_warning_in_our_modules_is_an_error_in_a_rank() -> None:
    with pytest.raises(RankFailure, match="FutureWarning: going away"):
        run_ranks(1, warn_from, "megatron.fsdp.engine.collectives")
    assert run_ranks(1, warn_from, "megatron.core.optimizer") == [None]


def test_warning_in_our_modules_is_an_error_here_too() -> None:
    with pytest.raises(FutureWarning, match="going away"):
        warn_from("megatron.pretrain.model")


def test_child_of_a_rank_goes_with_it() -> None:
    children = run_ranks(2, start_a_child)
    with pytest.raises(RankFailure):
        run_ranks(2, raise_everywhere)
    assert all(is_gone(pid) for pid in children)


def test_bad_calls_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="world size of 1 to 8 but got 9"):
        run_ranks(9, process_id)
    with pytest.raises(ValueError, match="top level of its module"):
        run_ranks(2, lambda: None)
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(1, return_something_unpicklable)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_no_rank_outlives_the_test_process(ending: signal.Signals) -> None:
    """Start two ranks that hang in a collective, and end the process that started them."""
    program = """
import signal, threading, time, psutil
from tests.support.rank_pool import run_ranks
from tests.test_rank_pool import hang_on_rank_zero, process_id
if __name__ == "__main__":
    # A shell may have started the tests in the background, where interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_ranks(2, process_id)
    family = [child.pid for child in psutil.Process().children(recursive=True)]
    threading.Timer(0.5, lambda: print(*family, flush=True)).start()
    run_ranks(2, hang_on_rank_zero)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    family = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(ending)
    assert process.wait(timeout=300) != 0  # it may take a while beside other work
    assert len(family) >= 3 and all(is_gone(pid) for pid in family)


# ---- other packages, and processes without a world


def release_of_megatron_core() -> str:
    return importlib.import_module("megatron.core.package_info").__version__


@pytest.mark.exhaustive
def test_ranks_of_a_release_have_it_beside_those_of_the_installed_one() -> None:
    newest = megatron_release.RELEASES[-1]
    megatron_release.require(newest)
    installed = run_ranks(2, release_of_megatron_core)
    found = run_ranks(2, release_of_megatron_core, packages=Packages(newest))
    assert found == [newest] * 2 != installed
    assert run_ranks(2, release_of_megatron_core) == installed
    assert newest not in os.environ.get("PYTHONPATH", "")


def forks_a_process() -> tuple[bool, int]:
    child = os.fork()
    if child == 0:
        os._exit(3)
    return dist.is_initialized(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_apart_has_no_world_and_may_fork() -> None:
    assert run_apart(forks_a_process) == (False, 3)

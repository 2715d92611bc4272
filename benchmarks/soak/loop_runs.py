# SPDX-License-Identifier: Apache-2.0
"""Runs of either training loop on several ranks, forked from a process that has imported it.

found = run(loop_of("megatron-lm", "0.18.2"), 2, "--use-megatron-fsdp ...")
found.steps[3]      # loss and gradient norm of the third step, not rounded
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pretrain_gpt
from benchmarks.parity import loop_ranks
from benchmarks.soak.loops import Loop
from megatron.mcore_adapter.run.run_state import TrainedParts
from tests.support.fork_servers import Packages
from tests.support.rank_pool import run_apart
from tests.support.warm_programs import free_port

TIMEOUT = 300.0
AtLoad = Callable[[Callable[[], object], TrainedParts], Any]
"""Called in place of a load, with the load and what it loads into; what it returns is kept."""


@dataclass
class Found:
    """The facts that a run has told.

    Attributes:
        loaded: iteration that it began at, None if it did not come so far.
        steps: iteration -> loss and gradient norm.
        failed: first rank that failed, None if none did.
        output: what all ranks have printed, one after the other.
        kept: what `AtLoad` returned, by rank.
    """

    loaded: int | None = None
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    failed: int | None = None
    output: str = ""
    kept: list[Any] = field(default_factory=list)

    @property
    def error(self) -> str:
        """The line that says why the run failed, empty if it did not."""
        if self.failed is None:
            return ""
        lines = [line for line in self.output.splitlines() if line.strip()]
        told = [line for line in lines if "error: " in line or line.startswith("error")]
        raised = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
        return [*(raised or lines[-1:]), *told][-1]


def run(
    loop: Loop,
    num_ranks: int,
    line: str,
    *,
    capability: tuple[int, int] | None = None,
    emerging_optimizers: bool = False,
    sigterm_at: int | None = None,
    at_load: tuple[AtLoad, Any] | None = None,
) -> Found:
    """Run a loop on some ranks.

    Args:
        loop: the loop, with its release.
        num_ranks: number of ranks.
        line: command line of pretrain_gpt.py.
        capability: of the emulated device of Transformer Engine; None without that package.
        emerging_optimizers: with that package.
        sigterm_at: iteration after which each rank gets SIGTERM.
        at_load: function to call in place of the load, and its last argument; the run ends then.
    """
    packages = Packages(loop.release, capability, emerging_optimizers)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (loop, num_ranks, line, Path(folder), sigterm_at, at_load)
        found: Found = run_apart(_run, *arguments, packages=packages, timeout=TIMEOUT)
    return found


def _run(
    loop: Loop,
    num_ranks: int,
    line: str,
    folder: Path,
    sigterm_at: int | None,
    at_load: tuple[AtLoad, Any] | None,
) -> Found:
    """Job: fork the ranks and wait for their end."""
    loop.import_modules()
    port = str(free_port())
    children = {}
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            place |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_PORT": port}
            os.environ.update(place, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
            _become_rank(loop, line, folder / str(rank), sigterm_at, at_load)
        children[child] = rank
    found = Found(failed=loop_ranks.wait_for(children))
    facts = []
    for rank in range(num_ranks):
        told = folder / f"{rank}.jsonl"
        facts += (
            [json.loads(each) for each in told.read_text().splitlines()] if told.exists() else []
        )
        found.output += (folder / f"{rank}.log").read_text(errors="replace")
        kept = folder / f"{rank}.kept"
        found.kept += [pickle.loads(kept.read_bytes())] if kept.exists() else []
    if found.failed is not None:
        found.output += (folder / f"{found.failed}.log").read_text(errors="replace")
    for fact in facts:
        if "loaded" in fact:
            found.loaded = fact["loaded"]
        elif fact["step"][1] is not None:
            found.steps[fact["step"][0]] = (fact["step"][1], fact["step"][2])
    return found


def _become_rank(
    loop: Loop,
    line: str,
    output: Path,
    sigterm_at: int | None,
    at_load: tuple[AtLoad, Any] | None,
) -> NoReturn:
    """Run the program in this process, which was forked for it."""
    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    told = Path(f"{output}.jsonl")

    def tell(**facts: object) -> None:
        with told.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def tell_step(iteration: int, *values: float | None) -> None:
        tell(step=(iteration, *values))
        if iteration == sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def act(load: Callable[[], object], parts: TrainedParts) -> None:
        assert at_load is not None
        Path(f"{output}.kept").write_bytes(pickle.dumps(at_load[0](load, parts, at_load[1])))
        os._exit(0)

    loop.on_load(lambda iteration, history: tell(loaded=iteration))
    loop.on_step(tell_step)
    if at_load is not None:
        loop.around_load(act)
    sys.argv[:] = [pretrain_gpt.__file__, *loop.words(line)]
    status = 1
    try:
        with loop_ranks.join_no_collectives() if _has_engine() else nullcontext():
            status = pretrain_gpt.main()
    except SystemExit as end:
        status = int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _has_engine() -> bool:
    return "transformer_engine" in sys.modules

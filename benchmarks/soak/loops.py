# SPDX-License-Identifier: Apache-2.0
"""The two training loops that suites run: how a run is started, and what it tells of itself.

Suites are written once. What differs between this program's loop and Megatron-LM's is here, as
hooks that are set before a run begins, in its process.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import megatron.core
import torch.distributed as dist

import pretrain_gpt
from megatron.mcore_adapter.checkpoints import checkpointing
from megatron.mcore_adapter.run.run_state import TrainedParts
from megatron.pretrain import megatron_lm_loop
from megatron.pretrain.megatron_lm_loop import MEGATRON_LM, OWN
from megatron.pretrain.model.forward_step import ForwardStep
from megatron.pretrain.report.report import Report
from tests.support import megatron_release
from tests.support.warm_programs import free_port

NULL_TOKENIZER = re.compile(r"--tokenizer-type NullTokenizer --vocab-size (\d+)")
History = list[dict[str, float]]
OnLoad = Callable[[int, History | None], None]
"""Called with the iteration at which a run begins, and with the losses that it then has kept."""
OnStep = Callable[[int, float | None, float | None], None]
"""Called with iteration, loss (on ranks of the last pipeline stage) and gradient norm."""
AroundLoad = Callable[[Callable[[], object], TrainedParts], None]
"""Called with the load, which may be repeated, and with what it loads into."""


@dataclass(frozen=True)
class Loop:
    """A training loop, and the release of Megatron-Core that it runs on.

    Args:
        release: such as "0.19.2"; None for the installed one.
    """

    release: str | None = None
    name = OWN
    keeps_history = True
    """True if a run writes its losses beside its checkpoints."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that imports the release."""
        return {} if self.release is None else megatron_release.environment(self.release)

    def words(self, line: str) -> list[str]:
        """Return the command line of pretrain_gpt.py that starts this loop."""
        return shlex.split(line)

    def enter(self) -> None:
        """Make this process one that imports the release, by starting Python again if need be."""
        if self.release is None:
            return
        folder = megatron_release.unpack(self.release)
        if Path(megatron.core.__file__).is_relative_to(folder):
            return
        variables = {**os.environ, **self.environment}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)

    def import_modules(self) -> None:
        """Import what every run would import anew after its fork."""

    # ---- in the process of a run

    def run(self, line: str) -> None:
        """Train on the one rank that this process is, to the end, and raise what ends the run."""
        from tests.support.pretrain.training_runs import pretrain

        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        pretrain(line)

    def set_timeout(self, seconds: float) -> None:
        """Let collectives fail after so many seconds; the flag counts minutes."""
        parse = pretrain_gpt.parse_arguments

        def parse_with_timeout(*args: Any, **kwargs: Any) -> Any:
            found, notes = parse(*args, **kwargs)
            found.distributed_timeout_minutes = seconds / 60
            return found, notes

        pretrain_gpt.parse_arguments = parse_with_timeout

    def before_forward(self, act: Callable[[int], None]) -> None:
        """Call a function with the number of finished iterations before each microbatch."""
        forward = ForwardStep.__call__

        def forward_after(self: ForwardStep, *args: Any) -> Any:
            act(self._iteration)
            return forward(self, *args)

        ForwardStep.__call__ = forward_after

    def on_load(self, tell: OnLoad) -> None:
        """Call a function when a run has loaded its checkpoint, or found that there is none."""
        begin = Report.begin

        def begin_and_tell(self: Report, progress: Any) -> None:
            begin(self, progress)
            tell(progress.iteration, self._history.entries)

        Report.begin = begin_and_tell

    def around_load(self, act: AroundLoad) -> None:
        """Call a function in place of the load of a checkpoint."""
        load = checkpointing.load

        def load_by(args: Any, parts: TrainedParts, log: Any) -> Any:
            found = []
            act(lambda: found.append(load(args, parts, log)), parts)
            return found[-1]

        checkpointing.load = load_by

    def on_step(self, tell: OnStep) -> None:
        """Call a function after every step."""
        step = Report.step

        def step_and_tell(self: Report, progress: Any, values: Any, *args: Any, **kw: Any) -> None:
            step(self, progress, values, *args, **kw)
            tell(progress.iteration, values["lm loss"], values["grad-norm"])

        Report.step = step_and_tell


@dataclass(frozen=True)
class MegatronLmLoop(Loop):
    """Megatron-LM's loop. Its modules may only be imported when the drop-in is installed."""

    name = MEGATRON_LM
    keeps_history = False

    def words(self, line: str) -> list[str]:
        """Return the command line of pretrain_gpt.py that starts this loop.

        Newer releases count the end of a document among the ids of NullTokenizer, and this
        program's data sets have one more id then.
        """
        found = NULL_TOKENIZER.search(line)
        is_exact = "--make-vocab-size-divisible-by 1 " in line and "--padded-vocab-size" not in line
        rows = ["--padded-vocab-size", str(int(found[1]) + 1)] if found and is_exact else []
        return [*shlex.split(line), *rows, megatron_lm_loop.FLAG, MEGATRON_LM]

    def import_modules(self) -> None:
        """Import what every run would import anew after its fork."""
        from benchmarks.parity import loop_ranks

        loop_ranks.warm_up()

    def run(self, line: str) -> None:
        """Train on the one rank that this process is, to the end, and raise what ends the run."""
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        sys.argv[:] = [pretrain_gpt.__file__, *self.words(line)]
        try:
            code = pretrain_gpt.main()
        except SystemExit as end:  # of a run that stops before its last iteration
            code = int(bool(end.code))
        if code:
            raise RuntimeError(f"the program ended with {code}")

    def set_timeout(self, seconds: float) -> None:
        """Let collectives fail after so many seconds; the flag counts minutes."""

        def set_it() -> None:
            args = import_module("megatron.training").get_args()
            args.distributed_timeout_minutes = seconds / 60

        self._before_process_groups(set_it)

    def before_forward(self, act: Callable[[int], None]) -> None:
        """Call a function with the number of finished iterations before each microbatch."""

        def replace() -> None:
            program = import_module("megatron.mcore_adapter.megatron_lm.gpt_program")
            get_args, batch = program.get_args, program.batch_on_this_rank

            def batch_after(*args: Any) -> Any:
                act(getattr(get_args(), "curr_iteration", 0))
                return batch(*args)

            program.batch_on_this_rank = batch_after

        self._before_process_groups(replace)

    def on_load(self, tell: OnLoad) -> None:
        """Call a function when a run has loaded its checkpoint, or found that there is none."""

        def load_and_tell(load: Callable[[], Any], parts: TrainedParts) -> None:
            load()

        self.around_load(load_and_tell, tell)

    def around_load(self, act: AroundLoad, tell: OnLoad = lambda iteration, history: None) -> None:
        """Call a function in place of the load of a checkpoint."""
        checkpoints = import_module("megatron.mcore_adapter.megatron_lm.loop_checkpoints")
        load = checkpoints.LoopCheckpoints.load

        def load_by(self: Any, original: Any, given: dict[str, Any]) -> Any:
            found: list[tuple[int, float]] = []
            parts = TrainedParts(
                given["ddp_model"], given["optimizer"], given["opt_param_scheduler"]
            )
            act(lambda: found.append(load(self, original, given)), parts)
            tell(found[-1][0], None)
            return found[-1]

        checkpoints.LoopCheckpoints.load = load_by

    def on_step(self, tell: OnStep) -> None:
        """Call a function after every step.

        The loop's own line of the second step after a start has the mean of two losses.
        """

        def replace() -> None:
            training = import_module("megatron.training.training")
            log = training.training_log

            def log_and_tell(losses: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
                iteration, norm = args[2], args[6]
                loss = float(losses["lm loss"]) if "lm loss" in losses else None
                result = log(losses, *args, **kwargs)
                tell(iteration, loss, None if norm is None else float(norm))
                return result

            training.training_log = log_and_tell

        self._before_process_groups(replace)

    def _before_process_groups(self, act: Callable[[], None]) -> None:
        """Call a function when the loop is imported and has its arguments."""
        watch = import_module("megatron.mcore_adapter.megatron_lm.loop_watch").LoopWatch
        begin = watch.begin

        def begin_after(self: Any, original: Any, given: dict[str, Any]) -> Any:
            act()
            return begin(self, original, given)

        watch.begin = begin_after


LOOPS = {OWN: Loop, MEGATRON_LM: MegatronLmLoop}
RELEASES = megatron_release.RELEASES


def loop_of(name: str, release: str | None = None) -> Loop:
    """Return a loop by its name; Megatron-LM's is that of the newest release unless told."""
    if name == MEGATRON_LM and release is None:
        release = RELEASES[-1]
    return LOOPS[name](release)


def chosen(words: Sequence[str]) -> Loop:
    """Return the loop that a command line of pretrain_gpt.py chooses, on the release at hand."""
    return LOOPS[megatron_lm_loop.chosen_loop(words)]()

# SPDX-License-Identifier: Apache-2.0
"""The table of `benchmarks/two_loops.py`: the same checks of both training loops.

A column is a loop on a release of Megatron-Core: this program's own on the installed one, and
Megatron-LM's on those whose wheels have it. Each cell that is run is written into
`benchmarks/results/two_loops.md` at once; the others keep what they have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch.distributed.run

from benchmarks.parity import real_loop
from benchmarks.soak import flips, hangs, restarts
from benchmarks.soak.loop_features import FEATURES, feature
from benchmarks.soak.loop_runs import TIMEOUT, Found, run
from benchmarks.soak.loops import MEGATRON_LM, OWN, RELEASES, Loop, loop_of
from tests.support.fork_servers import Packages
from tests.support.pretrain.saved_runs import GATED, LINE
from tests.support.pretrain.training_runs import SMALL, write_counting_corpus
from tests.support.warm_programs import ROOT, warm_commands

RESULTS = ROOT / "benchmarks" / "results" / "two_loops.md"
COLUMNS = {OWN: loop_of(OWN), **{each: loop_of(MEGATRON_LM, each) for each in RELEASES}}
EVERY = f"{LINE} --log-interval 1"
DDP = f"{SMALL} --train-iters 6 --lr-decay-iters 20 {GATED} --log-interval 1"
TORCH_DIST = "--use-distributed-optimizer --ckpt-format torch_dist"
SCRIPT = ROOT / "examples" / "megatron_fsdp" / "sbatch_mfsdp_deepseek_v3.sh"
"""Of its lines those that meet Slurm are taken, without its flags."""
SHARED_DATA = ROOT.parent / "shared" / "data" / "fsdp_dtensor" / "dense_swiglu_bf16_dp2"


class CheckError(Exception):
    """A check that has failed, as a cell shows it."""


def other_loop(loop: Loop) -> Loop:
    """Return the loop with which a loop exchanges checkpoints."""
    return COLUMNS[RELEASES[-1]] if loop.name == OWN else COLUMNS[OWN]


def require(found: Found) -> Found:
    """Return a run that came to its end.

    Raises:
        CheckError: it did not.
    """
    if found.failed is not None:
        raise CheckError(found.error[:160])
    return found


def going_on(found: Found, whole: Found, iteration: int) -> str:
    """Compare the losses of a run that has loaded an iteration with those of the whole run."""
    require(found)
    if found.loaded != iteration:
        raise CheckError(f"loaded {found.loaded} instead of {iteration}")
    later = {each: whole.steps[each] for each in whole.steps if each > iteration}
    if found.steps.keys() != later.keys():
        raise CheckError(f"steps {sorted(found.steps)} instead of {sorted(later)}")
    worst = max(abs(found.steps[each][0] - later[each][0]) / later[each][0] for each in later)
    if not worst <= real_loop.TOLERANCE:
        raise CheckError(f"losses differ by {worst:.1e}")
    return f"{worst:.1e}" if worst else "0"


# ---- accidents


def kills(loop: Loop, folder: Path) -> str:
    """Strike runs, each of which is gone on with."""
    words = ["--kills", "8", "--seed", "5", "--form", "fsdp_dtensor", "--loop", loop.name]
    words += ["--release", loop.release] if loop.release else []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak.kills", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    counts: Counter[str] = Counter()
    for _, strike, outcome, number in re.findall(
        r"^\| (.*) \| (.*) \| (.*) \| (\d+) \|", done.stdout, re.M
    ):
        counts["wrong" if outcome == "WRONG" else strike] += int(number)
    if not counts:
        raise CheckError(done.stderr[-200:])
    parts = [f"{number} {strike}" for strike, number in counts.items() if strike != "wrong"]
    return f"{', '.join(parts)}; {counts['wrong']} wrong"


def flipped(loop: Loop, folder: Path) -> str:
    """Flip bits in a checkpoint of the other loop, and load it into this one."""
    line = flips.LINES["fsdp_dtensor"]
    save = f"{line} --exit-interval 1 --save {folder} --save-interval 1"
    require(run(other_loop(loop), 2, save))
    drawn = flips.draw_flips(folder / flips.ITERATION, Random("two loops"), 20)
    found = run(loop, 2, f"{line} --load {folder}", at_load=(flips.load_each, (str(folder), drawn)))
    require(found)
    verdicts = Counter(outcome.verdict for outcome in flips.of_both(found.kept))
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))


def restarted(loop: Loop, folder: Path) -> str:
    """Kill a rank of jobs under torchrun with --max-restarts, with one agent and with two."""
    line = f"{restarts.LINE} --train-iters 15 --save-interval 7"
    command = ["python", torch.distributed.run.__file__]
    number, histories = 0, []
    with warm_commands(_made(folder / "commands"), Packages(loop.release)) as variables:
        for name, agents, kills in (("static", 1, False), ("c10d", 1, True), ("static", 2, True)):
            job = restarts.RestartedJob(
                _made(folder / f"{name}_{agents}"), name, agents, line, command,
                ["--no-python", "python"], variables, 9, loop,
            )  # fmt: skip
            try:
                if kills:
                    job.wait(lambda job=job: len(job.steps()) > 8, 0.02)
                    os.kill(job.ranks()[1], signal.SIGKILL)
                job.wait(lambda: False, 0.05)
            except restarts.NotBackError as error:
                raise CheckError(f"{name}, {agents} agents: {str(error)[:100]}") from error
            finally:
                job.stop()
            number += job.num_loads()
            histories.append(job.history())
    wrong = sum(history != histories[0] for history in histories)
    return f"2 kills, {number} loads, {wrong} histories of 15 losses that differ"


def ended(*names: str) -> Callable[[Loop, Path], str]:
    """Return the check of variants of `hangs.py`."""

    def check(loop: Loop, folder: Path) -> str:
        cells = []
        with warm_commands(_made(folder / "commands"), Packages(loop.release)) as variables:
            for variant in hangs.VARIANTS:
                if variant.name not in names:
                    continue
                # The stand-in for torchrun ends with the code of the first rank that does.
                codes = (*variant.codes, signal.SIGKILL, 128 + signal.SIGTERM)
                variant = replace(variant, limit=3 * variant.limit, codes=codes)
                place = _made(folder / variant.name)
                ending = hangs.run(variant, place, ("torchrun",), variables, loop)
                problems = ending.problems(variant)
                if problems:
                    raise CheckError(f"{variant.name}: {'; '.join(problems)}")
                cells.append(f"`{variant.name}` {ending.seconds:.0f} s")
        return ", ".join(cells)

    return check


def stopped(loop: Loop, folder: Path) -> str:
    """End a run by SIGTERM; it saves, and a second start goes on."""
    line = f"{EVERY} --exit-signal-handler --save {folder} --load {folder} --save-interval 100"
    whole = require(run(loop, 2, EVERY))
    first = run(loop, 2, line, sigterm_at=2)
    last = max(first.steps)
    saved = [path.name for path in folder.glob("iter_*")]
    if last == 6 or saved != [f"iter_{last:07d}"]:
        raise CheckError(f"steps {sorted(first.steps)}, saved {saved}, {first.error}")
    return f"{going_on(run(loop, 2, line), whole, last)} (saved at {last})"


def preempted(loop: Loop, folder: Path) -> str:
    """Preempt a job of two nodes, with stand-ins for Slurm; it is queued again and goes on."""
    text = SCRIPT.read_text()
    end = "\npreempted() {"
    nothing = " ".join(f"{name}=()" for name in re.findall(r"^([A-Z]+)=\($", text, re.MULTILINE))
    script = folder / "job.sh"
    script.write_text(
        text.partition("\nPARALLEL=(")[0] + f"\n{nothing} DATA=()" + end + text.partition(end)[2]
    )
    (folder / "pretrain_gpt.py").symlink_to(restarts.RECORDING_PROGRAM)
    record = folder / "steps.jsonl"
    line = f"{EVERY} --exit-signal-handler --save saved --load saved --save-interval 100"
    width = 8 if loop.name == MEGATRON_LM else 1
    more = {"GPUS_PER_NODE": "1", "RECORD_STEPS": str(record)}
    more["END_AT"] = f"preempt: iteration {1:{width}}/"
    with warm_commands(_made(folder / "commands"), Packages(loop.release)) as variables:
        job = subprocess.run(
            ["sbatch", "--nodes=2", str(script), *loop.words(line)],
            cwd=folder,
            env={**variables, **more},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    output = (folder / "slurm-1.out").read_text()
    text = record.read_text() if record.exists() else ""
    facts = [json.loads(each) for each in text.splitlines()]
    starts = [fact["loaded"] for fact in facts if "loaded" in fact]
    steps = {fact["step"][0]: fact["step"][1:] for fact in facts if "step" in fact}
    if job.returncode or len(starts) != 2:
        raise CheckError(f"started at {starts}, {output[-160:]}")
    later = {each: (steps[each][0], steps[each][1]) for each in steps if each > starts[-1]}
    whole = require(run(loop, 2, EVERY))
    difference = going_on(Found(loaded=starts[-1], steps=later), whole, starts[-1])
    return f"{difference} (queued again at {starts[-1]})"


def asynchronous(loop: Loop, folder: Path) -> str:
    """Save in the background, and go on from what was saved there."""
    save = f"--save {folder} --save-interval 2"
    whole = require(run(loop, 2, f"{EVERY} --async-save {save}"))
    names = sorted(path.name for path in folder.glob("iter_*"))
    if names != [f"iter_{number:07d}" for number in (2, 4, 6)]:
        raise CheckError(f"saved {names}")
    return going_on(run(loop, 2, f"{EVERY} --load {folder} --ckpt-step 4"), whole, 4)


def fallen_back(loop: Loop, folder: Path) -> str:
    """Damage the newest checkpoint; the one before is loaded."""
    whole = require(run(loop, 2, f"{EVERY} --save {folder} --save-interval 2"))
    damaged = max((folder / "iter_0000006").glob("*.distcp"), key=lambda path: path.stat().st_size)
    flips.toggle(damaged, flips.Flip(damaged.name, damaged.stat().st_size // 2, 3))
    return going_on(run(loop, 2, f"{EVERY} --load {folder}"), whole, 4)


# ---- formats


def of_other_loop(loop: Loop, folder: Path) -> str:
    """Load what the other loop has saved."""
    whole = require(run(other_loop(loop), 2, f"{EVERY} --save {folder} --save-interval 3"))
    return going_on(run(loop, 2, f"{EVERY} --load {folder} --ckpt-step 3"), whole, 3)


def for_other_loop(loop: Loop, folder: Path) -> str:
    """Load in the other loop what this one has saved."""
    whole = require(run(loop, 2, f"{EVERY} --save {folder} --save-interval 3"))
    found = run(other_loop(loop), 2, f"{EVERY} --load {folder} --ckpt-step 3")
    return going_on(found, whole, 3)


def torch_dist_of(own: bool) -> Callable[[Loop, Path], str]:
    """Return the check that loads torch_dist of a run with DDP, of our loop or of the column's."""

    def check(loop: Loop, folder: Path) -> str:
        saver = COLUMNS[OWN] if own else loop
        whole = require(run(saver, 2, f"{DDP} {TORCH_DIST} --save {folder} --save-interval 3"))
        return going_on(run(loop, 2, f"{EVERY} --load {folder} --ckpt-step 3"), whole, 3)

    return check


def sample(loop: Loop, folder: Path) -> str:
    """Go on from the checkpoint that the published package has written."""
    if not SHARED_DATA.is_dir():
        raise CheckError("the sample is not here")
    from tests.pretrain.test_sample_checkpoint import INFO
    from tests.support.pretrain.sample_runs import command_line

    line = f"{command_line(INFO, SHARED_DATA, with_fsdp=True)} --log-interval 1 --exit-interval 5"
    line += " --split 90,5,5"
    expected = require(run(COLUMNS[OWN], 2, line))
    return f"{going_on(run(loop, 2, line), expected, 3)} to our loop's next steps"


def hugging_face(loop: Loop, folder: Path) -> str:
    """Begin from the weights of a Hugging Face folder."""
    from megatron.checkpoint.hugging_face import model_reader
    from megatron.checkpoint.hugging_face.model_arguments import model_flags
    from tests.support.checkpoint.hugging_face_models import saved_model

    saved_model("llama", folder)
    flags = shlex.join(model_flags(model_reader.read(folder).args))
    line = (
        f"{flags} --use-megatron-fsdp --seq-length 32 --micro-batch-size 2 --global-batch-size 8"
        " --train-iters 3 --lr 1e-3 --mock-data --split 90,5,5 --tokenizer-type NullTokenizer"
        " --vocab-size 39 --make-vocab-size-divisible-by 1 --eval-iters 0 --num-workers 0"
        f" --log-interval 1 --load {folder} --finetune"
    )
    expected = require(run(COLUMNS[OWN], 2, line))
    return f"{going_on(run(loop, 2, line), expected, 0)} to our loop's first steps"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- the table


@dataclass(frozen=True)
class LoopCheck:
    """A row of the table: its title, and the function that returns its cells."""

    title: str
    check: Callable[[Loop, Path], str]


NAMED = ("killed_with_save", "hangs_with_save", "differs", "own_error", "terminated")
ROWS = {
    "kills": LoopCheck("kills, full disks, two runs (`kills.py`)", kills),
    "flips": LoopCheck("flips in a checkpoint of the other loop", flipped),
    "restarts": LoopCheck("`--max-restarts`: a killed rank, one agent and two", restarted),
    "ends": LoopCheck("the rank at fault is named (`hangs.py`): ends after", ended(*NAMED)),
    "sigterm": LoopCheck("SIGTERM saves, a second start goes on", stopped),
    "slurm": LoopCheck("a job that Slurm preempts comes back (stand-ins)", preempted),
    "async": LoopCheck("`--async-save`, and a start from it", asynchronous),
    "fallback": LoopCheck("the newest is damaged: the one before is loaded", fallen_back),
    "other-loop": LoopCheck("loads `fsdp_dtensor` of the other loop", of_other_loop),
    "for-other-loop": LoopCheck("its `fsdp_dtensor` is loaded by the other loop", for_other_loop),
    "torch-dist": LoopCheck(
        "loads `torch_dist` of a DDP run of the same loop", torch_dist_of(own=False)
    ),
    "torch-dist-own": LoopCheck(
        "loads `torch_dist` of a DDP run of our loop", torch_dist_of(own=True)
    ),
    "sample": LoopCheck("loads `fsdp_dtensor` of the published package", sample),
    "hugging-face": LoopCheck("begins from a Hugging Face folder", hugging_face),
}
for name, each in FEATURES.items():
    ROWS[name] = LoopCheck(each.title, lambda loop, folder, name=name: feature(name, loop))


def cell_of(row: LoopCheck, loop: Loop) -> str:
    """Run a check; a failure is a cell too."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            cell = row.check(loop, Path(folder))
        except CheckError as error:
            cell = f"fails: {error}"
        except AssertionError as error:
            cell = f"fails: {(str(error).splitlines() or ['an assertion'])[-1][:160]}"
    return " ".join(cell.replace("|", "/").replace(str(ROOT), ".").split())


def with_cell(table: str, row: LoopCheck, column: str, cell: str) -> str:
    """Return the text of the table with one cell more, rows as in `ROWS`."""
    before, bar, rest = table.partition("| check |")
    head, rule, *lines = (bar + rest).splitlines()
    cells = {}
    for line in lines:
        title, *columns = (each.strip() for each in line.strip("|").split("|"))
        cells[title] = columns
    cells.setdefault(row.title, [""] * len(COLUMNS))[list(COLUMNS).index(column)] = cell
    titles = [each.title for each in ROWS.values() if each.title in cells]
    written = [f"| {' | '.join([title, *cells[title]])} |" for title in titles]
    return before + "\n".join([head, rule, *written]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    write_counting_corpus()
    failed = False
    for column in args.columns:
        for name in args.rows:
            begin = time.monotonic()
            cell = cell_of(ROWS[name], COLUMNS[column])
            print(f"{column}, {name}: {cell} ({time.monotonic() - begin:.0f} s)", flush=True)
            RESULTS.write_text(with_cell(RESULTS.read_text(), ROWS[name], column, cell))
            failed |= cell.startswith("fails") or ("wrong" in cell and "0 wrong" not in cell)
    sys.exit(failed)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py from outside: its output and files, signals, and its errors for bad input."""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pretrain_gpt
from megatron.checkpoint.store.directory import TRACKER
from megatron.mcore_adapter.run.logging_setup import set_up_logging
from megatron.pretrain import loop
from megatron.pretrain.data.corpus import write_corpus
from megatron.pretrain.data.tokenizers import ByteTokenizer
from tests.support.pretrain.training_runs import SMALL, Record, prepare, pretrain, train, trained
from tests.support.rank_pool import run_ranks

ROOT = Path(__file__).parents[2]
TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. "

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 8 --lr 5e-3 --num-workers 2"""

LINE = f"{SMALL} --use-megatron-fsdp --train-iters 3 --lr-decay-iters 20"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": TEXT * 3}) + "\n" for _ in range(200))
    )
    write_corpus([folder / "text.jsonl"], folder / "corpus", ByteTokenizer())
    return str(folder / "corpus")


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def start(
    command_line: str,
    directory: Path,
    torchrun: tuple[str, ...] = TORCHRUN,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start the program on two ranks of one thread each.

    Args:
        command_line: words for the program.
        directory: it runs in.
        torchrun: the real one unless told; `commands` has one that is quick to start.
        environment: variables instead of those of this process.
    """
    program = ("--standalone", "--nproc_per_node", "2", str(ROOT / "pretrain_gpt.py"))
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*torchrun, *program, *shlex.split(command_line)],
        cwd=directory,
        env=environment or own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_run_prints_its_losses_and_writes_checkpoints_curves_and_tensorboard(
    corpus: str, tmp_path: Path, commands: dict[str, str]
) -> None:
    save, board = tmp_path / "checkpoints", tmp_path / "board"
    line = f"""--use-megatron-fsdp {MODEL} --data-path {corpus} --train-iters 10 --eval-interval 5
        --eval-iters 2 --log-interval 5 --split 8,1,1 --save {save} --save-interval 5
        --tensorboard-dir {board} --log-validation-ppl-to-tensorboard"""
    process = start(line, tmp_path, ("torchrun",), commands)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "warning" not in errors.lower() and "Traceback" not in errors

    steps = re.findall(
        r"iteration +(\d+)/10 \| consumed samples: (\d+) \| lm loss: (\S+) .*grad norm: (\S+)\n"
        r"  step \S+ m?s \| \S+ tokens/s \| \S+ TFLOP/s \(\S+ % MFU\) \| \S+ MiB \| ETA \d+:",
        output,
    )
    expected = [(number, 8 * number) for number in (1, 5, 10)]
    assert [(int(number), int(samples)) for number, samples, _, _ in steps] == expected
    assert output.startswith("pretrain_gpt.py: loading torch and Megatron-Core\n")
    losses = [float(loss) for _, _, loss, _ in steps]
    assert losses[-1] < losses[0] - 0.3
    assert re.findall(r"validation at iteration (\d+) \| lm loss value", output) == ["5", "10"]
    assert len(re.findall(r"^test at iteration 10 ", output, re.MULTILINE)) == 1
    assert output.count("saved checkpoint") == 2

    assert (save / TRACKER).read_text() == "10"
    for name in ("iter_0000005", "iter_0000010"):
        assert (save / name / ".metadata").is_file()
    history = [json.loads(text) for text in (save / "losses.jsonl").read_text().splitlines()]
    assert [entry["iteration"] for entry in history if "train" in entry] == list(range(1, 11))
    assert [entry["iteration"] for entry in history if "validation" in entry] == [5, 10]
    assert (save / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    check_config(save / "config.json")

    events = EventAccumulator(str(board))
    events.Reload()
    tags = {"lm loss", "grad-norm", "learning-rate", "lm loss validation ppl", "batch-size", "mfu"}
    assert set(events.Tags()["scalars"]) >= tags
    for tag, iterations in (
        ("lm loss", range(1, 11)),
        ("grad-norm", range(1, 11)),
        ("lm loss validation", (5, 10)),
    ):
        assert [event.step for event in events.Scalars(tag)] == list(iterations)
    written = [event.value for event in events.Scalars("lm loss")]
    assert written == pytest.approx(
        [entry["train"] for entry in history if "train" in entry], rel=1e-6
    )


def check_config(path: Path) -> None:
    config = json.loads(path.read_text())
    assert config["arguments"]["seq_length"] == 32 and config["arguments"]["lr"] == 5e-3
    assert config["arguments"]["params_dtype"] == "float32"
    assert config["versions"]["torch"] == torch.__version__ and config["ranks"] == 2


@pytest.mark.exhaustive  # the next test sends the signal to ranks that are warm
def test_sigterm_to_torchrun_saves_a_checkpoint_that_resumes(corpus: str, tmp_path: Path) -> None:
    line = (
        f"--use-megatron-fsdp {MODEL} --data-path {corpus} --train-iters 100000 --eval-iters 0"
        " --log-interval 1 --split 1,0,0"
    )
    process = start(f"{line} --save {tmp_path} --save-interval 100000 --async-save", tmp_path)
    try:
        for text in process.stdout:
            if re.match(r"iteration +3/", text):
                break
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=180)
    finally:
        process.kill()
    stopped = int(re.search(r"stopping at iteration (\d+): signal", output).group(1))
    assert f"saved checkpoint of iteration {stopped} " in output
    # No traceback of ours; torchrun has one of its own, about the signal.
    assert "pretrain_gpt.py" not in errors and "warning" not in errors.lower(), errors
    assert (tmp_path / TRACKER).read_text() == str(stopped)
    resumed = trained(f"{line} --load {tmp_path} --exit-interval {stopped + 1}")[0]
    assert [step["iteration"] for step in resumed.steps] == [stopped + 1]


TERMINATED_WITH_AN_UPLOAD = """
import os, signal, sys, time
import pretrain_gpt
from megatron.pretrain import loop

train, train_step = loop.train, loop.train_step

def terminated_step(run, data):
    if run.progress.iteration == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    train_step(run, data)

def train_and_upload(*args):
    train(*args)
    time.sleep(1)  # the watch looks several times
    print("uploaded", flush=True)

loop.train, loop.train_step = train_and_upload, terminated_step
code = pretrain_gpt.main()
os.kill(os.getpid(), signal.SIGTERM)  # a launcher and a batch system may both send it
print("ended", flush=True)
sys.exit(code)
"""


@pytest.mark.exhaustive
def test_what_follows_the_loop_is_not_cut_by_the_sigterm_that_has_ended_it(
    corpus: str, tmp_path: Path, commands: dict[str, str]
) -> None:
    (tmp_path / "program.py").write_text(TERMINATED_WITH_AN_UPLOAD)
    line = (
        f"--use-megatron-fsdp {MODEL} --num-workers 0 --data-path {corpus} --train-iters 100000"
        f" --eval-iters 0 --split 1,0,0 --save {tmp_path / 'saved'}"
    )
    ended = subprocess.run(
        ["torchrun", "--standalone", "--nproc_per_node", "2", "program.py", *shlex.split(line)],
        cwd=tmp_path,
        env=commands,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("uploaded") == ended.stdout.count("ended") == 2, ended.stdout
    assert (tmp_path / "saved" / TRACKER).read_text() == "2"


def interrupted(command_line: str, rank: int, number: int = signal.SIGTERM) -> Record | None:
    """Job: a run of which one rank is sent a signal in its second step; None if that raises."""
    original = loop.train_step

    def train_step(run: loop.TrainingRun, data: Any) -> None:
        if run.progress.iteration == 1 and loop.dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        original(run, data)

    with patch.object(loop, "train_step", train_step), contextlib.suppress(KeyboardInterrupt):
        return pretrain(command_line)
    return None


@pytest.mark.always("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_with_a_checkpoint(
    rank: int, tmp_path: Path
) -> None:
    line = f"{SMALL} --use-megatron-fsdp --save {tmp_path} --save-interval 100"
    assert [record.iteration for record in run_ranks(2, interrupted, line, rank)] == [2, 2]
    assert (tmp_path / TRACKER).read_text() == "2"
    assert (tmp_path / "iter_0000002" / ".metadata").is_file()


@pytest.mark.exhaustive
def test_ctrl_c_on_one_rank_stops_all_and_saves_nothing(tmp_path: Path) -> None:
    line = f"{SMALL} --use-megatron-fsdp --save {tmp_path} --save-interval 100"
    assert run_ranks(2, interrupted, line, 1, signal.SIGINT) == [None, None]
    beside = {"config.json", "losses.jsonl", "loss_curves.png"}
    assert {path.name for path in tmp_path.iterdir()} <= beside


def run_main(command_line: str) -> tuple[int, str, str]:
    """Job: run the program's main function; return exit code, stdout and stderr."""
    output, errors = io.StringIO(), io.StringIO()
    set_up_logging()  # what importing the program does in a process of its own

    def start(args: argparse.Namespace) -> torch.device:
        return prepare(command_line)[1]

    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        patch.object(sys, "argv", ["pretrain_gpt.py", *shlex.split(command_line)]),
        patch.object(pretrain_gpt.ranks, "start", start),
        patch.object(pretrain_gpt.ranks, "stop", lambda: None),
        patch.object(pretrain_gpt, "GRACE_SECONDS", 0),
        patch.object(pretrain_gpt.Watch, "connect", lambda watch: None),
    ):
        code = pretrain_gpt.main()
    return code, output.getvalue(), errors.getvalue()


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def assert_refused(command_line: str, folder: Path, *words: str) -> None:
    """Check that all ranks end with one message and an error code, and `folder` is unchanged."""
    before = tree(folder)
    results = run_ranks(2, run_main, command_line, timeout=180)
    (code, _, message), other = results
    assert code in (1, 2) and other[0] == code and other[2] == message
    assert "Traceback" not in message
    for word in words:
        assert word in message
    assert message.count("rror") <= 3 and len(message) < 2000
    assert tree(folder) == before


def test_bad_arguments_are_named_on_all_ranks(tmp_path: Path) -> None:
    line = f"{LINE} --save {tmp_path / 'new'} --save-interval 1 --num-layer 2 --bf16 --fp16"
    assert_refused(line, tmp_path, "--num-layer: unknown flag", "--bf16 and --fp16 exclude")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, train, f"{LINE} --train-iters 2 --save {folder} --save-interval 1")
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint of steps 1 and 2, which a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_refused(checkpoint: Path) -> None:
    cut(checkpoint / "iter_0000002" / ".metadata", 0.5)
    assert_refused(
        f"{LINE} --load {checkpoint} --save {checkpoint} --save-interval 1 --no-load-fallback",
        checkpoint,
        "iter_0000002",
    )


@pytest.mark.exhaustive
def test_under_torchrun_an_error_is_told_once_and_ends_all_ranks(
    checkpoint: Path, commands: dict[str, str]
) -> None:
    process = start(
        f"{LINE} --num-layers 3 --load {checkpoint}", checkpoint, ("torchrun",), commands
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert errors.count("is a checkpoint of another model") == 1
    assert 'pretrain_gpt.py", line' not in errors  # torchrun adds its own report, we no traceback

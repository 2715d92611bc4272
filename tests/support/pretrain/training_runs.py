# SPDX-License-Identifier: Apache-2.0
"""The training program on warm ranks: command lines in, exact numbers out.

Jobs for `tests.support.rank_pool.run_ranks`.
"""

import contextlib
import functools
import gc
import os
import shlex
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.fp8_utils import HAVE_TE
from megatron.core.transformer.module import MegatronModule

from megatron.checkpoint.core.spelling import plain_name
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.captured_iterations import captures_iterations
from megatron.mcore_adapter.checkpoint_entries import named_parameters
from megatron.mcore_adapter.checkpoints import checkpointing
from megatron.mcore_adapter.run.logging_setup import set_up_logging
from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain import loop, ranks
from megatron.pretrain.arguments import parse_arguments
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizers import Tokenizer, build_tokenizer, embedding_rows
from megatron.pretrain.model.gpt_model import build_model
from megatron.pretrain.model.gpt_optimizer import build_optimizer
from megatron.pretrain.report import report as report_module
from megatron.pretrain.report.report import Report
from tests.support.model_parallel import initialize
from tests.support.rank_pool import run_ranks

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2"
    " --global-batch-size 8"
)

CORPUS = Path(tempfile.gettempdir()) / f"megatron_fsdp_counting_{os.getuid()}" / "counting"
"""Not mock data: its index takes a third of a second to shuffle, as long as some runs."""

SOURCE = f"--data-path {CORPUS} --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 99"
DATA = f"{SOURCE} --make-vocab-size-divisible-by 1 --num-workers 0 --eval-iters 0"
STEPS = "--train-iters 20 --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 2"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
SMALL = f"{SIZES} {DATA} {STEPS} {NO_DROPOUT}"
"""Two microbatches a step on two ranks, one on four, four on one: the batches are the same."""


@functools.cache
def write_counting_corpus() -> None:
    """Write documents that count, from anywhere, around the vocabulary: easy to learn.

    All test runs of a user share them and their index caches, also at the same time.
    """
    if CORPUS.parent.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=CORPUS.parent.parent) as folder:
        corpus = Path(folder, "corpus", CORPUS.name)
        corpus.parent.mkdir()
        builder = IndexedDatasetBuilder(f"{corpus}.bin", dtype=np.uint16)
        for start in range(200):
            document = (7 * start + np.arange(150 + start)) % 99
            builder.add_document(document, [len(document)])
        builder.finalize(f"{corpus}.idx")
        with contextlib.suppress(OSError):  # another run was the first
            corpus.parent.rename(CORPUS.parent)


@dataclass
class Record:
    """Record of one run on one rank."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Values that the loop reports, with `iteration` and `skipped`; floats are not rounded."""
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Name of the split -> iterations and losses."""
    lines: list[str] = field(default_factory=list)
    """Without those of the steps, which only the first rank has."""
    iteration: int = 0
    flops: float = 0.0

    def column(self, name: str) -> list[Any]:
        """One value of every step."""
        return [step[name] for step in self.steps]

    @property
    def losses(self) -> list[float]:
        return self.column("lm loss")

    def evaluated(self, name: str) -> list[float]:
        """Return the losses of all evaluations of a split."""
        return [loss for _, loss in self.evaluations[name]]


class RecordingReport(Report):
    """A report that keeps what it is told, on every rank, and prints nothing."""

    record: Record

    def step(
        self,
        progress: Progress,
        values: dict[str, float | None],
        skipped: bool,
        is_last: bool = False,
    ) -> None:
        self.record.steps.append({"iteration": progress.iteration, "skipped": skipped, **values})
        super().step(progress, values, skipped, is_last)

    def evaluation(self, progress: Progress, loss: float, name: str = "validation") -> None:
        self.record.evaluations.setdefault(name, []).append((progress.iteration, loss))
        super().evaluation(progress, loss, name)

    def log(self, line: str) -> None:
        if not line.startswith("iteration "):
            self.record.lines.append(line)


def prepare(command_line: str) -> tuple[Any, torch.device]:
    """Do the work of `ranks.start` in a world that exists; return arguments and device."""
    set_up_logging()
    args, _ = parse_arguments(
        shlex.split(command_line),
        world_size=dist.get_world_size(),
        cuda=False,
        transformer_engine=HAVE_TE,
    )
    cpu.install()
    initialize(args)
    ranks.seed(args.seed, args.data_parallel_random_init, captures_iterations(args))
    gc.collect()
    return args, torch.device("cpu")


def draw_nothing(path: Path, *curves: object) -> bool:
    """Write a file as `draw_loss_curves` does, without the plot: drawing is half of a short run."""
    if not any(curves):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return True


def pretrain(command_line: str) -> Record:
    """One run from start to end on this rank."""
    args, device = prepare(command_line)
    report = type("ThisReport", (RecordingReport,), {"record": Record()})
    arguments = dict(vars(args))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (
            patch.object(loop, "Report", report),
            patch.object(report_module, "draw_loss_curves", draw_nothing),
        ):
            progress = loop.pretrain(args, device)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert vars(args) == arguments  # a run changes none of them
    report.record.iteration = progress.iteration
    report.record.flops = progress.num_floating_point_operations_so_far
    return report.record


def train(*command_lines: str) -> list[Record]:
    """Job: runs one after the other, each as if it were alone."""
    return [pretrain(command_line) for command_line in command_lines]


def trained(*command_lines: str) -> list[Record]:
    """Train on two ranks, one run after the other; return the records of the first rank."""
    records: list[Record] = run_ranks(2, train, *command_lines)[0]
    return records


def refuse(command_line: str) -> str:
    """Job: a run that must fail; type and message of the error."""
    try:
        pretrain(command_line)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the run did not fail")


def error_of(command_line: str, *more: Any, job: Callable[..., str] = refuse) -> str:
    """Return the error with which two ranks end a run: the same one."""
    first, second = run_ranks(2, job, command_line, *more)
    assert first == second
    return first


def assert_close(values: list[float], expected: list[float], relative: float) -> None:
    """Every value within `relative` of its reference; the message shows the worst."""
    assert len(values) == len(expected) > 0
    worst = max(
        abs(value - other) / max(abs(other), 1e-12) for value, other in zip(values, expected)
    )
    assert worst <= relative, (
        f"differs by {worst:.2e}, more than {relative:.0e}:\n{values}\n{expected}"
    )


@dataclass
class State:
    """State after `--load`: weights and optimizer as full tensors by plain name, and arguments."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    slots: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """`exp_avg`, `exp_avg_sq`, `step` -> name -> tensor."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Fields of the param groups without their parameters."""
    args: dict[str, Any] = field(default_factory=dict)


def build(command_line: str, **overrides: Any) -> loop.TrainingRun:
    """Everything of a run up to its first load, with a report that keeps what it is told.

    `overrides` are arguments after all rules, for what the command line does not let through on
    this machine.
    """
    args, device = prepare(command_line)
    vars(args).update(overrides)
    args.padded_vocab_size = embedding_rows(args, tokenizer_of(args))
    model = build_model(args, args.padded_vocab_size, device)
    optimizer, scheduler = build_optimizer(args, model)
    report = type("ThisReport", (RecordingReport,), {"record": Record()})(args)
    return loop.TrainingRun(model, optimizer, scheduler, args=args, device=device, report=report)


def tokenizer_of(args: Any) -> Tokenizer:
    """Return the tokenizer that the command line names."""
    return build_tokenizer(TokenizerChoice.of(args))


def load_checkpoint(run: loop.TrainingRun) -> None:
    """Load the checkpoint that the command line names."""
    run.progress = checkpointing.load(run.args, run, run.report.log)


def lines_of_load(command_line: str) -> list[str] | str:
    """Job: return the notes that a load prints, or its error."""
    run = build(command_line)
    try:
        load_checkpoint(run)
    except ValueError as error:
        return str(error)
    return [line for line in run.report.record.lines if "note: " in line]


def save_checkpoint(run: loop.TrainingRun) -> None:
    """Save a checkpoint where the command line says."""
    checkpointing.save(run.args, run, run.progress, run.report.log)


def state_of(run: loop.TrainingRun) -> State:
    """Return the state of a run with --use-megatron-fsdp."""
    names = ("iteration", "consumed_train_samples")
    state = State(args={name: getattr(run.progress, name) for name in names})
    for name, parameter in named_parameters(run.model).items():
        plain = plain_name(name)
        state.weights[plain] = full_tensor(parameter)
        for slot, value in run.optimizer.optimizer.state[parameter].items():
            state.slots.setdefault(slot, {})[plain] = (
                full_tensor(value) if slot != "step" else value.clone()
            )
    state.groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in run.optimizer.param_groups
    ]
    return state


def load_state(command_line: str) -> State:
    """Job: return the state of a run after it has loaded its checkpoint."""
    run = build(command_line)
    load_checkpoint(run)
    return state_of(run)


def assert_same_run(fsdp: Record, ddp: Record, loss: float, norm: float) -> None:
    """All that a run reports."""
    assert [step["iteration"] for step in fsdp.steps] == [step["iteration"] for step in ddp.steps]
    for name in ("skipped", "loss-scale", "learning-rate"):
        assert fsdp.column(name) == ddp.column(name), name
    assert_close(fsdp.losses, ddp.losses, loss)
    assert_close(fsdp.column("params-norm"), ddp.column("params-norm"), loss)
    done = [number for number, skipped in enumerate(ddp.column("skipped")) if not skipped]
    assert_close(
        [fsdp.column("grad-norm")[n] for n in done],
        [ddp.column("grad-norm")[n] for n in done],
        norm,
    )
    assert fsdp.evaluations.keys() == ddp.evaluations.keys()
    for name, expected in ddp.evaluations.items():
        assert [iteration for iteration, _ in fsdp.evaluations[name]] == [
            iteration for iteration, _ in expected
        ]
        assert_close(fsdp.evaluated(name), ddp.evaluated(name), loss)


def name_of(name: str) -> str:
    return name.replace("module.", "")


def pretrain_with(
    command_line: str, prepare_model: Callable[[list[MegatronModule]], None] = lambda model: None
) -> Any:
    """Train a model that is changed before the optimizer sees it; return record and model."""
    kept: list[MegatronModule] = []

    def build_and_keep(*args: Any) -> list[MegatronModule]:
        kept.extend(build_model(*args))
        prepare_model(kept)
        return kept

    with patch.object(loop, "build_model", build_and_keep):
        return pretrain(command_line), kept

# SPDX-License-Identifier: Apache-2.0
"""Training with --use-megatron-fsdp gives the numbers of Megatron-Core's own data parallelism."""

import logging
import re
from typing import Any
from unittest.mock import patch

import pytest

from megatron.pretrain import loop
from tests.support.pretrain.parity import LEVELS, LLAMA, RECOMPUTED
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import (
    NO_DROPOUT,
    SMALL,
    Record,
    assert_close,
    assert_same_run,
    pretrain,
    train,
    trained,
)
from tests.support.rank_pool import run_ranks

SHORT = f"{SMALL} --train-iters 3 --lr-decay-iters 20 --log-params-norm --log-num-zeros-in-grad"
WITH_DROPOUT = SHORT.replace(NO_DROPOUT, "--attention-dropout 0.1 --hidden-dropout 0.1")

BEGINNING = 6
"""Steps that every strategy repeats: warm-up, the first of the decay, and some more for Adam."""


@pytest.fixture(scope="module")
def reference() -> Record:
    """Twenty steps with DistributedDataParallel, each rank with the whole optimizer state."""
    return trained(SMALL)[0]


def test_the_reference_learns(reference: Record) -> None:
    assert reference.losses[-1] < reference.losses[0] - 1


class Told(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_with_slots(command_line: str) -> tuple[Record, list[str]]:
    """Job: train; return what the log says about memory slots, too."""
    told = Told()
    logger = logging.getLogger("megatron.fsdp.backends.memory_slots")
    logger.addHandler(told)
    try:
        return pretrain(command_line), told.messages
    finally:
        logger.removeHandler(told)


@pytest.mark.exhaustive
def test_a_run_with_memory_slots_tells_their_number_and_bytes(reference: Record) -> None:
    line = f"{SMALL} {FSDP} --data-parallel-sharding-strategy optim_grads_params --exit-interval 3"
    (run, told), (_, nothing) = run_ranks(2, train_with_slots, f"{line} --fsdp-double-buffer")
    assert_close(run.losses, reference.losses[:3], 1e-5)
    assert len(told) == 2 and not nothing  # the first rank tells
    for message, contents in zip(told, ("gathered weights", "local gradients")):
        assert re.fullmatch(
            rf"memory slots of {contents}: \d+ of [\d, ]+ bytes, [\d,]+ in all", message
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", LEVELS)
def test_every_strategy_trains_as_ddp_does(strategy: str, reference: Record) -> None:
    line = (
        f"{SMALL} {FSDP} --data-parallel-sharding-strategy {strategy} --exit-interval {BEGINNING}"
    )
    (run,), (other,) = run_ranks(2, train, line)
    assert run.losses == other.losses and len(run.losses) == BEGINNING
    assert_close(run.losses, reference.losses[:BEGINNING], 1e-5)
    assert_close(run.column("grad-norm"), reference.column("grad-norm")[:BEGINNING], 1e-4)
    assert run.column("learning-rate") == reference.column("learning-rate")[:BEGINNING]


def compare(flags: str, loss: float, norm: float) -> Record:
    """Compare all numbers that runs with DDP and with FSDP report, by relative tolerances."""
    ddp, fsdp = trained(f"{SHORT} {flags}", f"{SHORT} {flags} {FSDP}")
    assert_same_run(fsdp, ddp, loss, norm)
    return fsdp


@pytest.mark.always("clip")
@pytest.mark.parametrize(
    "flags",
    [
        "--use-distributed-optimizer --data-parallel-random-init",
        f"--overlap-grad-reduce --ddp-average-in-collective {LLAMA}",
        "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer"
        " --calculate-per-token-loss",
        "--global-batch-size 4 --no-check-for-nan-in-loss-and-grad --position-embedding-type rope",
        "--clip-grad 0.1 --weight-decay 0.3 --untie-embeddings-and-output-weights"
        " --decoupled-lr 2e-2 --decoupled-min-lr 1e-3",
    ],
    ids=["distributed_optimizer", "llama", "overlap", "batch", "clip"],
)
def test_flags_change_fsdp_as_they_change_ddp(flags: str) -> None:
    fsdp = compare(flags, loss=1e-5, norm=1e-4)
    assert all(number is not None for number in fsdp.column("num-zeros"))


@pytest.mark.exhaustive
def test_zeros_in_the_gradient_are_counted_as_ddp_counts_them() -> None:
    # Tokens that do not occur have a gradient of exactly zero, unless the embedding is tied to the
    # output.
    line = f"{SHORT} --untie-embeddings-and-output-weights --vocab-size 999 --train-iters 2"
    ddp, fsdp = trained(line, f"{line} {FSDP}")
    assert fsdp.column("num-zeros") == ddp.column("num-zeros")
    assert all(number > 32 for number in fsdp.column("num-zeros"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_overlap_does_not_change_the_numbers(strategy: str) -> None:
    line = f"{SHORT} {FSDP} --data-parallel-sharding-strategy {strategy}"
    overlap = "--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather"
    plain, reduced, both = trained(line, *(f"{line} {flags}" for flags in overlap))
    for overlapped in (reduced, both):
        # Level 1 without overlap reduces every microbatch for itself, with it their sum: other
        # roundings.
        assert_close(overlapped.losses, plain.losses, 1e-6 if strategy == "optim" else 0)
        tolerance = 1e-5 if strategy == "optim" else 0
        assert_close(overlapped.column("grad-norm"), plain.column("grad-norm"), tolerance)


@pytest.mark.exhaustive
def test_recomputed_activations_do_not_change_a_number() -> None:
    line = f"{WITH_DROPOUT} {FSDP} --data-parallel-sharding-strategy optim_grads_params"
    plain, *recomputed = trained(line, f"{line} {RECOMPUTED}", f"{line} --recompute-activations")
    for record in recomputed:
        assert record.losses == plain.losses
        assert record.column("grad-norm") == plain.column("grad-norm")


@pytest.mark.exhaustive
def test_evaluation_neither_disturbs_training_nor_depends_on_the_kind_of_data_parallelism() -> None:
    evaluated = SHORT.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 1")
    plain, ddp, fsdp = trained(f"{SHORT} {FSDP}", evaluated, f"{evaluated} {FSDP}")
    assert fsdp.losses == plain.losses
    assert [iteration for iteration, _ in fsdp.evaluations["validation"]] == [1, 2, 3]
    for name in ("validation", "test"):
        assert_close(fsdp.evaluated(name), ddp.evaluated(name), 1e-5)


@pytest.mark.exhaustive
def test_without_validation_data_training_goes_on() -> None:
    line = SHORT.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 1 --split 100,0,0")
    (record,) = trained(f"{line} {FSDP}")
    assert record.iteration == 3 and not record.evaluations


@pytest.mark.exhaustive
def test_a_run_that_was_told_to_stop_does_not_evaluate_first() -> None:
    line = f"{SHORT} {FSDP}".replace("--eval-iters 0", "--eval-iters 1")
    stopped, whole = trained(f"{line} --exit-interval 2", line)
    assert stopped.iteration == 2 and not stopped.evaluations
    assert list(whole.evaluations) == ["test"]


def validation_after(command_line: str, consumed: int) -> list[float]:
    """Job: return validation losses of a run that resumes after `consumed` validation samples."""
    original = loop.checkpointing.load

    def load(*args: Any) -> Any:
        progress = original(*args)
        progress.consumed_valid_samples = consumed
        return progress

    with patch.object(loop.checkpointing, "load", load):
        return pretrain(command_line).evaluated("validation")


@pytest.mark.exhaustive
def test_validation_begins_again_where_the_data_ends() -> None:
    line = f"{SHORT} {FSDP}".replace("--eval-iters 0", "--eval-iters 1 --eval-interval 1")
    assert len(run_ranks(2, validation_after, line, 10_000)[0]) == 3


@pytest.mark.exhaustive
def test_validation_after_other_evaluations_begins_at_a_whole_part() -> None:
    line = f"{SHORT} {FSDP}".replace("--eval-iters 0", "--eval-iters 1 --eval-interval 1")
    whole = run_ranks(2, validation_after, line, 16)[0]
    assert run_ranks(2, validation_after, line, 16 + 5)[0] == whole

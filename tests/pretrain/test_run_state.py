# SPDX-License-Identifier: Apache-2.0
"""The counters of a run, in checkpoints too, and the arguments that a run cannot change."""

import argparse

import pytest

from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain.arguments.check import FrozenArguments


def test_a_step_counts_its_samples_and_operations() -> None:
    progress = Progress(iteration=2, consumed_train_samples=16)
    progress.count_step(num_samples=8, flops=1e6)
    assert progress == Progress(3, 24, num_floating_point_operations_so_far=1e6)


@pytest.mark.parametrize(
    ("interval", "is_multiple"), [(3, True), (6, True), (4, False), (0, False), (None, False)]
)
def test_an_interval_of_none_or_zero_is_never_met(interval: int | None, is_multiple: bool) -> None:
    assert Progress(iteration=6).is_multiple_of(interval) == is_multiple


def test_the_args_of_a_checkpoint_carry_the_progress_and_give_it_back() -> None:
    progress = Progress(3, 24, 1, 8, 1e6)
    args = FrozenArguments(argparse.Namespace(lr=0.1), padded_vocab_size=128)
    written = progress.written_into(args)
    assert type(written) is argparse.Namespace
    assert (written.lr, written.padded_vocab_size) == (0.1, 128)
    assert (written.iteration, written.consumed_train_samples) == (3, 24)
    content = {"args": written, "iteration": 3, "num_floating_point_operations_so_far": 1e6}
    assert Progress.of_checkpoint(content) == progress


def test_counters_that_an_older_checkpoint_lacks_are_zero() -> None:
    content = {"args": argparse.Namespace(), "iteration": 3}
    assert Progress.of_checkpoint(content) == Progress(iteration=3)


def test_the_arguments_of_a_run_are_read_only() -> None:
    args = FrozenArguments(argparse.Namespace(lr=0.1))
    with pytest.raises(AttributeError, match="cannot set lr"):
        args.lr = 0.2
    with pytest.raises(AttributeError, match="cannot delete lr"):
        del args.lr
    assert vars(args) == {"lr": 0.1}

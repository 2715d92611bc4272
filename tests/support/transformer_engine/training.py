# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program with Transformer Engine's layers, on ranks of their own.

Jobs for `ranks`, see there. Command lines name the layers: --transformer-impl transformer_engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.pretrain import training_runs
from tests.support.pretrain.training_runs import SMALL, Record, write_counting_corpus
from tests.support.transformer_engine.collectives import join_no_collectives
from tests.support.transformer_engine.ranks import ranks

Run = Callable[..., Any]

LAYERS = (
    f"{SMALL} --hidden-size 64 --bf16 --transformer-impl transformer_engine --train-iters 4"
    " --lr-decay-iters 20 --clip-grad 1000"
)
"""No gradient is clipped: the last bits of norms differ, and would be in all weights."""
ONE_LAYER = f"{LAYERS} --num-layers 1"
"""Enough for what only the optimizer does."""
FP8 = "--fp8-format hybrid"
STORED = f"{FP8} --fp8-param-gather"


def train(*command_lines: str) -> list[Record]:
    """Job: runs one after the other, each as if it were alone."""
    with join_no_collectives():
        return training_runs.train(*command_lines)


def runner(num_ranks: int, base: str) -> Run:
    """Return a function that runs a job on ranks, with a command line for each of its arguments.

    It returns the result of the first rank.

    Args:
        num_ranks: number of ranks.
        base: what every command line begins with.
    """
    write_counting_corpus()
    run_on_ranks = ranks(num_ranks)

    def run(*flags: str, job: Callable[..., Any] = train, **settings: Any) -> Any:
        return run_on_ranks(job, *(f"{base} {each}" for each in flags), **settings)[0]

    return run

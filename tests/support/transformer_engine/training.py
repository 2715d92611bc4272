# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program with Transformer Engine's layers, on ranks of their own.

Jobs for `ranks`, see there. Command lines name the layers: --transformer-impl transformer_engine.
"""

from __future__ import annotations

from tests.support.pretrain import training_runs
from tests.support.pretrain.training_runs import SMALL, Record
from tests.support.transformer_engine.collectives import join_no_collectives

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

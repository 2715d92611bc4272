# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program with Transformer Engine's layers, on ranks of their own.

Jobs for `ranks`, see there. Command lines name the layers: --transformer-impl transformer_engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron.core.distributed import param_and_grad_buffer

from tests.support.pretrain import training_runs
from tests.support.pretrain.training_runs import SMALL, Record

LAYERS = (
    f"{SMALL} --hidden-size 64 --bf16 --transformer-impl transformer_engine --train-iters 4"
    " --lr-decay-iters 20 --clip-grad 1000"
)
"""No gradient is clipped: the last bits of norms differ, and would be in all weights."""
FP8 = "--fp8-format hybrid"
STORED = f"{FP8} --fp8-param-gather"


def train(*command_lines: str) -> list[Record]:
    """Job: runs one after the other, each as if it were alone."""
    with patch.object(param_and_grad_buffer, "_coalescing_manager", one_after_the_other):
        return training_runs.train(*command_lines)


@contextmanager
def one_after_the_other(group: Any, async_ops: bool = False) -> Iterator[SimpleNamespace]:
    """Do not join collectives: gloo would convert those of FP8 codes to the dtype of others."""
    assert not async_ops, "run Megatron-Core's data parallelism without overlap"
    yield SimpleNamespace(wait=lambda: None)

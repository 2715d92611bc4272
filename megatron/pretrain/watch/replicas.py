# SPDX-License-Identifier: Apache-2.0
"""The check that replicas of weights are equal, by hashes, as Megatron-Core makes them.

Compared are all weights under Megatron-Core's data parallelism, and the gathered weights of levels
0 to 2 of --use-megatron-fsdp. Level 3 is refused, as in Megatron-LM.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import check_param_hashes_across_dp_replicas
from torch import nn

from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter import FullyShardedDataParallel
from megatron.pretrain.checkpoints.torch_dist_checkpoint import gathered_weights
from megatron.pretrain.errors import RunError


def check_replicas(args: argparse.Namespace, model: list[MegatronModule], iteration: int) -> None:
    """Compare the weights of all replicas. This is a collective.

    Raises:
        RunError: on every rank, with the names of the weights that differ.
    """
    if args.use_megatron_fsdp:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)
        names = _differing([GatheredWeights(chunk) for chunk in model])
    else:
        with gathered_weights(model):
            names = _differing(model)
    problems = agree([f"rank {dist.get_rank()}: {name}" for name in names])
    if problems:
        raise RunError(
            f"after iteration {iteration} these weights differ from those of the first replica:\n  "
            + "\n  ".join(problems)
        )


class GatheredWeights(nn.Module):
    """The weights with which a sharded chunk computes, by the names of Megatron-Core's modules."""

    def __init__(self, chunk: FullyShardedDataParallel):
        super().__init__()
        self._weights = [(each.name, each.compute) for each in chunk.module.sharded_params]

    def named_parameters(  # type: ignore[override]  # Megatron-Core calls it without arguments
        self,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights, whole, in the dtype of the model."""
        yield from self._weights


def _differing(model: list[nn.Module]) -> list[str]:
    """Return the names of this rank's weights that differ, by Megatron-Core's check."""
    with _messages() as messages:
        equal = check_param_hashes_across_dp_replicas(model, cross_check=True)
    # "[Rank 1] Hash not matching for NAME in model chunk0"
    marked = [text.partition(" for ")[2].partition(" in model chunk")[0] for text in messages]
    return [] if equal else marked


@contextmanager
def _messages() -> Iterator[list[str]]:
    """Collect what Megatron-Core logs about differing weights, instead of showing it."""
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())

    handler = logging.Handler()
    handler.emit = keep  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.utils")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.removeHandler(handler)

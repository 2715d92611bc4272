# SPDX-License-Identifier: Apache-2.0
"""The run whose checkpoints the benchmarks of saves and loads measure."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.mcore_adapter.run import environment
from megatron.mcore_adapter.run.run_state import TrainedParts
from megatron.pretrain import ranks
from megatron.pretrain.arguments import parse_arguments
from megatron.pretrain.arguments.check import FrozenArguments
from megatron.pretrain.model.gpt_model import build_model
from megatron.pretrain.model.gpt_optimizer import build_optimizer

FORMATS = {"fsdp_dtensor": ["--use-megatron-fsdp"], "torch_dist": ["--use-distributed-optimizer"]}
"""Format of checkpoints -> flags of a run that writes it."""

VOCABULARY = 8192

TRAINING = [
    *("--seq-length", "64", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"),
    *("--save-interval", "1"),
]


class SavedRun:
    """The arguments, model, optimizer and schedule of a run, built as pretrain_gpt.py does.

    Args:
        flags: of pretrain_gpt.py, beside those of a short training.
    """

    def __init__(self, flags: list[str]):
        args, _ = parse_arguments(
            [*TRAINING, *flags],
            world_size=environment.environment_world_size(),
            cuda=torch.cuda.is_available(),
            transformer_engine=False,
        )
        if not dist.is_initialized():
            ranks.start(args)
        self.args = FrozenArguments(args, padded_vocab_size=VOCABULARY)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build_model(self.args, VOCABULARY, self.device)
        self.optimizer, self.scheduler = build_optimizer(self.args, self.model)

    @property
    def parts(self) -> TrainedParts:
        """Model, optimizer and schedule, as saves and loads take them."""
        return TrainedParts(self.model, self.optimizer, self.scheduler)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each parameter by its name in the model, without the wrapper."""
        parameters = self.model[0].module.named_parameters()
        return {name.removeprefix("module."): value.shape for name, value in parameters}


def quiet(line: str) -> None:
    """Print nothing."""


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done ``action``."""
    gc.collect()
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin

# SPDX-License-Identifier: Apache-2.0
"""A run of the stand-in for the loop of Megatron-LM, with the drop-in installed."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.spelling import plain_name
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.mcore_adapter import cpu, drop_in
from tests.support.mcore_adapter.megatron_lm_loop import arguments, loaded
from tests.support.model_parallel import ONE_AXIS, initialize


class LoopRun:
    """Model, optimizer and schedule of one run of the stand-in."""

    def __init__(self, loop: ModuleType, **changes: Any) -> None:
        cpu.install()
        self.loop, self.args = loop, arguments(**changes)
        layout = {name: value for name, value in vars(self.args).items() if name in vars(ONE_AXIS)}
        initialize(Namespace(**{**vars(ONE_AXIS), **layout}))
        self.model, self.optimizer, self.scheduler = loop.setup(self.args)

    def train(self, steps: int) -> list[float]:
        return self.loop.train(self.args, self.model, self.optimizer, self.scheduler, steps)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.loop.run_schedule(self.args, self.model, forward_only=True)

    def save(self, path: Path) -> None:
        self.loop.save_checkpoint(self.args, self.model, self.optimizer, self.scheduler, path)

    def load(self, path: Path) -> None:
        self.loop.load_checkpoint(self.args, self.model, self.optimizer, self.scheduler, path)

    @property
    def scaler(self) -> dict[str, float]:
        """The loss scale and what it remembers; empty without one."""
        first, *_ = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        scaler = first.grad_scaler
        return (
            {name: float(value) for name, value in scaler.state_dict().items()}
            if scaler is not None
            else {}
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            plain_name(name): full_tensor(parameter)
            for name, parameter in self.model[0].named_parameters()
        }

    def slots(self, slot: str) -> dict[str, torch.Tensor]:
        state = self.optimizer.optimizer.state
        values = {
            plain_name(name): state[each][slot] for name, each in self.model[0].named_parameters()
        }
        return {
            name: full_tensor(value) if isinstance(value, DTensor) else value
            for name, value in values.items()
        }


@contextmanager
def dropped_in() -> Iterator[ModuleType]:
    """Import the stand-in while the drop-in is installed."""
    with drop_in.install(), loaded() as loop:
        yield loop

# SPDX-License-Identifier: Apache-2.0
"""Moving averages of the weights of a sharded model, sharded like its main weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron.fsdp.dtensor.sharded_param import ShardedParam, is_linked, sharded_param_of
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.module.own_names import own_name
from megatron.fsdp.module.sharded_module import ShardedModule


class WeightAverage:
    """An exponential moving average of the main weights of a sharded model.

    Every rank averages its main weights only, in their dtype, without communication.

        average = WeightAverage(model, decay=0.999)
        average.update()  # after each step of the optimizer
        with average.applied():
            evaluate(model)

    Args:
        model: the sharded model; the average begins with its weights.
        decay: the share of the old average in the new one, 0 to 1.
    """

    def __init__(self, model: ShardedModule, decay: float = 0.999):
        if not isinstance(model, ShardedModule):
            raise ValueError(
                f"model expects the result of fully_shard or fully_shard_model but got"
                f" {type(model).__name__}"
            )
        if not 0 <= decay <= 1:
            raise ValueError(f"decay expects a number from 0 to 1 but got {decay!r}")
        self.decay = decay
        self.num_updates = 0
        self._model = model
        self._is_applied = False
        self._averages = [group.main_shard.detach().clone() for group in model.groups]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights to the average, after a step of the optimizer."""
        if self._is_applied:
            raise RuntimeError("update the average outside of applied(): the model has it there")
        self.num_updates += 1
        for average, group in zip(self._averages, self._model.groups):
            average.lerp_(group.main_shard, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[ShardedModule]:
        """Give the model the averages inside the context, which all ranks enter together."""
        self._exchange()
        self._is_applied = True
        try:
            yield self._model
        finally:
            self._is_applied = False
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, group in zip(self._averages, self._model.groups):
            group.wait_for_readers()
            kept = group.main_shard.clone()
            group.main_shard.copy_(average)
            average.copy_(kept)
            group.mark_main_weights_changed()

    def _named(self) -> dict[str, ShardedParam]:
        named = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if is_linked(parameter):
                named[name] = sharded_param_of(parameter)
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, as DTensors that share their storage, and ``num_updates``."""
        state: dict[str, Any] = {"num_updates": self.num_updates}
        flat_of = dict(zip(self._model.groups, self._averages))
        for name, sharded_param in self._named().items():
            group = sharded_param.group
            local = shard_view(
                shard=flat_of[group],
                layout=group.layout,
                index=sharded_param.index,
                rank=group.rank,
            )
            state[name] = sharded_param.checkpoint_tensor(sharded_param.over(local))
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the averages from DTensors of the same layout, or full tensors."""
        averages = self.state_dict()
        state_dict = {own_name(name): value for name, value in state_dict.items()}
        different = sorted(averages.keys() ^ set(state_dict))
        if different:
            raise RuntimeError(f"the state dict is of another model: {', '.join(different[:5])}")
        for name, sharded_param in self._named().items():
            shard = sharded_param.local_shard(state_dict[name])
            local = averages[name]._local_tensor
            local.view(-1).copy_(shard.reshape(-1))
        self.num_updates = int(state_dict["num_updates"])

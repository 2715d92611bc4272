# SPDX-License-Identifier: Apache-2.0
"""The forward step of one microbatch, as Megatron-Core's schedules call it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from megatron.mcore_adapter.releases.process_groups import batch_on_this_rank
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.watch import position
from megatron.pretrain.report.timing import BATCH, PhaseTimes

Microbatches = Generator[dict[str, torch.Tensor], None, None]
"""Microbatches of one rank, see :func:`megatron.pretrain.data.samplers.build_iterator`."""
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Sum of losses, number of tokens, and the values that the schedule returns for the report."""


class ForwardStep:
    """A forward step that returns the losses of a microbatch and the function that sums them.

    Args:
        args: arguments of the run.
        device: to which microbatches are copied.
        iteration: number of training steps done so far, for error messages.
        times: measure the time until a microbatch is there.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        iteration: int,
        times: PhaseTimes,
    ):
        self._args = args
        self._device = device
        self._iteration = iteration
        self._times = times

    def __call__(
        self,
        data: Microbatches,
        model: MegatronModule,
        return_schedule_plan: bool = False,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
        """Run the model on the next microbatch, or return its plan for the combined schedule.

        Returns:
            The plan, or the model's output, on the last pipeline stage the loss of every token, and
            the function that sums it.
        """
        batch = {}
        with self._times.measured(BATCH, level=2), position.during(position.READING):
            for name, value in next(data).items():
                batch[name] = value.to(self._device, non_blocking=True)
        batch = batch_on_this_rank(batch)
        mask = batch["loss_mask"]
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch.get("attention_mask"),
            labels=batch["labels"],
            loss_mask=mask,
        )
        return output, lambda output: self.loss(output, mask)

    def loss(self, losses: torch.Tensor, mask: torch.Tensor) -> Loss:
        """Sum the losses where ``mask`` is 1.

        Args:
            losses: loss of every token, ``[batch, length]``.
            mask: 1 for tokens that count, 0 for others, ``[batch, length]``.

        Returns:
            The sum, the number of tokens that count (int32), and under ``lm loss`` both of them in
            float32, ``[2]``.

        Raises:
            RunError: the sum is NaN or infinite.
        """
        total = torch.sum(losses.float() * mask)
        tokens = mask.sum().to(torch.int)
        if self._args.check_for_nan_in_loss_and_grad and not torch.isfinite(total):
            raise RunError(
                f"rank {dist.get_rank()}: the loss is {total.item()} in iteration"
                f" {self._iteration + 1}"
            )
        # A copy: the schedule scales the loss in place.
        return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens.float()])}

# SPDX-License-Identifier: Apache-2.0
"""Random numbers that operations on whole tensors draw: those of the first rank, on all ranks.

Programs seed ranks differently, for dropout and data. Without this, the ranks that have the same
elements of a parameter would fill them with different numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megatron.fsdp.engine.collectives import broadcast_over


def call_with_equal_draws(
    operation: Callable[[], Any],
    operands: Sequence[torch.Tensor],
    groups: Collection[dist.ProcessGroup],
) -> Any:
    """Call an operation on tensors that are equal on all ranks, with equal results.

    If it draws from the default generator, results and operands that it has written to are
    broadcast; a collective then. The generators of the ranks go on as if each were alone.

    Args:
        operation: the call.
        operands: at least one plain tensor.
        groups: process groups that reach all ranks that call together, one after the other.
    """
    device = operands[0].device
    state = _generator_state(device)
    versions = [each._version for each in operands]
    result = operation()
    if torch.equal(state, _generator_state(device)):
        return result
    written = [each for each, version in zip(operands, versions) if each._version != version]
    for tensor in tree_leaves((result, written)):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
            content = tensor.detach().contiguous()
            broadcast_over(content.view(-1).view(torch.uint8), groups)
            tensor.detach().copy_(content)
    return result


def _generator_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state

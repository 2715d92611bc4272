# SPDX-License-Identifier: Apache-2.0
"""Trainings and programs that run on the model because of their process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.fsdp.engine import collectives
from tests.support.cuda_model.machine import bound_device
from tests.support.fsdp.meshes import Meshes, device_type


def groups_of_some_ranks(level: int, meshes: Meshes) -> None:
    """Create a group where the first rank alone does, with a device that is bound to all ranks."""
    with bound_device():
        if dist.get_rank() == 0:
            group = collectives.local_group([0])
            dist.all_reduce(torch.ones(level, device=device_type()), group=group)

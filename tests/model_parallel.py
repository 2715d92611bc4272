# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's process groups on warm ranks, made once: there are some forty of them, each with threads of its own."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

GLOBALS = [name for name in vars(parallel_state) if name.startswith("_") and name.isupper()] + ["_global_process_group_list"]

_kept: dict[str, Any] = {}
_world: Any = None


def initialize_data_parallel() -> None:
    """`parallel_state` with nothing but a data axis; what an earlier job on this rank made is taken up again."""
    global _kept, _world
    if parallel_state.model_parallel_is_initialized():
        return
    if _world is dist.group.WORLD and _kept:
        vars(parallel_state).update(_kept)
        return
    parallel_state.initialize_model_parallel()
    _world = dist.group.WORLD
    _kept = {name: value for name, value in vars(parallel_state).items() if name in GLOBALS}

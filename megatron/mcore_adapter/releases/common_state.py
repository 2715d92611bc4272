# SPDX-License-Identifier: Apache-2.0
"""The common state of checkpoints in torch_dist: arguments, counters, schedule, param groups.

Megatron-Core 0.19 writes it as an object of the checkpoint and reads both forms. Releases before
it know the file ``common.pt`` alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.strategies import common

from megatron.checkpoint.torch_dist.unsharded_state import COMMON_OBJECT


@contextmanager
def common_object_readable(read: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Let the installed release load a checkpoint whose common state is an object of it.

    Args:
        read: returns that common state. It is called only where the release does not read it.
    """
    if not hasattr(CheckpointingConfig, "common_backend"):
        yield
        return
    content = read()
    original_load_entries = serialization.load_sharded_metadata

    def load_common(*_: Any) -> dict[str, Any]:
        return copy.deepcopy(content)  # the rest of the checkpoint is merged into it

    def load_entries(*args: Any) -> dict[str, Any]:
        entries = dict(original_load_entries(*args))
        entries.pop(COMMON_OBJECT, None)  # no run requests it, which strict loads would report
        return entries

    # 0.16 has a class, 0.17 and 0.18 have a function.
    reader: Any = getattr(common, "TorchCommonLoadStrategy", serialization)
    with ExitStack() as undo:
        undo.callback(setattr, reader, "load_common", reader.load_common)
        undo.callback(setattr, serialization, "load_sharded_metadata", original_load_entries)
        reader.load_common = load_common
        serialization.load_sharded_metadata = load_entries
        yield

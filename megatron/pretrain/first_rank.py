# SPDX-License-Identifier: Apache-2.0
"""Decisions of the first rank: it looks at the file system, and the others follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from megatron.pretrain.errors import RunError

Result = TypeVar("Result")


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and return its result, or raise its error, on every rank."""
    if not dist.is_initialized():
        return action()
    outcome: list[Result | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [action()]
        except (ValueError, OSError, RunError) as error:
            outcome = [error]
        except Exception as error:
            # The other ranks wait, whatever went wrong. Not every error can be pickled.
            outcome = [RunError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return cast(Result, outcome[0])

# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's data parallelism with FP8 weights over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


def join_no_collectives() -> AbstractContextManager[Any]:
    """Return a context that keeps apart what Megatron-Core joins.

    In one joined collective gloo converts codes of FP8 weights to the dtype of the other weights.
    """
    from megatron.core.distributed import param_and_grad_buffer

    return patch.object(param_and_grad_buffer, "_coalescing_manager", one_after_the_other)


@contextmanager
def one_after_the_other(group: Any, async_ops: bool = False) -> Iterator[SimpleNamespace]:
    """Stand in for the manager of joined collectives."""
    assert not async_ops, "run Megatron-Core's data parallelism without overlap"
    yield SimpleNamespace(wait=lambda: None)

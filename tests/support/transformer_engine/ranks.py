# SPDX-License-Identifier: Apache-2.0
"""Ranks with Transformer Engine: processes of their own, which no other test uses.

    run = ranks(2)
    first, second = run(weight_of_linear, 64)           # a function at module level

It may call `transformer_engine_on_cpu.use()` to get at the package, and Megatron-Core, imported by
the function or its module, finds it too. Results are plain tensors and values: this process could
not read others. Like other ranks they are kept for the whole pytest run, as a start takes seconds.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import rank_pool
from tools.transformer_engine_on_cpu import BLACKWELL, obstacle, use

RunOnRanks = Callable[..., list[Any]]
TIMEOUT = 120.0


def ranks(
    world_size: int, capability: tuple[int, int] = BLACKWELL, timeout: float = TIMEOUT
) -> RunOnRanks:
    """Return a function that calls another one on each rank of a gloo world.

    It returns the results in rank order. The first call for a world size and capability starts the
    ranks, and so does the first one after a failure, which ends them. Where Transformer Engine
    cannot run, the test is skipped with the reason.
    """
    require()

    def run(function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        # Twice: the modules of a function and of its arguments are imported after the package.
        inner = rank_pool.pickled_call(function, args, settings)
        call = rank_pool.pickled_call(_call, (capability, inner), {})
        return rank_pool.run_call(call, (world_size, capability), timeout)

    return run


def require() -> None:
    """Skip the test, with the reason, where Transformer Engine cannot run."""
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)


def _call(capability: tuple[int, int], call: bytes) -> Any:
    if "transformer_engine" not in sys.modules:
        _forget_megatron()
    te = use(capability)
    # What an earlier test has left: amax histories, recipes, whether it was within an autocast
    te.quantization.FP8GlobalStateManager.reset()
    function, args, settings = pickle.loads(call)
    return function(*args, **settings)


def _forget_megatron() -> None:
    """Let Megatron-Core be imported again: the server of ranks has done so without the package."""
    for name in list(sys.modules):
        if name.split(".")[0] == "megatron":
            del sys.modules[name]

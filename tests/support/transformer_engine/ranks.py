# SPDX-License-Identifier: Apache-2.0
"""Ranks with Transformer Engine: processes of their own, which no other test uses.

    run = ranks(2)
    first, second = run(weight_of_linear, 64)           # a function at module level

It may call `transformer_engine_on_cpu.use()` to get at the package, and Megatron-Core, imported by
the function or its module, finds it too. Results are plain tensors and values: this process could
not read others. Like other ranks they are kept for the whole pytest run, as a start takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.fork_servers import Packages
from tests.support.rank_pool import run_ranks
from tools.transformer_engine_on_cpu import BLACKWELL, obstacle, use

RunOnRanks = Callable[..., list[Any]]


def ranks(
    world_size: int, capability: tuple[int, int] = BLACKWELL, release: str | None = None
) -> RunOnRanks:
    """Return a function that calls another one on each rank of a gloo world.

    It returns the results in rank order. The first call for a world size, a capability and a
    release of Megatron-Core starts the ranks, and so does the first one after a failure, which ends
    them. Where Transformer Engine cannot run, the test is skipped with the reason.
    """
    require()
    packages = Packages(release, capability)

    def run(function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        return run_ranks(world_size, _call, function, args, settings, packages=packages)

    return run


def require() -> None:
    """Skip the test, with the reason, where Transformer Engine cannot run."""
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)


def _call(function: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    # What an earlier test has left: amax histories, recipes, whether it was within an autocast
    use().quantization.FP8GlobalStateManager.reset()
    return function(*args, **settings)

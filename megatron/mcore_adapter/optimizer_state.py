# SPDX-License-Identifier: Apache-2.0
"""State of Megatron-Core's optimizers before their first step."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.fsdp.optimizer.optimizer_state import initial_state


def make_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create the state that the first step would create: moments zero, step 0.

    Parameters of which this rank owns nothing get state too. Checkpoints then have the same keys on
    every rank, and loading needs no step, which would change weights. Fused optimizers (Transformer
    Engine's and Apex's) can create their own state, and count steps per group.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        if _is_of_torch(inner):
            _fill_state(inner)
            continue
        part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            group.setdefault("step", 0)


def _is_of_torch(optimizer: object) -> bool:
    package = type(optimizer).__module__.split(".")[0]
    return isinstance(optimizer, torch.optim.Optimizer) and package == "torch"


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = initial_state(
                    optimizer, type(optimizer), group, parameter
                )

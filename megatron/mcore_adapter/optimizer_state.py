# SPDX-License-Identifier: Apache-2.0
"""State of Megatron-Core's optimizers before their first step."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.fsdp.optimizer_state import initial_state


def make_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Make the state that the first step would make (moments zero, step 0), for parameters this rank owns nothing of
    too: checkpoints then have the same keys on every rank, and loading needs no step that moves
    weights.

    Fused optimizers (Transformer Engine's, Apex') know how to make theirs, and count steps per
    group.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        if (
            not isinstance(inner, torch.optim.Optimizer)
            or type(inner).__module__.split(".")[0] != "torch"
        ):
            part.init_state_fn(inner, part.config)
            for group in inner.param_groups:
                group.setdefault("step", 0)
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state.get(parameter):
                    inner.state[parameter] = initial_state(inner, type(inner), group, parameter)

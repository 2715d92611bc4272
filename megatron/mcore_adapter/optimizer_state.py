# SPDX-License-Identifier: Apache-2.0
"""State of Megatron-Core's optimizers before their first step."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.fsdp.optimizer import initial_state


def make_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Make the state that the first step would make (moments zero, step 0), for parameters this rank owns nothing of
    too: checkpoints then have the same keys on every rank, and loading needs no step that moves weights.

    Optimizers that are not torch's own (Transformer Engine's, Apex') make it themselves.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if not isinstance(inner, torch.optim.Adam):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state.get(parameter):
                    inner.state[parameter] = initial_state(inner, group, parameter)

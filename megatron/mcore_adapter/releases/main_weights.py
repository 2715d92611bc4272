# SPDX-License-Identifier: Apache-2.0
"""Main weights of a sharded model after a load without the optimizer, as with --finetune.

They are the weights that the model itself loads, so none have to be copied to them. Programs ask
the optimizer to copy them all the same, which does nothing up to Megatron-Core 0.17 and raises
NotImplementedError from 0.18 on.
"""

import functools
from itertools import chain
from typing import Any

from megatron.core.optimizer import DistributedOptimizer

from megatron.fsdp.sharded_module import is_owned

METHOD = "_copy_model_params_to_main_params"
_KEEPS = "keeps_main_weights"
"""Attribute of the method that copies no weights of sharded models."""


def keep_main_weights() -> None:
    """Let DistributedOptimizer copy no weights of sharded models."""
    original = getattr(DistributedOptimizer, METHOD)
    if hasattr(original, _KEEPS):
        return

    @functools.wraps(original)
    def copy_of_others(optimizer: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if not any(map(is_owned, parameters)):
            original(optimizer, *args, **kwargs)

    setattr(copy_of_others, _KEEPS, True)
    setattr(DistributedOptimizer, METHOD, copy_of_others)

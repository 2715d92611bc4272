# SPDX-License-Identifier: Apache-2.0
"""Sharded training with accelerate and transformers. See `megatron.huggingface`."""

from importlib import import_module
from typing import Any

_PLACES = {
    "ShardedAccelerator": "megatron.huggingface.accelerator",
    "ShardedTrainer": "megatron.huggingface.trainer",
    "ShardedSeq2SeqTrainer": "megatron.huggingface.trainer",
    "load_weights_of_shards": "megatron.huggingface.states",
}

__all__ = [  # noqa: F822  # imported when they are asked for
    "ShardedAccelerator",
    "ShardedSeq2SeqTrainer",
    "ShardedTrainer",
    "load_weights_of_shards",
]


def __getattr__(name: str) -> Any:
    """Import a class when it is asked for: accelerate does not need transformers."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("accelerate", "transformers"):
            raise
        raise ImportError(
            f"{name} needs the package {error.name}, which is not installed: pip install"
            " 'open-megatron-fsdp[huggingface]'"
        ) from error

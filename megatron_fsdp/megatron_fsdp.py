# SPDX-License-Identifier: Apache-2.0
"""The wrapper. See `megatron.fsdp.model`."""

from megatron.fsdp.model import MegatronFSDP
from megatron_fsdp.not_offered import attributes_of

__all__ = ["MegatronFSDP"]

_HOOKS = "hooks on modules and tensors drive the schedule; torch's own module hooks can be added"
__getattr__ = attributes_of(
    __name__,
    {
        "RegisterFSDPBackwardFunction": _HOOKS,
        "TrainingState": "the states of units are in megatron.fsdp.engine.states",
    },
)

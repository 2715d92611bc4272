# SPDX-License-Identifier: Apache-2.0
"""Members with a leading underscore that known programs call on the wrapper.

The published package exchanges the parameters of the module at some moments, and programs make it
do so: NeMo Automodel after sharding, Megatron-Core's overlapped schedules before a forward. Here
there is nothing to exchange. A module has its compute parameters for good, uses them in its
forward, and shows the sharded ones to code outside a forward.
"""

from __future__ import annotations

from megatron.fsdp.sharded_module import ShardedModule


class ClientMembers(ShardedModule):
    """The members that programs call to exchange parameters, with nothing to do."""

    is_param_fsdp_distributed = True
    """Outside a forward, ``model.module.parameters()`` yields sharded parameters."""

    def _replace_param_with_distributed_if_needed(self) -> None:
        """Do nothing: the module's parameters are the sharded ones outside a forward."""

    def _replace_param_with_raw_if_needed(self) -> None:
        """Do nothing: a forward of the model or of a module in it uses the compute parameters."""

# SPDX-License-Identifier: Apache-2.0
"""Trainability: which parameters are frozen, by flags of compute or of sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.fsdp.engine.loops_in_c import attributes
from megatron.fsdp.engine.unit import Unit


class Trainability:
    """The flags ``requires_grad`` of the parameters of a model."""

    # Code reads a parameter as the compute parameter or as the sharded one, and may set the
    # `requires_grad` of either. Autograd reads that of the compute parameter, the optimizer that of
    # the sharded one, so both are set alike before the next forward or backward.

    def __init__(
        self,
        units: Sequence[Unit],
        sharded: dict[nn.Parameter, nn.Parameter],
    ):
        self._units = units
        self._sharded_of = sharded
        self.parameters = list(sharded)
        self._sharded = list(sharded.values())
        self.flags = read_flags(self.parameters)  # True for those that are trained
        self.num_changes = 0  # changes of flags
        self.name_of: dict[nn.Parameter, str] = {}
        for unit in units:
            unit.find_trained()
            for group in unit.groups:
                self.name_of.update(zip(group.parameters, group.names))
        self.names = [self.name_of[parameter] for parameter in self.parameters]
        # Parameters that were frozen when the model was sharded: they have no gradients.
        self._frozen = []
        for parameter, is_trained in zip(self.parameters, self.flags):
            if not is_trained:
                self._frozen.append(parameter)

    def sync_requires_grad(self) -> None:
        """Set a flag that code has changed on one of the two parameters on the other one too."""
        # These are equal in every step but the first after a change.
        compute = read_flags(self.parameters)
        sharded = read_flags(self._sharded)
        if compute == self.flags == sharded:
            return
        for index, known in enumerate(self.flags):
            if compute[index] != known or sharded[index] != known:
                self.parameters[index].requires_grad_(not known)
                self._sharded[index].requires_grad_(not known)
                self.flags[index] = not known
        self.num_changes += 1
        for unit in self._units:
            unit.find_trained()

    def sync_requires_grad_of(self, compute: nn.Parameter) -> None:
        """Sync all flags if those of one parameter differ, before code gets either of the two."""
        # In `module.requires_grad_(False)` and then `module.head.weight.requires_grad_(True)`, the
        # first sets the sharded parameter, the second may set the compute parameter.
        first, second = read_flags([compute, self._sharded_of[compute]])
        if first != second:
            self.sync_requires_grad()

    def refuse_unfrozen(self) -> None:
        """Refuse a backward for parameters that were frozen when the model was sharded."""
        unfrozen = []
        for parameter in self._frozen:
            if parameter.requires_grad:
                unfrozen.append(self.name_of[parameter])
        if unfrozen:
            raise RuntimeError(
                f"{', '.join(unfrozen[:5])}: frozen when the model was sharded, so there are no"
                " gradients; shard the model with every parameter trainable that is to be trained,"
                " and freeze afterwards"
            )


def read_flags(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Return ``requires_grad`` of each parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return attributes(parameters, "requires_grad")

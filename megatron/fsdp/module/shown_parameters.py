# SPDX-License-Identifier: Apache-2.0
"""Shown parameters: those that code sees when it reads the parameters of a sharded module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.compiler import is_compiling

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.hooks import UnitHooks
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.states import WeightState
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module.trainability import Trainability

# Attribute of parameters that code reads only to pass them on as arguments. Reading such a
# parameter by name does not unshard its unit; the call that receives it does.
PASSED_ON = "_fsdp_passed_on"

REFUSED_MODULE_COPY = (
    "the module inside a sharded model cannot be copied or pickled by itself: its weights are in"
    " shards, and its hooks belong to the model. Use copy.deepcopy(model) of the wrapper, which"
    " returns a sharded copy, or save model.state_dict()"
)


class ShownParameters:
    """Chooses between the compute parameter and the sharded one when code reads a parameter.

    Args:
        hooks: know the calls under way, and the unit of each parameter.
        sharded: the sharded parameters, by compute parameter.
        trainability: syncs flags that code has set on the parameter it got before.
    """

    def __init__(
        self,
        hooks: UnitHooks,
        sharded: dict[nn.Parameter, nn.Parameter],
        trainability: Trainability,
    ):
        self._hooks = hooks
        self.sharded = sharded
        self._compute = {}
        for compute, parameter in sharded.items():
            self._compute[parameter] = compute
        self._trainability = trainability

    def read_in_list(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that code sees when it lists a module's parameters."""
        # Inside a forward it is the compute parameter, which is unsharded before it is used.
        # Elsewhere it is the sharded parameter: it has the gradient, and an optimizer steps it.
        unit = self._hooks.unit_of.get(parameter)
        if unit is None:
            return parameter
        calls = self._hooks.calls
        if calls and calls[-1].module is not None:
            return parameter
        return self._outside(unit, parameter)

    def read_by_name(
        self,
        parameter: nn.Parameter,
        group: ParamGroup | None,
    ) -> nn.Parameter:
        """Return the parameter of ``group`` that code sees when it reads one by name."""
        # Compiled code guards all that is read here. It is a state, so that layers share code.
        calls = self._hooks.calls
        if calls and is_compiling() and group and group.state is WeightState.UNSHARDED:
            return parameter
        # Inside a forward, or a method called on the wrapper, it is the compute parameter, whose
        # unit the innermost call borrows until it ends.
        unit = self._hooks.unit_of.get(parameter)
        if unit is None:
            return parameter
        if not calls:
            return self._outside(unit, parameter)
        # Nearly always the innermost call reads a parameter of its own unit.
        if calls[-1].unit is not unit and not hasattr(parameter, PASSED_ON):
            self._hooks.borrow(unit)
        if calls[-1].module is None:
            self._trainability.sync_requires_grad_of(parameter)
        return parameter

    def _outside(self, unit: Unit, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter for code outside of forwards: the sharded one."""
        # In backward, functions of users may compute with weights that are unsharded.
        if in_backward():
            unit.wait_for_unshard()
            if unit.is_unsharded:
                return parameter
            return self.sharded[parameter]
        self._trainability.sync_requires_grad_of(parameter)
        return self.sharded[parameter]

    def to_store(
        self,
        name: str,
        value: nn.Parameter | None,
        present: nn.Parameter | None,
    ) -> nn.Parameter | None:
        """Return the parameter to store where code assigns one to an attribute of a module.

        Args:
            name: of the attribute.
            value: the assigned parameter; of a sharded one the compute parameter is stored.
            present: the parameter that the module has under this name.

        Raises:
            ValueError: if both were sharded as two parameters, which cannot be tied any more.
        """
        compute = value
        if value is not None:
            compute = self._compute.get(value, value)
        if compute is present:
            return compute
        unit_of = self._hooks.unit_of
        if compute not in unit_of or present not in unit_of:
            return compute
        # A weight that is tied to another one only now: both are sharded already.
        names = self._trainability.name_of
        raise ValueError(
            f"{names[present]} cannot be tied to {names[compute]}: they were two"
            " parameters when the model was sharded, and each has its own shards and optimizer"
            f" state. Assign {name} before fully_shard; weights that were tied then stay tied"
        )


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """The ``_parameters`` dict of a module, which calls back when code reads parameters."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        shown: ShownParameters,
    ):
        super().__init__(parameters)
        self._shown = shown
        self._groups = {}
        for name, parameter in parameters.items():
            if parameter in shown.sharded:
                sharded_param = sharded_param_of(shown.sharded[parameter])
                self._groups[name] = sharded_param.group

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        present = super().get(name)
        stored = self._shown.to_store(name, value, present)
        super().__setitem__(name, stored)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is None:
            return None
        return self._shown.read_by_name(parameter, self._groups.get(name))

    def items(self) -> list[tuple[str, nn.Parameter | None]]:  # type: ignore[override]  # no view
        """Return names and parameters; a list, not a view."""
        items = []
        for name, parameter in super().items():
            if parameter is not None:
                parameter = self._shown.read_in_list(parameter)
            items.append((name, parameter))
        return items

    def values(self) -> list[nn.Parameter | None]:  # type: ignore[override]  # as above
        """Return the parameters; a list, not a view."""
        return [parameter for _, parameter in self.items()]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        """Return the copies that ``memo`` has of the parameters, in a plain dict."""
        copies: dict[str, nn.Parameter | None] = {}
        for name, parameter in super().items():
            if parameter is None:
                copies[name] = None
                continue
            if id(parameter) not in memo:
                raise NotImplementedError(REFUSED_MODULE_COPY)  # the module is copied by itself
            copies[name] = memo[id(parameter)]
        return copies

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(REFUSED_MODULE_COPY)


def watch_parameters(module: nn.Module, shown_parameters: ShownParameters) -> None:
    """Replace the ``_parameters`` of the modules in ``module`` by dicts that show others."""
    for inner in _not_compiled(module):
        if next(inner.parameters(recurse=False), None) is not None:
            inner._parameters = WatchedParameters(inner._parameters, shown_parameters)


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``module`` that are not part of a compiled module."""
    # The guards of a compiled module read its parameters before its forward begins, so they cannot
    # be watched.
    if isinstance(module, OptimizedModule):
        return
    if module._compiled_call_impl is not None:
        return
    yield module
    for child in module.children():
        yield from _not_compiled(child)

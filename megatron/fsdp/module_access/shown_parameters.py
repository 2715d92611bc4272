# SPDX-License-Identifier: Apache-2.0
"""Shown parameters: those that code sees when it reads the parameters of a sharded module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Schedule
from megatron.fsdp.engine.trainability import Trainability
from megatron.fsdp.engine.unit import Unit, UnitCall

PASSED_ON = "_fsdp_passed_on"
"""Attribute of parameters that code reads only to pass them on as arguments.

Reading such a parameter by name does not unshard its unit; the call that receives it does."""


REFUSED_COPY = (
    "the module inside a sharded model cannot be copied or pickled by itself: its weights are in"
    " shards, and its hooks belong to the model. Use copy.deepcopy(model) of the wrapper, which"
    " returns a sharded copy, or save model.state_dict()"
)


class ShownParameters:
    """Chooses between the compute parameter and the sharded one, and follows what code changes.

    Args:
        schedule: of the units.
        sharded: the sharded parameter of each compute parameter. Code outside a forward gets it
            instead of a compute parameter whose unit is not unsharded.
        unit_of: the unit of each compute parameter.
        calls: forwards and methods under way, innermost last.

    Attributes:
        trainability: which parameters are frozen.
    """

    def __init__(
        self,
        schedule: Schedule,
        sharded: dict[nn.Parameter, nn.Parameter],
        unit_of: dict[nn.Parameter, Unit],
        calls: list[UnitCall],
    ):
        self._schedule = schedule
        self._sharded = sharded
        self._compute = {parameter: compute for compute, parameter in sharded.items()}
        self._unit_of = unit_of
        self._calls = calls
        self.trainability = Trainability(schedule.units, sharded)
        # Groups whose compute weights code has got outside of forwards.
        self._given: dict[ParamGroup, None] = {}

    def watch(self, module: nn.Module) -> None:
        """Have the modules in ``module`` call back when code reads their parameters."""
        for each in _not_compiled(module):
            if next(each.parameters(recurse=False), None) is not None:
                each._parameters = WatchedParameters(
                    each._parameters, self._read_by_name, self._look_at, self._to_store
                )

    # ---- what code has changed

    def begin_call(self) -> None:
        """Take over what code has changed since the last forward or method, before the next.

        Raises:
            RuntimeError: for parameters that were frozen when the model was sharded.
        """
        if not in_backward():
            self.follow_changes()
            self._given.clear()
            self.trainability.refuse_thawed()

    def follow_changes(self, goes_on: bool = False) -> None:
        """Take over which parameters are frozen, and what was written to compute weights.

        Args:
            goes_on: code may write more to the compute weights that it has got.
        """
        self.follow_freezing()
        for group in self._given:
            group.writes.take(goes_on)

    def follow_freezing(self) -> None:
        """Take over which parameters are frozen now."""
        self.trainability.follow()

    def _give(self, unit: Unit) -> None:
        """Note that code outside of forwards gets the compute weights of a unit."""
        for group in unit.groups:
            if group.is_readable:
                group.writes.watch()
                self._given[group] = None

    # ---- reads and assignments

    def _look_at(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that code sees when it lists a module's parameters.

        Inside a forward it is the compute parameter, which is unsharded before it is used. Outside,
        and in other methods, it is the sharded parameter, at every level and for every number of
        ranks: it has the gradient, and an optimizer steps it.
        """
        unit = self._unit_of.get(parameter)
        if unit is None or (self._calls and self._calls[-1].module is not None):
            return parameter
        if in_backward():  # recomputation may list what it computes with
            return self._readable(unit, parameter)
        self.trainability.follow_one(parameter)
        for group in unit.groups:
            group.writes.take(goes_on=True)
        return self._sharded[parameter]

    def _readable(self, unit: Unit, parameter: nn.Parameter) -> nn.Parameter:
        """Return a compute parameter if it is readable, otherwise the sharded one."""
        if self._schedule.is_of_next_forward(unit):  # an edit of the gathered weights would be lost
            return self._sharded[parameter]
        for group in unit.groups:
            group.make_readable()
        return parameter if unit.is_readable else self._sharded[parameter]

    def _read_by_name(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that code sees when it reads one by name.

        Inside a forward, the innermost call borrows the parameter's unit until it ends, unless one
        of the calls under way uses the unit already. Outside, code may compute with the result at
        levels whose compute parameters stay readable.
        """
        unit = self._unit_of.get(parameter)
        if unit is None:
            return parameter
        found = parameter
        if not self._calls:
            found = self._readable(unit, parameter)
        else:
            call = self._calls[-1]
            # Nearly always the innermost call reads a parameter of its own unit.
            if call.unit is not unit and not hasattr(parameter, PASSED_ON):
                self._borrow(unit)
            if call.module is not None:
                return parameter
        self.trainability.follow_one(parameter)
        if found is parameter and not (in_backward() or hasattr(parameter, PASSED_ON)):
            self._give(unit)
        return found

    def _to_store(
        self, name: str, value: nn.Parameter | None, present: nn.Parameter | None
    ) -> nn.Parameter | None:
        """Return the parameter to store where code assigns one to a module: never a sharded one.

        Args:
            name: the attribute of the module.
            value: the assigned parameter.
            present: the parameter that the module has under that name.

        Raises:
            ValueError: for a weight that is tied to another one only now: both are sharded already.
        """
        compute = value if value is None else self._compute.get(value, value)
        if compute is present or compute not in self._unit_of or present not in self._unit_of:
            return compute
        raise ValueError(
            f"{self._name_of(present)} cannot be tied to {self._name_of(compute)}: they were two"
            " parameters when the model was sharded, and each has its own shards and optimizer"
            f" state. Assign {name} before fully_shard; weights that were tied then stay tied"
        )

    def _name_of(self, parameter: nn.Parameter) -> str:
        for group in self._unit_of[parameter].groups:
            for name, each in zip(group.names, group.parameters):
                if each is parameter:
                    return name
        raise AssertionError("every parameter of a unit is in one of its groups")

    def _borrow(self, unit: Unit) -> None:
        if not any(unit in call.used_units for call in self._calls):
            self._calls[-1].borrowed.append(unit)
            self._schedule.unshard_borrowed(unit, self._calls[-1])


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """The ``_parameters`` dict of a module, which calls back when code reads parameters.

    Args:
        parameters: the module's own ``_parameters``.
        read_by_name: called with a parameter that is read by name; returns the one that code gets.
        look_at: called with a parameter that is listed; returns the one that code gets.
        to_store: called with a name, the parameter that code assigns to it, and the one that is
            there; returns the one that is stored.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        read_by_name: Callable[[nn.Parameter], nn.Parameter],
        look_at: Callable[[nn.Parameter], nn.Parameter],
        to_store: Callable[[str, nn.Parameter | None, nn.Parameter | None], nn.Parameter | None],
    ):
        super().__init__(parameters)
        self._read_by_name = read_by_name
        self._look_at = look_at
        self._to_store = to_store

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        super().__setitem__(name, self._to_store(name, value, super().get(name)))

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._read_by_name(parameter)

    def items(self) -> list[tuple[str, nn.Parameter | None]]:  # type: ignore[override]  # no view
        """Return names and parameters; a list, not a view."""
        return [
            (name, None if parameter is None else self._look_at(parameter))
            for name, parameter in super().items()
        ]

    def values(self) -> list[nn.Parameter | None]:  # type: ignore[override]  # as above
        """Return the parameters; a list, not a view."""
        return [parameter for _, parameter in self.items()]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        """Return the copies that ``memo`` has of the parameters, in a plain dict.

        Raises:
            NotImplementedError: if it has none: the module is copied by itself.
        """
        parameters = dict(super().items())
        present = [each for each in parameters.values() if each is not None]
        if not all(id(each) in memo for each in present):
            raise NotImplementedError(REFUSED_COPY)
        return {name: None if each is None else memo[id(each)] for name, each in parameters.items()}

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(REFUSED_COPY)


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``module`` that are not part of a compiled module.

    The guards of a compiled module read its parameters before its forward begins, so its
    parameters cannot be watched.
    """
    if module._compiled_call_impl is not None or isinstance(module, OptimizedModule):
        return
    yield module
    for child in module.children():
        yield from _not_compiled(child)

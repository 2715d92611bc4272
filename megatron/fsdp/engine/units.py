# SPDX-License-Identifier: Apache-2.0
"""Which modules are units, and which unit a parameter belongs to."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from torch import nn

from megatron.fsdp.engine.unit import Unit


def resolve_unit_modules(
    unit_modules: Sequence[type | nn.Module | str] | None,
) -> list[type | nn.Module]:
    """Import the classes that are given by path ("package.module.Class").

    Raises:
        ValueError: listing every path that cannot be imported and everything that is no module
            class.
    """
    if isinstance(unit_modules, (str, type, nn.Module)):
        raise ValueError(
            "fsdp_unit_modules expects a list of module classes or their import paths but got"
            f" {unit_modules!r} alone"
        )
    resolved, problems = [], []
    for entry in unit_modules or ():
        try:
            value = _import(entry) if isinstance(entry, str) else entry
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(f"{entry!r} cannot be imported ({error})")
            continue
        if isinstance(value, nn.Module) or (
            isinstance(value, type) and issubclass(value, nn.Module)
        ):
            resolved.append(value)
        else:
            problems.append(f"{entry!r} is no torch.nn.Module class")
    if problems:
        raise ValueError(
            f"fsdp_unit_modules expects module classes or their import paths: {'; '.join(problems)}"
        )
    return resolved


def _import(path: str) -> object:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError("expects package.module.Class")
    return getattr(importlib.import_module(module), name)


def find_units(
    root: nn.Module,
    unit_modules: Sequence[type | nn.Module | str],
    only_root: bool = False,
    fine_grained: bool = False,
) -> list[Unit]:
    """The root, and the units inside it, in module order.

    Units are the modules that are one of ``unit_modules`` or of their classes. Outside of them
    every module that owns parameters itself is a unit of its own, an automatic one (embedding,
    final norm, head); the root keeps what it owns
    itself. ``fine_grained``: inside of them too. ``only_root``: no units inside at all.
    """
    wanted = resolve_unit_modules(unit_modules)
    classes = tuple(entry for entry in wanted if isinstance(entry, type))
    instances = {entry for entry in wanted if isinstance(entry, nn.Module)}
    units: dict[nn.Module, Unit] = {root: Unit("", root)}

    def visit(module: nn.Module, name: str, inside: bool) -> None:
        if module is not root and (isinstance(module, classes) or module in instances):
            units.setdefault(module, Unit(name, module))
            inside = True
        elif (fine_grained or not inside) and next(
            module.parameters(recurse=False), None
        ) is not None:
            units.setdefault(module, Unit(name, module, is_automatic=True))
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, inside)

    if not only_root:
        visit(root, "", inside=False)
    return list(units.values())


def assign_parameters(units: list[Unit]) -> dict[Unit, dict[str, nn.Parameter]]:
    """Every parameter, by its first name, under the innermost unit around the module that owns it.

    A parameter of several units belongs to the one among them that contains the others, if there is
    one; else to a unit of its own, which is appended to ``units`` and which the calls of all of
    them need.
    """
    unit_of = {unit.module: unit for unit in units}
    owners: dict[nn.Parameter, dict[Unit, tuple[Unit, ...]]] = {}
    names: dict[nn.Parameter, str] = {}

    def visit(module: nn.Module, prefix: str, around: tuple[Unit, ...]) -> None:
        if module in unit_of:
            around = (*around, unit_of[module])
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, prefix + name)
            owners.setdefault(parameter, {})[around[-1]] = around
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", around)

    visit(units[0].module, "", ())
    parameters_of: dict[Unit, dict[str, nn.Parameter]] = {unit: {} for unit in units}
    shared: dict[tuple[Unit, ...], Unit] = {}
    for parameter, chains in owners.items():
        unit = next(
            (unit for unit in chains if all(unit in chain for chain in chains.values())), None
        )
        if unit is None:
            unit = shared.setdefault(
                tuple(chains), Unit("+".join(unit.name for unit in chains), None)
            )
        parameters_of.setdefault(unit, {})[names[parameter]] = parameter
    for sharers, unit in shared.items():
        units.append(unit)
        for sharer in sharers:
            sharer.shared.append(unit)
    return parameters_of


def is_expert_parameter(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter belongs to one of the experts that expert parallelism divides.

    Megatron-Core says so by the attribute ``allreduce``; elsewhere the module that holds them is
    called ``experts``.
    """
    allreduce = getattr(parameter, "allreduce", None)
    return "experts" in name.split(".")[:-1] if allreduce is None else not allreduce

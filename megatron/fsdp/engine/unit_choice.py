# SPDX-License-Identifier: Apache-2.0
"""The choice of units, and the assignment of parameters to them."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence

from torch import nn

from megatron.fsdp.engine.tensor_parallel import has_uneven_slices
from megatron.fsdp.engine.unit import Unit


def resolve_unit_modules(
    unit_modules: Sequence[type | nn.Module | str] | None,
) -> list[type | nn.Module]:
    """Import the classes that are given by path ("package.module.Class").

    Raises:
        ValueError: lists every path that cannot be imported and every entry that is neither a
            module nor a module class.
    """
    if isinstance(unit_modules, (str, type, nn.Module)):
        raise ValueError(
            "Settings.units expects a list of module classes or their import paths but got"
            f" {unit_modules!r} alone"
        )
    resolved: list[type | nn.Module] = []
    problems = []
    for entry in unit_modules or ():
        try:
            value = pkgutil.resolve_name(entry) if isinstance(entry, str) else entry
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(f"{entry!r} cannot be imported as package.module.Class ({error})")
            continue
        is_class = isinstance(value, type) and issubclass(value, nn.Module)
        if is_class or isinstance(value, nn.Module):
            resolved.append(value)
        else:
            problems.append(f"{entry!r} is no torch.nn.Module class")
    if problems:
        raise ValueError(
            f"Settings.units expects module classes or their import paths: {'; '.join(problems)}"
        )
    return resolved


def find_units(
    root: nn.Module,
    unit_modules: Sequence[type | nn.Module | str],
    only_root: bool = False,
    fine_grained: bool = False,
) -> list[Unit]:
    """Return the unit of the root and the units inside it, in module order.

    They are the modules that the user names and, outside of them, every module that owns parameters
    directly (embedding, final norm, head).

    Args:
        root: the module that is sharded.
        unit_modules: modules, module classes, or import paths of classes.
        only_root: make the root the only unit.
        fine_grained: make automatic units inside named units too.
    """
    wanted = resolve_unit_modules(unit_modules)
    classes = tuple(entry for entry in wanted if isinstance(entry, type))
    instances = {entry for entry in wanted if isinstance(entry, nn.Module)}
    units: dict[nn.Module, Unit] = {root: Unit("", root)}

    def visit(module: nn.Module, name: str, inside_named: bool) -> None:
        owns_parameters = next(module.parameters(recurse=False), None) is not None
        if module is not root and (isinstance(module, classes) or module in instances):
            units.setdefault(module, Unit(name, module))
            inside_named = True
        elif owns_parameters and (fine_grained or not inside_named):
            units.setdefault(module, Unit(name, module, is_automatic=True))
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, inside_named)

    if not only_root:
        visit(root, "", inside_named=False)
    return list(units.values())


def assign_parameters(units: list[Unit]) -> dict[Unit, dict[str, nn.Parameter]]:
    """Return the parameters of every unit, each under its first name.

    Units of parameters that several units share are appended to ``units``.
    """
    # A parameter belongs to the innermost unit around the module that owns it. If modules of
    # several units own it (tied weights), it belongs to the one of these units that contains the
    # others. If there is no such unit, it gets a separate unit, which calls of all of them use.
    names, owners = _owners_of_parameters(units)
    parameters_of: dict[Unit, dict[str, nn.Parameter]] = {unit: {} for unit in units}
    units_of_shared: dict[tuple[Unit, ...], Unit] = {}
    for parameter, around in owners.items():
        unit = _outermost(around)
        if unit is None:
            sharers = tuple(around)
            if sharers not in units_of_shared:
                name = "+".join(sharer.name for sharer in sharers)
                units_of_shared[sharers] = Unit(name, None)
            unit = units_of_shared[sharers]
        parameters_of.setdefault(unit, {})[names[parameter]] = parameter
    for sharers, unit in units_of_shared.items():
        units.append(unit)
        for sharer in sharers:
            sharer.shared.append(unit)
    return parameters_of


def merge_small_units(
    units: list[Unit], parameters_of: dict[Unit, dict[str, nn.Parameter]], limit: int | None = None
) -> None:
    """Merge small automatic units into the root's unit, whose collectives then serve them too.

    Args:
        units: of the model, the root first; merged units are removed.
        parameters_of: the parameters of every unit; those of merged units move to the root.
        limit: bytes. None: the size of the largest unit that the user named; 0 if there is none.
    """
    # The smallest are merged first. Their weights stay unsharded while the root computes. A
    # transformer's final norm is merged, and its embedding and output layer if they are small
    # beside a layer.
    root = units[0]
    sizes = {unit: num_bytes(parameters.values()) for unit, parameters in parameters_of.items()}
    if limit is None:
        named = [sizes[unit] for unit in units[1:] if unit.modules and not unit.is_automatic]
        limit = max(named, default=0)
    room = limit - sizes[root]
    merged = []
    for unit in sorted(units[1:], key=lambda unit: (unit.module is not None, sizes[unit])):
        sharers = [sharer for sharer in units if unit in sharer.shared]
        is_automatic = all(sharer.is_automatic for sharer in sharers or [unit])
        # A tied weight comes before its sharers; those that need one that stays behind stay too.
        is_alone = all(shared is root for shared in unit.shared)
        # Unequal slices would shift the other parameters of the root by different amounts on
        # different tensor-parallel ranks.
        is_even = not any(map(has_uneven_slices, parameters_of[unit].values()))
        if is_automatic and is_alone and is_even and sizes[unit] <= room:
            room -= sizes[unit]
            merged.append(unit)
            for sharer in sharers:
                sharer.shared = [root if other is unit else other for other in sharer.shared]
    for unit in [unit for unit in units if unit in merged]:
        units.remove(unit)
        parameters_of[root].update(parameters_of.pop(unit))
        if unit.module is not None:
            root.modules.append(unit.module)


def num_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of some whole parameters, which are the same on every rank."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _owners_of_parameters(
    units: list[Unit],
) -> tuple[dict[nn.Parameter, str], dict[nn.Parameter, dict[Unit, tuple[Unit, ...]]]]:
    """Return the first name of each parameter, and the units around the modules that own it.

    These are the innermost unit around each module, mapped to all units around it, outermost first.
    """
    unit_of = {unit.module: unit for unit in units}
    names: dict[nn.Parameter, str] = {}
    owners: dict[nn.Parameter, dict[Unit, tuple[Unit, ...]]] = {}

    def visit(module: nn.Module, prefix: str, around: tuple[Unit, ...]) -> None:
        if module in unit_of:
            around = (*around, unit_of[module])
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, prefix + name)
            owners.setdefault(parameter, {})[around[-1]] = around
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", around)

    root = units[0].module
    assert root is not None  # only units of shared parameters have no module
    visit(root, "", ())
    return names, owners


def _outermost(around: dict[Unit, tuple[Unit, ...]]) -> Unit | None:
    """Return the unit that contains all the others; None if there is none."""
    for unit in around:
        if all(unit in outer for outer in around.values()):
            return unit
    return None


def is_expert_parameter(name: str, parameter: nn.Parameter) -> bool:
    """Return True if a parameter belongs to an expert of an expert-parallel layer."""
    # Megatron-Core marks such parameters by `allreduce=False`. Without that attribute, a parameter
    # belongs to an expert if it is inside a module called `experts`.
    allreduce = getattr(parameter, "allreduce", None)
    return "experts" in name.split(".")[:-1] if allreduce is None else not allreduce

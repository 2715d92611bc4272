# SPDX-License-Identifier: Apache-2.0
"""Which modules are units, and which unit a parameter belongs to."""

from __future__ import annotations

import importlib
from typing import Sequence

from torch import nn

from megatron.fsdp.schedule import Unit


def resolve_unit_modules(unit_modules: Sequence[type | nn.Module | str] | None) -> list[type | nn.Module]:
    """Import the classes that are given by path ("package.module.Class").

    Raises:
        ValueError: listing every path that cannot be imported and everything that is no module class.
    """
    resolved, problems = [], []
    for entry in unit_modules or ():
        try:
            value = _import(entry) if isinstance(entry, str) else entry
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(f"{entry!r} cannot be imported ({error})")
            continue
        if isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module)):
            resolved.append(value)
        else:
            problems.append(f"{entry!r} is no torch.nn.Module class")
    if problems:
        raise ValueError(f"fsdp_unit_modules expects module classes or their import paths: {'; '.join(problems)}")
    return resolved


def _import(path: str) -> object:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError("expects package.module.Class")
    return getattr(importlib.import_module(module), name)


def find_units(root: nn.Module, unit_modules: Sequence[type | nn.Module | str]) -> list[Unit]:
    """The root, and every module inside it that is one of ``unit_modules`` or of their classes, in module order."""
    wanted = resolve_unit_modules(unit_modules)
    classes = tuple(entry for entry in wanted if isinstance(entry, type))
    instances = {entry for entry in wanted if isinstance(entry, nn.Module)}
    return [Unit("", root)] + [
        Unit(name, module)
        for name, module in root.named_modules()
        if module is not root and (isinstance(module, classes) or module in instances)
    ]


def assign_parameters(units: list[Unit]) -> dict[Unit, dict[str, nn.Parameter]]:
    """Every parameter, by its first name, under the innermost unit that contains all the modules that own it.

    So a parameter that two units share belongs to the unit around both, the root at the latest.
    """
    unit_of = {unit.module: unit for unit in units}
    chains: dict[nn.Parameter, tuple[Unit, ...]] = {}
    names: dict[nn.Parameter, str] = {}

    def visit(module: nn.Module, prefix: str, chain: tuple[Unit, ...]) -> None:
        if module in unit_of:
            chain = (*chain, unit_of[module])
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, prefix + name)
            chains[parameter] = _common(chains.get(parameter, chain), chain)
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", chain)

    visit(units[0].module, "", ())
    parameters_of: dict[Unit, dict[str, nn.Parameter]] = {unit: {} for unit in units}
    for parameter, chain in chains.items():
        parameters_of[chain[-1]][names[parameter]] = parameter
    return parameters_of


def _common(left: tuple[Unit, ...], right: tuple[Unit, ...]) -> tuple[Unit, ...]:
    length = next((i for i, (a, b) in enumerate(zip(left, right)) if a is not b), min(len(left), len(right)))
    return left[:length]

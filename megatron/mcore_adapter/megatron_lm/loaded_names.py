# SPDX-License-Identifier: Apache-2.0
"""Names in loaded modules, and their exchange for others."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

HOME = "megatron.mcore_adapter."
"""Modules that define replacements, and keep them."""
Function = Callable[..., Any]
Arguments = dict[str, Any]
"""Arguments of a call by their names."""


def exchange(pairs: Sequence[tuple[object, object]]) -> None:
    """Replace the first object of every pair by the second one in all loaded modules.

    Items of tuples, such as those for ``isinstance``, are replaced too.
    """
    replacements = {}
    for before, after in pairs:
        replacements[id(before)] = after
    for module in loaded_modules():
        names = vars(module)
        for name, value in list(names.items()):
            if id(value) in replacements:
                names[name] = replacements[id(value)]
            elif type(value) is tuple and any(id(item) in replacements for item in value):
                names[name] = tuple(replacements.get(id(item), item) for item in value)


def loaded_modules() -> list[ModuleType]:
    """List all loaded modules but those of :data:`HOME`."""
    modules = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not name.startswith(HOME):
            modules.append(module)
    return modules


def with_original(original: Function, replacement: Function) -> Function:
    """Return a function that calls a replacement with the original and its arguments by name."""
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return replacement(original, dict(bound.arguments))

    call.__name__ = original.__name__
    call.__doc__ = replacement.__doc__
    return call

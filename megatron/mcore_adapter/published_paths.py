# SPDX-License-Identifier: Apache-2.0
"""The published package under the path of its copy in Megatron-Core.

Some programs import the package as ``megatron.core.distributed.fsdp.src.megatron_fsdp``. While the
drop-in is active, that path and its modules have the names of this project. A name that this
project lacks is still Megatron-Core's: its own modules may need it, and a program that takes it is
told by the drop-in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
OURS = "megatron_fsdp"
MODULES = (
    "",  # the package itself
    ".fully_shard",
    ".megatron_fsdp",
    ".mixed_precision",
    ".distributed_data_parallel_config",
    ".param_and_grad_buffer",
    ".package_info",
    ".uneven_dtensor",
    ".utils",
)
"""Modules below either path."""


class PublishedModule(ModuleType):
    """A module with names of this project, before those of Megatron-Core's module, if loaded."""

    def __init__(self, name: str, names: Mapping[str, object], theirs: ModuleType | None):
        super().__init__(name)
        if theirs is not None:
            # What the import of modules below this one needs.
            kept = ("__spec__", "__path__", "__file__", "__package__")
            vars(self).update({key: vars(theirs)[key] for key in kept if key in vars(theirs)})
        vars(self).update(names)
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._theirs is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._theirs, name)


class PublishedPaths:
    """The modules of the package while the drop-in is active.

    Args:
        replaced: what the drop-in has put in place of Megatron-Core's objects, by their paths. It
            comes before what this project has by the same names.
    """

    def __init__(self, replaced: Mapping[str, object]):
        self._replaced = replaced
        self._before: dict[str, ModuleType | None] = {}

    def install(self) -> None:
        """Put the modules in place of Megatron-Core's."""
        for name in MODULES:
            path, ours = PACKAGE + name, import_module(OURS + name)
            theirs = self._before[path] = sys.modules.get(path)
            names = {
                key: self._replaced.get(f"{path}.{key}", vars(ours)[key]) for key in ours.__all__
            }
            module = sys.modules[path] = PublishedModule(path, names, theirs)
            if name != ".fully_shard":  # which is the function in the package
                _set_in_parent(module)

    def restore(self) -> None:
        """Put Megatron-Core's modules back."""
        for path, theirs in self._before.items():
            if theirs is None:
                del sys.modules[path]
            else:
                sys.modules[path] = theirs
        theirs = self._before.get(PACKAGE)
        if theirs is not None:
            _set_in_parent(theirs)
        self._before = {}


def _set_in_parent(module: ModuleType) -> None:
    """Make a module the attribute of the package above it, which ``import a.b as c`` reads."""
    above, _, name = module.__name__.rpartition(".")
    if above in sys.modules:
        setattr(sys.modules[above], name, module)

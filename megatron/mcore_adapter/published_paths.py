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
from types import ModuleType
from typing import Any

import megatron_fsdp
from megatron_fsdp import (
    distributed_data_parallel_config,
    mixed_precision,
    package_info,
    param_and_grad_buffer,
    uneven_dtensor,
    utils,
)

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"


def _exported(module: ModuleType) -> dict[str, object]:
    return {name: getattr(module, name) for name in module.__all__}


NAMES: dict[str, dict[str, object]] = {
    "": _exported(megatron_fsdp),
    # Names of modules are those of a function and of a package too, so they are looked up.
    "fully_shard": _exported(sys.modules["megatron_fsdp.fully_shard"]),
    "megatron_fsdp": _exported(sys.modules["megatron_fsdp.megatron_fsdp"]),
    "mixed_precision": _exported(mixed_precision),
    "distributed_data_parallel_config": _exported(distributed_data_parallel_config),
    "param_and_grad_buffer": _exported(param_and_grad_buffer),
    "package_info": _exported(package_info),
    "uneven_dtensor": _exported(uneven_dtensor),
    "utils": _exported(utils),
}
"""The names of each module of the package, that of the package itself under an empty name."""


class PublishedModule(ModuleType):
    """A module with names of this project, before those of a module of Megatron-Core.

    Args:
        name: path of the module.
        names: of this project.
        theirs: Megatron-Core's module, if it has been loaded.
    """

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
        replaced: objects of Megatron-Core's modules and what the drop-in has put in their place,
            which these modules get too.
    """

    def __init__(self, replaced: Mapping[str, object]):
        self._replaced = replaced
        self._before: dict[str, ModuleType | None] = {}

    def install(self) -> None:
        """Put the modules in place of Megatron-Core's."""
        for stem, names in NAMES.items():
            path = f"{PACKAGE}.{stem}" if stem else PACKAGE
            theirs = sys.modules.get(path)
            self._before[path] = theirs
            own = {name: self._replaced.get(f"{path}.{name}", each) for name, each in names.items()}
            module = sys.modules[path] = PublishedModule(path, own, theirs)
            if stem not in NAMES[""]:  # the package's `fully_shard` is the function
                _set_in_parent(module)

    def restore(self) -> None:
        """Put Megatron-Core's modules back."""
        for path, theirs in self._before.items():
            if theirs is None:
                del sys.modules[path]
            else:
                sys.modules[path] = theirs
        if self._before:
            theirs = self._before[PACKAGE]
            if theirs is not None:
                _set_in_parent(theirs)
        self._before = {}


def _set_in_parent(module: ModuleType) -> None:
    """Make a module the attribute of the package above it, which ``import a.b as c`` reads."""
    above, _, name = module.__name__.rpartition(".")
    if above in sys.modules:
        setattr(sys.modules[above], name, module)

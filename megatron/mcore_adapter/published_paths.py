# SPDX-License-Identifier: Apache-2.0
"""The published package under the path of its copy in Megatron-Core.

Some programs import the package as ``megatron.core.distributed.fsdp.src.megatron_fsdp``. While the
drop-in is active, that path and its modules have the names of this project. A name that this
project lacks is still Megatron-Core's: its own modules may need it, and the drop-in notifies a
program that takes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
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
    ".experimental",
    ".experimental.dbuffer",
    ".param_and_grad_buffer",
    ".package_info",
    ".uneven_dtensor",
    ".utils",
)
"""Modules below either path."""


class PublishedModule(ModuleType):
    """A module with names of this project, before those of Megatron-Core's module, if loaded."""

    def __init__(
        self,
        name: str,
        names: Mapping[str, object],
        theirs: ModuleType | None,
    ):
        super().__init__(name)
        if theirs is not None:
            # The import of modules below this one needs these.
            for attribute in ("__spec__", "__path__", "__file__", "__package__"):
                if attribute in vars(theirs):
                    vars(self)[attribute] = vars(theirs)[attribute]
        vars(self).update(names)
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._theirs is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._theirs, name)


def publish(replaced: Mapping[str, object], undo: ExitStack) -> None:
    """Put the modules in place of Megatron-Core's, until ``undo`` is closed.

    Args:
        replaced: objects that the drop-in has put in place of Megatron-Core's, by their paths. They
            take precedence over this project's objects of the same names.
        undo: takes the callbacks that put Megatron-Core's modules back.
    """
    for name in MODULES:
        path = PACKAGE + name
        ours = import_module(OURS + name)
        theirs = sys.modules.get(path)
        names = {}
        for key in ours.__all__:
            names[key] = replaced.get(f"{path}.{key}", vars(ours)[key])
        module = PublishedModule(path, names, theirs)
        undo.callback(_put, path, theirs)
        _put(path, module)


def _put(path: str, module: ModuleType | None) -> None:
    """Let an import of a path find a module; None: as if the path had never been imported."""
    if module is None:
        del sys.modules[path]
        return
    sys.modules[path] = module
    above, _, name = path.rpartition(".")
    # ``import a.b as c`` reads an attribute. That of the package is the function of this name.
    if above in sys.modules and name != "fully_shard":
        setattr(sys.modules[above], name, module)

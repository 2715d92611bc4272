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

import megatron.fsdp
from megatron.fsdp.dtensor import checkpointing
from megatron.fsdp.engine import axes, mesh, policy, tensor_parallel
from megatron.fsdp.model import find_megatron_fsdp

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"

_FUNCTIONS: dict[str, object] = {
    "ShardingStrategy": policy.ShardingStrategy,
    "fully_shard": megatron.fsdp.fully_shard,
    "fully_shard_model": megatron.fsdp.fully_shard_model,
    "fully_shard_optimizer": megatron.fsdp.fully_shard_optimizer,
}
_CLASSES: dict[str, object] = {
    "DistributedDataParallelConfig": megatron.fsdp.DistributedDataParallelConfig,
    "FSDPDistributedIndex": mesh.FSDPDistributedIndex,
    "MegatronFSDP": megatron.fsdp.MegatronFSDP,
    "MixedPrecisionPolicy": policy.MixedPrecisionPolicy,
}
_VERSION: dict[str, object] = {"__version__": megatron.fsdp.__version__}


def _taken(names: Mapping[str, object], *wanted: str) -> dict[str, object]:
    return {name: names[name] for name in wanted}


NAMES: dict[str, dict[str, object]] = {
    "": {**_FUNCTIONS, **_CLASSES, **_VERSION},
    "fully_shard": _FUNCTIONS,
    "megatron_fsdp": _taken(_CLASSES, "MegatronFSDP"),
    "mixed_precision": _taken(_CLASSES, "MixedPrecisionPolicy"),
    "distributed_data_parallel_config": _taken(_CLASSES, "DistributedDataParallelConfig"),
    "param_and_grad_buffer": {"make_fsdp_dtensor": checkpointing.make_fsdp_dtensor},
    "package_info": _VERSION,
    "uneven_dtensor": _taken(vars(checkpointing), *checkpointing.__all__),
    "utils": {
        "FSDPDistributedIndex": mesh.FSDPDistributedIndex,
        "contains_submesh": axes.contains_submesh,
        "find_megatron_fsdp": find_megatron_fsdp,
        "get_mcore_tensor_parallel_partition_dim": (
            tensor_parallel.get_mcore_tensor_parallel_partition_dim
        ),
        "get_mesh_names": axes.get_mesh_names,
        "is_mcore_tensor_model_parallel": tensor_parallel.is_mcore_tensor_model_parallel,
    },
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

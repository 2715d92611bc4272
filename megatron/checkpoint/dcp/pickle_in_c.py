# SPDX-License-Identifier: Apache-2.0
"""Pickles of DCP's metadata, read by Python's unpickler in C, which is five times as fast."""

# [Note: what the unpickler in C may reach] It sets any attribute of any object that a pickle names,
# of classes too (the opcode BUILD). So it gets no class of this process. In place of each data
# class it gets a subclass made for this one load, which checks the fields that its instances are
# given, and cannot be changed. In place of functions and enums it gets a look-up in a table, made
# for this load; in place of members of enums it gets tokens, which have no attributes. When all is
# read, instances get their own class. A pickle that names anything else is left to the unpickler in
# Python, which reads more, and refuses by name. Names that a pickle keeps as values, which no
# writer does, stay what is described here: metadata is checked by its types, and never called.
#
# Both unpicklers take memory as a pickle says, whose writer can ask for more than there is.

from __future__ import annotations

import io
import pathlib
import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

_DATA_CLASSES: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        filesystem._StorageInfo,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
    )
}
for _module in ("pathlib", "pathlib._local"):
    _DATA_CLASSES[_module, "PosixPath"] = pathlib.PurePosixPath
    _DATA_CLASSES[_module, "PurePosixPath"] = pathlib.PurePosixPath

_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MEMORY_FORMAT_OF = {object(): member for member in metadata._MEM_FORMAT_ENCODING}  # by tokens
_MEMORY_FORMATS = {member.value: token for token, member in _MEMORY_FORMAT_OF.items()}
_TABLES: dict[tuple[str, str], dict[Any, Any]] = {
    ("torch.serialization", "_get_layout"): _LAYOUTS,
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMATS,
}


class UnusualPickleError(Exception):
    """The pickle is none of plain metadata."""


class _Unchangeable(type):
    """The type of classes whose attributes cannot be set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise UnusualPickleError(f"the pickle changes {cls.__qualname__}")


class _Unpickler(pickle.Unpickler):
    """See [Note: what the unpickler in C may reach]."""

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data))
        self._loading: dict[type, type] = {}
        self._made: list[tuple[object, type]] = []  # instances, with the classes that they get

    def load(self) -> Any:
        """Return the value of the pickle."""
        try:
            value = super().load()
            for instance, kind in self._made:
                object.__setattr__(instance, "__class__", kind)
            return value
        finally:  # the classes, which are in cycles of their own, refer to the list
            self._made.clear()

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of the pickle."""
        if module == "torch":
            value = vars(torch).get(name)  # torch's `__getattr__` would import modules
            if value is torch.Size or isinstance(value, torch.dtype):
                return value
        if (module, name) in _TABLES:
            return _TABLES[module, name].__getitem__
        kind = _DATA_CLASSES.get((module, name))
        if kind is None:
            raise UnusualPickleError(f"the pickle names {module}.{name}")
        if kind not in self._loading:
            self._loading[kind] = _loading_class(kind, self._made)
        return self._loading[kind]


def _loading_class(kind: Any, made: list[tuple[object, type]]) -> type:
    """Return a subclass for the instances of ``kind`` of one load, which are added to ``made``."""
    names: set[str] = set()
    if is_dataclass(kind):
        names = {field.name for field in fields(kind)}

    def new(cls: Any, *args: Any) -> Any:
        if args and names:
            raise UnusualPickleError(f"the pickle calls {kind.__qualname__}")
        instance = kind.__new__(cls, *args)
        made.append((instance, kind))
        return instance

    def set_state(instance: Any, state: Any) -> None:
        if kind is metadata.TensorProperties:
            dtype, layout, requires_grad, token, pin_memory = state
            memory_format = _MEMORY_FORMAT_OF[token]
            fields_of_state = (dtype, layout, requires_grad, memory_format, pin_memory)
            kind.__setstate__(instance, fields_of_state)
            return
        if not isinstance(state, dict) or not names.issuperset(state):
            raise UnusualPickleError(f"the pickle sets other fields of a {kind.__qualname__}")
        vars(instance).update(state)

    members = {"__slots__": (), "__new__": new, "__setstate__": set_state}
    return _Unchangeable(kind.__name__, (kind,), members)


def load(data: bytes) -> Any:
    """Unpickle plain metadata of DCP.

    Raises:
        Exception: of any class, for anything else: no error of this module says what is wrong.
    """
    return _Unpickler(data).load()

# SPDX-License-Identifier: Apache-2.0
"""Pickles of DCP's metadata, read by Python's unpickler in C, which is ten times as fast."""

# [Note: what the unpickler in C may reach] It sets any attribute of any object that a pickle names,
# of classes too (the opcode BUILD). So it gets no class of this process. In place of each data
# class it gets a subclass made for this one load, which checks the fields that its instances are
# given, and cannot be changed. In place of functions and enums it gets the look-up in a table, an
# object without attributes. When all is read, instances get their own class. A pickle that names
# anything else is left to the unpickler in Python, which reads more, and refuses by name.

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable
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
_MEMORY_FORMATS = {member.value: member for member in metadata._MEM_FORMAT_ENCODING}
_LOOK_UPS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMATS.__getitem__,
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
        value = super().load()
        for instance, kind in self._made:
            object.__setattr__(instance, "__class__", kind)
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of the pickle."""
        if module == "torch":
            value = getattr(torch, name, None)
            if value is torch.Size or isinstance(value, torch.dtype):
                return value
        if (module, name) in _LOOK_UPS:
            return _LOOK_UPS[module, name]
        kind = _DATA_CLASSES.get((module, name))
        if kind is None:
            raise UnusualPickleError(f"the pickle names {module}.{name}")
        if kind not in self._loading:
            self._loading[kind] = self._loading_class(kind)
        return self._loading[kind]

    def _loading_class(self, kind: Any) -> type:
        """Return a subclass for the instances of ``kind`` of this load."""
        names: set[str] = set()
        if is_dataclass(kind):
            names = {field.name for field in fields(kind)}

        def new(cls: Any, *args: Any) -> Any:
            if args and names:
                raise UnusualPickleError(f"the pickle calls {kind.__qualname__}")
            instance = kind.__new__(cls, *args)
            self._made.append((instance, kind))
            return instance

        def set_state(instance: Any, state: Any) -> None:
            if kind is metadata.TensorProperties:
                kind.__setstate__(instance, state)
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

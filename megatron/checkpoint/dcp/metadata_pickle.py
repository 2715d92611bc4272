# SPDX-License-Identifier: Apache-2.0
"""The pickle in ``.metadata``, read by Python's fast unpickler where that is safe.

The one in C reads a large ``.metadata`` ten times as fast as the one in Python, but lets a pickle
set attributes of any class that it names, and a flipped bit make it ask for any amount of memory.
Here it reads files of which a digest is known, and a pickle gets to see other classes: each stands
for one of torch's for one file, and its only instances are those of torch's class.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from megatron.checkpoint.dcp import safe_pickle

_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_CLASSES: dict[tuple[str, str], type] = {
    (_DCP, "Metadata"): dcp.Metadata,
    (_DCP, "MetadataIndex"): dcp.MetadataIndex,
    (_DCP, "StorageMeta"): dcp.StorageMeta,
    (_DCP, "BytesStorageMetadata"): dcp.BytesStorageMetadata,
    (_DCP, "ChunkStorageMetadata"): dcp.ChunkStorageMetadata,
    (_DCP, "TensorProperties"): dcp.TensorProperties,
    (_DCP, "TensorStorageMetadata"): dcp.TensorStorageMetadata,
    (_FILES, "_StorageInfo"): _StorageInfo,
}
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    (_DCP, "_MEM_FORMAT_ENCODING"): lambda value: dcp._MEM_FORMAT_ENCODING(value),
    ("torch", "Size"): lambda sizes: torch.Size(sizes),
    ("torch.serialization", "_get_layout"): lambda name: _get_layout(name),
    ("pathlib", "PosixPath"): lambda *parts: pathlib.PurePosixPath(*parts),
    # Early releases of 3.11 store a member of an enum by its name; this is the only enum here.
    ("builtins", "getattr"): lambda _, name: dcp._MEM_FORMAT_ENCODING[name],
}


def load(data: bytes, is_unchanged: bool) -> Any:
    """Unpickle the content of ``.metadata``.

    Args:
        data: the content.
        is_unchanged: its digest is the one of the manifest.

    Raises:
        RefusedPickleError: for a class that is not on the list of :mod:`safe_pickle`.
        ValueError: for bytes that are no pickle.
    """
    if is_unchanged:
        try:
            return _Unpickler(io.BytesIO(data)).load()
        except Exception:  # the careful one reads it, or says what is wrong with it
            pass
    return safe_pickle.load(data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._found: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._found:
            dtype = getattr(torch, name, None) if module == "torch" else None
            if isinstance(dtype, torch.dtype):
                self._found[key] = dtype
            elif key in _CLASSES:
                self._found[key] = _stand_for(_CLASSES[key])
            else:
                function = _FUNCTIONS[key]
                self._found[key] = lambda *values: function(*values)
        return self._found[key]


def _stand_for(real: type) -> type:
    """Return a new class whose instances are instances of ``real``, without any attribute."""
    return type(real.__name__, (), {"__new__": lambda _: object.__new__(real)})

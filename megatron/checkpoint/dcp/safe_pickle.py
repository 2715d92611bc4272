# SPDX-License-Identifier: Apache-2.0
"""Pickles of checkpoints, read without running anything that a file names.

Checkpoints come from others, and a pickle can call any function. Here it may use the data classes
listed below, and *stand-ins* for Megatron-Core's enums and metadata: inert classes of the same
name, with which its files can be read and written where it is not installed. Everything else is
refused by name, as the Python documentation of ``pickle`` advises ("Restricting Globals").
"""

from __future__ import annotations

import enum
import functools
import io
import pathlib
import pickle
import re
import signal
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from megatron.checkpoint.dcp import pickle_in_c
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError

# Any: typeshed describes the classes in C, without the methods that are replaced below.
_PythonUnpickler: Any = pickle._Unpickler
_PythonPickler: Any = pickle._Pickler

_NUMPY_CORE: Any = numpy._core if hasattr(numpy, "_core") else numpy.core
_NUMPY = {name: getattr(_NUMPY_CORE.multiarray, name) for name in ("_reconstruct", "scalar")}
_STORAGES = tuple(name for name in vars(torch) if name.endswith("Storage"))
_CLASSES: dict[str, tuple[str, ...]] = {
    "_io": ("BytesIO",),
    "argparse": ("Namespace",),
    "collections": ("OrderedDict", "deque"),
    "signal": ("Signals", "Handlers"),
    "torch": ("Size", "device", "strided", *_STORAGES),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # Results of the parts of a conversion.
    "torch.distributed.checkpoint.storage": ("WriteResult",),
    "megatron.checkpoint.integrity.manifest": ("FileDigest",),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
    "torch.storage": ("UntypedStorage", "TypedStorage"),
    "numpy": ("dtype", "ndarray"),
}
_BUILTINS = (
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "range",
    "set",
    "slice",
    "str",
    "tuple",
)
_NUM_PROPERTIES = len(TensorProperties().__getstate__())
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_NAMES_OF_PYTHON_2 = {"xrange": "range", "unicode": "str", "long": "int"}
"""Names that `torch.save` still writes."""
_STAND_INS = re.compile(
    r"^megatron\.core\.((\w+\.)*enums|rerun_state_machine"
    r"|dist_checkpointing\.(mapping|strategies\.\w+)|inference\.\w+)$"
)
_CLASS_NAME = re.compile(r"^_?[A-Z]\w*(\._?[A-Z]\w*)*$")
"""Functions and modules have no stand-ins.

Megatron-Core would call the originals when it reads a converted copy.
"""


class RefusedPickleError(ValueError):
    """The error for a file that names something that is not on the list; nothing of it was run."""


class StandIn:
    """Data of a class that need not be installed.

    Members of enums have their ``args``, the value in most.
    """

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            state = {"state": state}
        self.__dict__.update(state)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self).__module__, type(self).__qualname__, repr(self.__dict__)))

    def __reduce__(self) -> tuple[Any, ...]:
        state = {}
        for name, value in self.__dict__.items():
            if name != "args":
                state[name] = value
        if not state:
            return type(self), self.args
        return type(self), self.args, state

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(map(repr, self.args))})"


@functools.cache
def stand_in(module: str, name: str) -> type[StandIn]:
    """Return the inert class for a class of Megatron-Core."""
    fields = {"__module__": module, "__qualname__": name}
    return type(name.rpartition(".")[2], (StandIn,), fields)


class _Member(StandIn):
    """A member of an enum by its name: ``getattr(AttnBackend, "auto")``.

    Early releases of Python 3.11 pickle it so.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.args

    def __repr__(self) -> str:
        return f"{self.args[0].__qualname__}.{self.args[1]}"


def _member(owner: Any, name: Any) -> Any:
    """Stand in for ``getattr``, for members of enums and nothing else."""
    if isinstance(owner, enum.EnumMeta) and isinstance(name, str) and name in owner.__members__:
        return owner[name]  # signals, and torch's memory formats
    if (
        isinstance(owner, type)
        and issubclass(owner, StandIn)
        and isinstance(name, str)
        and name.isidentifier()
    ):
        return _Member(owner, name)
    raise RefusedPickleError(f"the pickle asks for the attribute {name!r} of {owner!r}")


# What all of the process shares: a pickle must not change it.
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum)


class Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """An unpickler that finds the classes on the list, stand-ins, and nothing else.

    It is the one in Python: the one in C sets any attribute of anything, of classes too. See
    [Note: what the unpickler in C may reach].
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, or the stand-in, that a pickle names.

        Raises:
            RefusedPickleError: for anything that is not on the list.
        """
        if module == "__builtin__":
            module = "builtins"
            name = _NAMES_OF_PYTHON_2.get(name, name)
        if module == "builtins":
            if name == "getattr":
                return _member
            if name in _BUILTINS:
                return super().find_class("builtins", name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in _NUMPY:
            return _NUMPY[name]
        # Pickle protocol 5 has arrays so.
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return _NUMPY_CORE.numeric._frombuffer
        if module == "_codecs" and name == "encode":
            return _encode
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return getattr(pathlib, "Pure" + name.removeprefix("Pure"))
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        # Early releases of Python 3.11 have signals so.
        if module == "signal" and name in signal.Signals.__members__:
            return signal.Signals[name]
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if _STAND_INS.match(module) and _CLASS_NAME.match(name):
            return stand_in(module, name)
        raise RefusedPickleError(
            f"the pickle asks for {module}.{name}, which is not among the classes that checkpoints"
            " hold"
        )

    def load_build(self) -> None:
        """Give an object its state, a dict of fields.

        Raises:
            RefusedPickleError: for a class, a function or a member of an enum, which all of the
                process shares, and for special attributes.
        """
        owner, state = self.stack[-2:]
        if isinstance(owner, _SHARED):
            name = getattr(owner, "__qualname__", owner)
            raise RefusedPickleError(
                f"the pickle changes {owner.__module__}.{name}, which is not its own"
            )
        is_plain = isinstance(state, dict)
        if is_plain and any(str(name).startswith("__") for name in state):
            is_plain = False
        if not is_plain and (isinstance(owner, StandIn) or not hasattr(owner, "__setstate__")):
            raise RefusedPickleError(
                f"the pickle sets special attributes of a {type(owner).__qualname__}"
            )
        if isinstance(owner, TensorProperties) and isinstance(state, tuple):
            # A newer torch adds fields at the end, as 2.15 adds strides, which readers do not need.
            self.stack[-1] = state[:_NUM_PROPERTIES]
        super().load_build()

    dispatch: ClassVar = {
        **_PythonUnpickler.dispatch,
        pickle.BUILD[0]: load_build,
    }


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Stand in for ``codecs.encode``, in the form that pickles of bytes use."""
    if encoding != "latin1":
        raise RefusedPickleError(f"the pickle asks for the codec {encoding!r}")
    return text.encode("latin1")


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """A pickler that can write stand-ins.

    It is the one in Python: the one in C checks that a class can be imported.
    """

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, StandIn):
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, enum.Enum) and id(obj) not in self.memo:
            # Early releases of Python 3.11 write `getattr`, or the member's own name, which careful
            # readers refuse.
            self.save_reduce(type(obj), (obj.value,), obj=obj)
        else:
            super().save(obj, save_persistent_id)

    dispatch: ClassVar = {
        **_PythonPickler.dispatch,
        type: lambda self, obj: self.save_type(obj),
    }

    def save_type(self, obj: Any) -> None:
        if issubclass(obj, StandIn):
            self.save_global(obj)
        else:
            super().save_type(obj)


# The pickle module to give to `torch.load` and `torch.save`.
_MODULE = types.SimpleNamespace(Unpickler=Unpickler, Pickler=_Pickler, __name__=__name__)


def load(data: bytes) -> Any:
    """Unpickle a plain pickle.

    Raises:
        RefusedPickleError: for a class that is not on the list.
        ValueError: for bytes that are no pickle.
    """
    with suppress(Exception):  # the unpickler in Python decides then, and names what is wrong
        return pickle_in_c.load(data)
    return _guarded(lambda: Unpickler(io.BytesIO(data)).load())


def load_torch(data: bytes) -> Any:
    """Unpickle what ``torch.save`` wrote, with tensors on the CPU.

    Raises:
        RefusedPickleError: for a class that is not on the list, and for TorchScript.
        ValueError: for bytes that were not written so, or have changed since.
    """

    def read() -> Any:
        # `torch.load` would take anything else for a file of torch before 1.6.
        if not data.startswith(b"PK\x03\x04"):
            raise ValueError("it is no archive of torch.save")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            changed = archive.testzip()
            if changed is not None:
                raise ValueError(
                    f"{changed} has changed since it was written (its checksum differs)"
                )
        # By the reader that `torch.load` uses: a crafted archive is another one to Python's.
        if "constants.pkl" in torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records():
            raise RefusedPickleError("it is a TorchScript program, not data")
        return torch.load(
            io.BytesIO(data),
            map_location="cpu",
            weights_only=False,
            pickle_module=_MODULE,
        )

    if data in _read:
        return _read[data]
    value = _guarded(read)
    if is_scalar(value):
        _read[data] = value
    return value


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Let errors of reading a pickle inside the context name the file.

    Raises:
        RefusedPickleError: for a refusal.
        DamagedCheckpointError: for any other error that reading a pickle raises.
    """
    try:
        yield
    except RefusedPickleError as error:
        raise RefusedPickleError(f"{file}: {error}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{file} is damaged: {error}") from error


def is_scalar(value: Any) -> bool:
    """Return True if a value is a number, a string, or a tuple of these: small and immutable."""
    if type(value) is tuple:
        return all(is_scalar(item) for item in value)
    return type(value) in (bool, int, float, str, type(None))


# Fields of param groups are a few values, which are stored thousands of times.
_read: dict[bytes, Any] = {}
_written: dict[tuple[type, str], bytes] = {}


def save_torch(value: Any) -> bytes:
    """Pickle a value with ``torch.save``, with stand-ins under the names of their originals."""
    if not is_scalar(value):
        return _save(value)
    key = (type(value), repr(value))
    if key not in _written:
        _written[key] = _save(value)
    return _written[key]


def _save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_MODULE)
    return buffer.getvalue()


def _guarded(read: Callable[[], Any]) -> Any:
    """Call ``read``, and turn any error except a refusal into a ValueError."""
    try:
        return read()
    except RefusedPickleError:
        raise
    except Exception as error:  # damaged pickles fail in every possible way
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{kind}{error}") from error

# SPDX-License-Identifier: Apache-2.0
"""Metadata that is read in C is what the unpickler in Python reads, and nothing else can be."""

import contextlib
import dataclasses
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.checkpoint.dcp import pickle_in_c, safe_pickle
from tests.support.checkpoint.crafted_files import named, text

SAMPLES = sorted(Path("tests/data").rglob(".metadata"))
EMPTY = pickle.PROTO + b"\x04"
DICT_STATE = b"}" + text("intruder") + b"K\x01s"
SLOT_STATE = b"N" + DICT_STATE + pickle.TUPLE2
OF_METADATA = "torch.distributed.checkpoint.metadata"
GLOBALS = {
    "data class": named(OF_METADATA, "MetadataIndex"),
    "class with its own state": named(OF_METADATA, "TensorProperties"),
    "class without fields": named(OF_METADATA, "BytesStorageMetadata"),
    "path": named("pathlib", "PosixPath"),
    "size": named("torch", "Size"),
    "dtype": named("torch", "float32"),
    "function": named("torch.serialization", "_get_layout"),
    "enum": named(OF_METADATA, "_MEM_FORMAT_ENCODING"),
}
INDEX = GLOBALS["data class"] + b")" + pickle.NEWOBJ
LAYOUT = GLOBALS["function"] + text("torch.strided") + pickle.TUPLE1 + pickle.REDUCE
MEMBER = GLOBALS["enum"] + b"K\x00" + pickle.TUPLE1 + pickle.REDUCE
VALUE_STATE = b"}" + text("_value_") + b"K\x02s"
CLASS_STATE = b"N}" + text("__class__") + GLOBALS["data class"] + b"s" + pickle.TUPLE2
PATH = GLOBALS["path"] + text("x") + pickle.TUPLE1 + pickle.REDUCE
HOSTILE = {
    **{f"state of a {kind}": each + DICT_STATE + pickle.BUILD for kind, each in GLOBALS.items()},
    **{f"slots of a {kind}": each + SLOT_STATE + pickle.BUILD for kind, each in GLOBALS.items()},
    **{f"item of a {kind}": each + text("x") + b"K\x01s" for kind, each in GLOBALS.items()},
    "value of a layout": LAYOUT + VALUE_STATE + pickle.BUILD,
    "slots of a layout": LAYOUT + SLOT_STATE + pickle.BUILD,
    "class of a layout": LAYOUT + CLASS_STATE + pickle.BUILD,
    "value of a member": MEMBER + VALUE_STATE + pickle.BUILD,
    "slots of a member": MEMBER + SLOT_STATE + pickle.BUILD,
    "class of a member": MEMBER + CLASS_STATE + pickle.BUILD,
    "foreign field": INDEX + DICT_STATE + pickle.BUILD,
    "slots of an instance": INDEX + SLOT_STATE + pickle.BUILD,
    "state of a path": PATH + SLOT_STATE + pickle.BUILD,
    "call of a constructor": GLOBALS["data class"] + text("x") + pickle.TUPLE1 + pickle.REDUCE,
    "new object with arguments": GLOBALS["data class"] + text("x") + pickle.TUPLE1 + pickle.NEWOBJ,
    "other name": named("torch", "load"),
    "dotted name": named(OF_METADATA, "os.system"),
    "member of a class": named(OF_METADATA, "Metadata.__init__"),
}


def types_in(value: Any) -> set[type]:
    """Return the types of a value, of its fields and of its elements."""
    found = {type(value)}
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = list(vars(value).values())
    for item in inner:
        found |= types_in(item)
    return found


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.parents[1].name)
def test_metadata_is_what_the_unpickler_in_python_reads(sample: Path) -> None:
    data = sample.read_bytes()
    expected = safe_pickle.Unpickler(io.BytesIO(data)).load()
    try:
        found = pickle_in_c.load(data)
    except pickle_in_c.UnusualPickleError:
        # Of these, Megatron-Core's metadata has stand-ins, and plans of torch other classes.
        assert b"SavePlan" in data or b"megatron" in data
        found = safe_pickle.load(data)
    assert found == expected
    assert types_in(found) == types_in(expected)


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_but_the_fields_of_instances_can_be_set(kind: str) -> None:
    member = metadata._MEM_FORMAT_ENCODING(0)
    owners = (metadata.MetadataIndex, metadata.TensorProperties, _StorageInfo, member)
    before = [dict(vars(owner)) for owner in owners]
    data = EMPTY + HOSTILE[kind] + pickle.STOP
    with pytest.raises((pickle_in_c.UnusualPickleError, TypeError, AttributeError)):
        pickle_in_c.load(data)
    with contextlib.suppress(ValueError):  # some of these are harmless calls to the other one
        safe_pickle.load(data)
    assert [dict(vars(owner)) for owner in owners] == before
    assert type(member) is metadata._MEM_FORMAT_ENCODING and member.value == 0


def test_a_load_in_c_leaves_no_instances_behind() -> None:
    sample = next(path for path in SAMPLES if path.parents[1].name == "dense_swiglu_bf16_dp2")
    data = sample.read_bytes()
    was_enabled = gc.isenabled()
    gc.disable()  # as training does, so that cycles stay
    try:
        kept = weakref.ref(next(iter(pickle_in_c.load(data).storage_data.values())))
        assert kept() is None
    finally:
        if was_enabled:
            gc.enable()

# SPDX-License-Identifier: Apache-2.0
"""Pickles of checkpoints are data: nothing that they name is run, and real files stay the same."""

import argparse
import codecs
import enum
import functools
import io
import os
import pickle
import signal
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy
import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import RerunMode
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.safe_pickle import RefusedPickleError
from tests.support.checkpoint import samples
from tests.support.checkpoint.crafted_files import (
    CallOnLoad,
    archive,
    call,
    named,
    text,
    touch,
    two_faced_archive,
)

NAMESPACE = named("argparse", "Namespace")
EMPTY = pickle.PROTO + b"\x04"


def object_array(marker: Path) -> bytes:
    array = numpy.empty(1, dtype=object)
    array[0] = CallOnLoad(os.system, f"touch {marker}")
    return pickle.dumps(array)


def build_on_class() -> bytes:
    """Give Namespace an attribute in the way in which objects with slots get theirs."""
    slots = pickle.MARK + pickle.NONE + b"}" + text("intruder") + b"K\x01s" + pickle.TUPLE
    return EMPTY + NAMESPACE + slots + pickle.BUILD + pickle.STOP


def build_on_stand_in(key: str, value: bytes = b"K\x01") -> bytes:
    member = (
        named("megatron.core.enums", "ModelType")
        + pickle.MARK
        + b"K\x01"
        + pickle.TUPLE
        + pickle.REDUCE
    )
    return EMPTY + member + b"}" + text(key) + value + b"s" + pickle.BUILD + pickle.STOP


# Each makes the file `marker` if anything in it is run by an unpickler that trusts it, or asks for
# what it must not get.
HOSTILE: dict[str, bytes | Callable[[Path], bytes]] = {
    "os.system": touch,
    "posix.system": lambda marker: call("posix", "system", text(f"touch {marker}")),
    "subprocess": lambda marker: pickle.dumps(CallOnLoad(subprocess.run, ["touch", str(marker)])),
    "eval": lambda marker: pickle.dumps(CallOnLoad(eval, f"open({str(marker)!r}, 'w')")),
    "exec of Python 2": lambda marker: call(
        "__builtin__", "exec", text(f"open({str(marker)!r}, 'w')")
    ),
    "open": lambda marker: pickle.dumps(CallOnLoad(open, str(marker), "w")),
    "getattr of a module": call("builtins", "getattr", named("os", "path"), text("os")),
    "getattr of a listed class": call("builtins", "getattr", NAMESPACE, text("__subclasses__")),
    "getattr of a dunder": call(
        "builtins", "getattr", named("megatron.core.enums", "ModelType"), text("mro.x")
    ),
    "getattr of a signal": call(
        "builtins", "getattr", named("signal", "Signals"), text("__init__")
    ),
    "setattr": call("builtins", "setattr", NAMESPACE, text("x"), b"K\x01"),
    "__import__": call("builtins", "__import__", text("os")),
    "type": lambda marker: call("builtins", "type", text("X"), b")", b"}"),
    "object": call("builtins", "object"),
    "map": lambda marker: call("builtins", "map", named("os", "system"), text(f"touch {marker}")),
    "dotted name": call("argparse", "Namespace.__init__.__globals__"),
    "dotted name through a listed module": call("argparse", "_sys.modules"),
    "dotted name through torch": lambda marker: call("torch", "os.system", text(f"touch {marker}")),
    "dotted stand-in": call("megatron.core.enums", "enum.sys.modules"),
    "function of Megatron-Core": call(
        "megatron.core.dist_checkpointing.strategies.common", "load_common", text("x")
    ),
    "module of Megatron-Core": call("megatron.core.rerun_state_machine", "os"),
    "other class of Megatron-Core": call("megatron.core.utils", "GlobalMemoryBuffer"),
    "copyreg": call(
        "copyreg", "_reconstructor", NAMESPACE, named("builtins", "object"), pickle.NONE
    ),
    "codecs": pickle.dumps(CallOnLoad(codecs.decode, "x", "rot13")),
    "another codec": call("_codecs", "encode", text("x"), text("rot13")),
    "functools": lambda marker: pickle.dumps(functools.partial(os.system, f"touch {marker}")),
    "operator": call("operator", "attrgetter", text("system")),
    "types": call("types", "FunctionType"),
    "marshal": call("marshal", "loads", text("x")),
    "importlib": call("importlib", "import_module", text("os")),
    "torch.hub": call("torch.hub", "load", text("a/b"), text("c")),
    "torch.load": call("torch", "load", text("x")),
    "torch.load of its module": call("torch.serialization", "load", text("x")),
    "torch.jit": call("torch.jit", "load", text("x")),
    "bytes of a storage": call("torch.storage", "_load_from_bytes", b"C\x01x"),
    "storage of a file": call("torch.storage", "UntypedStorage.from_file", text("x")),
    "tensor subclass": call("torch._tensor", "_rebuild_from_type_v2"),
    "pickle in a pickle": lambda marker: pickle.dumps(CallOnLoad(pickle.loads, touch(marker))),
    "numpy object array": object_array,
    "numpy.load": call("numpy", "load", text("x")),
    "numpy testing": call("numpy.testing._private.utils", "runstring", text("x"), b"}"),
    "timeit": call("timeit", "timeit", text("x")),
    "build on a class": build_on_class(),
    "build on a function": EMPTY
    + named("torch._utils", "_rebuild_tensor_v2")
    + b"}"
    + text("x")
    + b"K\x01sb.",
    "build of dunders": build_on_stand_in("__reduce_ex__"),
    "build of a function's defaults": EMPTY
    + named("_codecs", "encode")
    + b"(N}"
    + text("__defaults__")
    + b")stb.",
    "state of a member of an enum": EMPTY
    + named("signal", "Signals")
    + b"K\x0f\x85R}"
    + text("_value_")
    + b"K\x09sb.",
    "function of a stand-in's module": call(
        "megatron.core.rerun_state_machine", "getenv", text("HOME")
    ),
    "extension registry": EMPTY + b"\x82\x01.",
}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def wrapped(pickled: bytes, wrap: str) -> bytes:
    """Return a pickle that has another one's value somewhere inside."""
    inner = pickled[: -len(pickle.STOP)].removeprefix(EMPTY)
    if wrap == "in a list":
        return EMPTY + b"](" + inner + b"e."
    if wrap == "in args":
        return EMPTY + NAMESPACE + b")\x81}" + text("exit_signal") + inner + b"sb."
    return archive(pickled) if wrap == "in torch.save" else pickled


@pytest.mark.parametrize("wrap", ["alone", "in a list", "in args", "in torch.save"])
def test_nothing_that_a_pickle_names_is_run(wrap: str, marker: Path) -> None:
    load = safe_pickle.load_torch if wrap == "in torch.save" else safe_pickle.load
    before = dict(vars(argparse.Namespace)), dict(vars(torch._utils._rebuild_tensor_v2))
    for kind, hostile in HOSTILE.items():
        with pytest.raises(ValueError) as error:
            load(wrapped(hostile(marker) if callable(hostile) else hostile, wrap))
        if kind != "extension registry":
            assert isinstance(error.value, RefusedPickleError), (kind, error.value)
            assert str(error.value).startswith("the pickle "), kind
        assert not marker.exists(), kind
        after = dict(vars(argparse.Namespace)), dict(vars(torch._utils._rebuild_tensor_v2))
        assert after == before, kind


def test_the_crafted_pickles_do_run_where_they_are_trusted(marker: Path) -> None:
    """Else the test above would show nothing."""
    pickle.loads(object_array(marker))
    assert marker.exists()


@pytest.mark.parametrize(
    "reference",
    [
        b"\x8c\x07storage",
        b"(\x8c\x06modulecos\nsystem\nK\x01K\x01t",
        b"(\x8c\x07storagecos\nsystem\n\x8c\x010\x8c\x03cpuK\x04t",
    ],
    ids=["no tuple", "a module", "a function as the storage's type"],
)
def test_persistent_references_name_storages_only(reference: bytes) -> None:
    with pytest.raises(ValueError):
        safe_pickle.load_torch(archive(EMPTY + reference + b"Q.", **{"data/0": bytes(16)}))


def test_a_storage_cannot_be_longer_than_its_record() -> None:
    pickled = io.BytesIO()
    torch.save(torch.zeros(4), pickled)
    with zipfile.ZipFile(pickled) as file:
        content = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    assert content.count(b"K\x04") == 2
    crafted = archive(content.replace(b"K\x04", b"K\xff"), **{"data/0": bytes(16)})
    with pytest.raises(ValueError, match="size"):
        safe_pickle.load_torch(crafted)


def torch_script() -> bytes:
    """Put a TorchScript program into an archive with a plain directory."""
    saved, buffer = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return buffer.getvalue()


def test_torch_script_is_refused_even_in_an_archive_that_shows_data_to_python() -> None:
    program = torch_script()
    crafted = two_faced_archive(archive(pickle.dumps([1], 2)), program)
    with zipfile.ZipFile(io.BytesIO(crafted)) as file:
        assert file.testzip() is None
        assert not any(name.endswith("constants.pkl") for name in file.namelist())
    for data in (program, crafted):
        with pytest.raises(RefusedPickleError, match="TorchScript"):
            safe_pickle.load_torch(data)


def test_files_of_torch_before_its_archives_are_refused(marker: Path) -> None:
    buffer = io.BytesIO()
    torch.save([1], buffer, _use_new_zipfile_serialization=False)
    old = buffer.getvalue()
    for data in (old, touch(marker), old + archive(pickle.dumps([1], 2))):
        with pytest.raises(ValueError, match="archive"):
            safe_pickle.load_torch(data)
    assert not marker.exists()


def test_everything_plain_comes_back() -> None:
    value: dict[str, Any] = {
        "numbers": [
            1,
            2.5,
            1j,
            None,
            True,
            2**70,
            b"bytes",
            bytearray(b"x"),
            range(3),
            slice(1, 2),
            {1},
            frozenset({2}),
        ],
        "torch": (torch.float32, torch.Size([2]), torch.device("cpu"), torch.strided),
        "signal": signal.SIGTERM,
        "args": argparse.Namespace(betas=(0.9, 0.95), nested={"a": [1]}),
    }
    assert safe_pickle.load(pickle.dumps(value)) == value
    assert safe_pickle.load_torch(safe_pickle.save_torch(value)) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_random_states_of_numpy_come_back(protocol: int) -> None:
    state = numpy.random.RandomState(1).get_state()
    back = safe_pickle.load(
        pickle.dumps((state, numpy.float64(1.5), numpy.array(["a"], dtype=object)), protocol)
    )
    assert back[0][0] == state[0] and numpy.array_equal(back[0][1], state[1])
    assert back[1] == 1.5 and list(back[2]) == ["a"]


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_both_spellings_of_numpy_are_read(module: str) -> None:
    pickled = pickle.dumps(numpy.arange(3), 2)
    spelled = pickled.replace(b"numpy._core.multiarray", module.encode()).replace(
        b"numpy.core.multiarray", module.encode()
    )
    assert module.encode() in spelled
    assert numpy.array_equal(safe_pickle.load(spelled), numpy.arange(3))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("name", ["PosixPath", "PurePosixPath"])
def test_paths_of_every_python_are_read_as_pure_paths(module: str, name: str) -> None:
    path = safe_pickle.load(call(module, name, text("data"), text("x")))
    assert path == PurePosixPath("data/x") and type(path) is PurePosixPath


def test_descriptions_of_tensors_by_a_newer_torch_are_read_without_its_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is, the strides of torch 2.15, whose files earlier ones do not read."""
    properties = TensorProperties(dtype=torch.bfloat16)
    state = (*properties.__getstate__(), (64, 1))
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: state)
    written = pickle.dumps(properties)
    with pytest.raises(ValueError, match="too many values to unpack"):
        pickle.loads(written)
    assert safe_pickle.load(written) == properties


def test_tensors_of_every_kind_come_back() -> None:
    values = [
        torch.randn(3, 4).t(),
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.arange(4).to(torch.uint8),
        torch.randn(2).to(torch.bfloat16),
    ]
    back = safe_pickle.load_torch(safe_pickle.save_torch(values))
    assert all(
        torch.equal(mine, theirs) and mine.dtype == theirs.dtype
        for mine, theirs in zip(back, values)
    )
    parameter = safe_pickle.load_torch(safe_pickle.save_torch(torch.nn.Parameter(torch.ones(2))))
    assert torch.equal(parameter.data, torch.ones(2))


ENUMS = {
    "of the core": ModelType.encoder_or_decoder,
    "of the transformer": AttnBackend.flash,
    "of the reruns": RerunMode.DISABLED,
}


def by_name(member: Any) -> bytes:
    """Pickle it in the way of early releases of Python 3.11 and 3.12."""
    owner = type(member)
    return call(
        "builtins", "getattr", named(owner.__module__, owner.__qualname__), text(member.name)
    )


def by_value(member: Any) -> bytes:
    owner = type(member)
    value = pickle.dumps(member.value, 4)[2:-1]
    if value.startswith(pickle.FRAME):
        value = value[9:]
    return call(owner.__module__, owner.__qualname__, value)


@pytest.mark.parametrize("spelled", [by_name, by_value])
@pytest.mark.parametrize("kind", ENUMS)
def test_members_of_enums_go_out_under_their_own_names(kind: str, spelled: Any) -> None:
    member = ENUMS[kind]
    stand_in = safe_pickle.load(spelled(member))
    assert not isinstance(stand_in, type(member))
    assert type(member).__qualname__ in repr(stand_in)
    written = safe_pickle.save_torch({"member": stand_in})
    assert torch.load(io.BytesIO(written), weights_only=False)["member"] is member
    again = safe_pickle.load_torch(written)["member"]
    assert again == stand_in and hash(again) == hash(stand_in)


def test_stand_ins_of_one_class_are_equal_by_their_data() -> None:
    first, same, other = (
        safe_pickle.stand_in("megatron.core.enums", "ModelType")(number) for number in (1, 1, 2)
    )
    assert first == same and first != other
    assert first != safe_pickle.stand_in("megatron.core.enums", "Other")(1)


def test_classes_with_fields_go_out_with_them() -> None:
    pickled = build_on_stand_in("mcore_data", b"}")
    loaded = safe_pickle.load(pickled)
    assert loaded.mcore_data == {} and loaded.args == (1,)
    again = safe_pickle.load_torch(safe_pickle.save_torch(loaded))
    assert again == loaded


def common_files() -> list[str]:
    return [name for name in samples.TORCH_DIST if name != samples.WITHOUT_COMMON_FILE]


@pytest.mark.parametrize("name", common_files())
def test_arguments_of_samples_are_written_as_megatron_core_reads_them(name: str) -> None:
    path = samples.iteration(samples.torch_dist(name)) / "common.pt"
    original = torch.load(path, weights_only=False)
    loaded = safe_pickle.load_torch(path.read_bytes())
    written = torch.load(io.BytesIO(safe_pickle.save_torch(loaded)), weights_only=False)
    assert vars(written["args"]) == vars(original["args"])
    assert isinstance(written["args"].attention_backend, AttnBackend)
    assert {
        key: value for key, value in written.items() if key != "args"
    }.keys() == original.keys() - {"args"}
    assert str(written) == str(original)


@pytest.mark.parametrize("length", [0, 1, 10, 100])
def test_pickles_that_are_cut_off_are_an_error(length: int) -> None:
    whole = pickle.dumps({"a": list(range(100))})
    assert len(whole) > 100
    with pytest.raises(ValueError):
        safe_pickle.load(whole[:length])
    with pytest.raises(ValueError):
        safe_pickle.load_torch(archive(whole)[:length])


def test_a_changed_archive_is_an_error() -> None:
    data = bytearray(safe_pickle.save_torch({"tensor": torch.zeros(64)}))
    at = data.index(bytes(256))
    data[at + 100] ^= 1
    with pytest.raises(ValueError, match=r"checksum|CRC|crc"):
        safe_pickle.load_torch(bytes(data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"csignal\nSIGTERM\n.", signal.SIGTERM),
        (b"c__builtin__\ngetattr\n(csignal\nSignals\nVSIGINT\ntR.", signal.SIGINT),
        (
            b"c__builtin__\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nVTORCH_CHANNELS_LAST\ntR.",
            _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
        ),
    ],
    ids=["a signal by its name", "a signal", "a memory format"],
)
def test_members_of_enums_are_read_as_early_releases_of_python_3_11_write_them(
    data: bytes, expected: enum.Enum
) -> None:
    assert safe_pickle.load(data) is expected

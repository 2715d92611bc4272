# SPDX-License-Identifier: Apache-2.0
"""Stored checkpoints: any chunk of a tensor is read, and files that do not fit are refused."""

import contextlib
import itertools
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.checkpoint.commands.conversion import convert
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.dcp import safe_pickle, tensor_payload
from megatron.checkpoint.dcp.chunk import Chunk, chunks_overlap
from megatron.checkpoint.dcp.dcp_target import DcpTarget, TensorEntry
from megatron.checkpoint.dcp.safe_pickle import RefusedPickleError
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError
from megatron.checkpoint.store.directory import TRACKER, OutputDirectory, locate
from tests.support.checkpoint import samples, small_models
from tests.support.checkpoint.changed_checkpoints import without_manifest, write_entries
from tests.support.checkpoint.command_runs import run_json
from tests.support.checkpoint.crafted_files import archive, touch

TENSORS = {
    "matrix": torch.arange(24.0).reshape(6, 4),
    "cube": torch.arange(60).reshape(5, 3, 4).to(torch.bfloat16),
    "scalar": torch.tensor(7.5),
    "empty": torch.empty(0, 3),
    "no columns": torch.empty(3, 0),
    "bytes": torch.arange(10, dtype=torch.uint8),
    "one": torch.ones(1),
    "flags": torch.tensor([True, False]),
    "complex": torch.complex(torch.ones(2), torch.zeros(2)),
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Write a checkpoint with torch itself."""
    path = tmp_path / "plain"
    dcp.save({**TENSORS, "object": {"a": [1, 2]}}, checkpoint_id=path, no_dist=True)
    return path


def test_every_tensor_and_object_is_what_was_saved(plain: Path) -> None:
    stored = StoredCheckpoint(plain)
    assert set(stored.tensors) == set(TENSORS)
    for key, tensor in TENSORS.items():
        read = stored.lazy(key).read()
        assert (
            read.dtype == tensor.dtype and read.shape == tensor.shape and torch.equal(read, tensor)
        ), key
        assert (stored.shape(key), stored.dtype(key)) == (tuple(tensor.shape), tensor.dtype)
    assert (
        stored.read_object("object.a") == [1, 2]
        if "object.a" in stored.objects
        else stored.read_object("object") == {"a": [1, 2]}
    )


def chunked(path: Path, tensor: torch.Tensor, cuts: list[list[int]]) -> StoredCheckpoint:
    """``tensor`` in a chunk for every cell of a grid."""
    spans = [list(itertools.pairwise([0, *cut, size])) for cut, size in zip(cuts, tensor.shape)]
    entries = []
    for cell in itertools.product(*spans):
        box = tensor[tuple(slice(a, b) for a, b in cell)].contiguous()
        entries.append(
            TensorEntry("tensor", tuple(tensor.shape), tuple(a for a, _ in cell), in_memory(box))
        )
    convert(DcpTarget(entries), OutputDirectory(path), show_progress=False)
    return StoredCheckpoint(without_manifest(path))


def of_two_chunks(folder: Path) -> Path:
    """Write a tensor of 6 times 4 elements in two chunks of rows; return its directory."""
    chunked(folder / "out", torch.arange(24.0).reshape(6, 4), [[3], []])
    return folder / "out"


@pytest.mark.always("[[2], [1], []]")
@pytest.mark.parametrize(
    "cuts", [[[], [], []], [[2], [1], []], [[1, 4], [], [3]], [[3], [1, 2], [1, 2]]], ids=str
)
def test_every_box_of_every_chunking_is_read(cuts: list[list[int]], tmp_path: Path) -> None:
    tensor = torch.arange(60.0).reshape(5, 3, 4)
    stored = chunked(tmp_path / "out", tensor, cuts)
    # Of a dimension of size 2: (0, 1), (0, 2), (1, 1), as pairs of offset and size.
    ranges = [
        [(a, b - a) for a, b in itertools.combinations(range(size + 1), 2)] for size in tensor.shape
    ]
    for box in itertools.product(*ranges):
        offsets, sizes = zip(*box)
        expected = tensor[tuple(slice(a, a + n) for a, n in box)]
        assert torch.equal(stored.read_chunk("tensor", Chunk(offsets, sizes)), expected), box
    assert torch.equal(stored.lazy("tensor", (2,)).rows(1, 3).read(), tensor[2, 1:3])
    assert torch.equal(stored.lazy("tensor", (2, 1, 3)).read(), tensor[2, 1, 3])
    assert torch.equal(
        stored.lazy_chunk("tensor", Chunk((1, 0, 2), (3, 3, 1))).read(), tensor[1:4, :, 2:3]
    )


def test_what_is_asked_for_is_read_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = chunked(tmp_path / "out", torch.zeros(64, 1024), [[], []])
    stored.read_chunk("tensor", Chunk((0, 0), (1, 1024)))  # compares the checksum of the whole
    lengths = []
    original = tensor_payload._read_into
    monkeypatch.setattr(
        tensor_payload,
        "_read_into",
        lambda *args: lengths.append(args[-1].nbytes) or original(*args),
    )
    stored.read_chunk("tensor", Chunk((5, 0), (2, 1024)))
    assert lengths == [2 * 1024 * 4]


def test_payloads_that_are_not_row_after_row_are_read(tmp_path: Path) -> None:
    path = tmp_path / "transposed"
    tensor = torch.arange(12.0).reshape(3, 4).t()
    dcp.save({"tensor": tensor}, checkpoint_id=path, no_dist=True)
    stored = StoredCheckpoint(path)
    assert torch.equal(stored.lazy("tensor").read(), tensor)
    assert torch.equal(stored.lazy("tensor").rows(1, 3).read(), tensor[1:3])


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the metadata."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata = change(metadata) or metadata
    file.write_bytes(pickle.dumps(metadata))


def move_a_chunk(metadata: Any) -> None:
    """So that two overlap and as many elements are nowhere."""
    entry = metadata.state_dict_metadata["tensor"]
    chunk = entry.chunks[1]
    moved = torch.Size([1, *chunk.offsets[1:]])
    places = metadata.storage_data
    index = next(index for index in places if index.offset == chunk.offsets)
    info = places.pop(index)
    places[type(index)(index.fqn, moved)] = info
    entry.chunks[1] = ChunkStorageMetadata(moved, chunk.sizes)


def grow(metadata: Any) -> None:
    metadata.state_dict_metadata["tensor"].size = torch.Size([1 << 45, 4])


def drop_a_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["tensor"].chunks.pop()


def huge_chunk(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["tensor"]
    entry.size = torch.Size([1 << 45, 4])
    entry.chunks[:] = [
        ChunkStorageMetadata(torch.Size([0, 0]), entry.size),
        ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([0, 0])),
    ]


def another_dtype(metadata: Any) -> None:
    object.__setattr__(metadata.state_dict_metadata["tensor"].properties, "dtype", torch.int32)


def another_shape(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["tensor"]
    entry.size = torch.Size([4, 6])
    entry.chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 6]))
    entry.chunks[1] = ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([1, 6]))


def drop_the_entry(metadata: Any) -> None:
    del metadata.state_dict_metadata["tensor"]


WRONG = {
    "no entry": drop_the_entry,
    "moved chunk": move_a_chunk,
    "larger": grow,
    "a chunk less": drop_a_chunk,
    "huge chunk": huge_chunk,
    "another dtype": another_dtype,
    "another shape": another_shape,
}


@pytest.mark.parametrize("kind", WRONG)
def test_metadata_that_does_not_fit_the_files_never_gives_a_tensor(
    kind: str, tmp_path: Path
) -> None:
    path = of_two_chunks(tmp_path)
    edit(path, WRONG[kind])
    with pytest.raises(DamagedCheckpointError):
        stored = StoredCheckpoint(path)
        stored.lazy("tensor").read()
    with contextlib.suppress(DamagedCheckpointError):
        assert find_problems(open_checkpoint(path))


def set_field(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata, name, value)


def set_size(size: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["tensor"], "size", size)


def name_a_dtype(metadata: Any) -> None:
    object.__setattr__(metadata.state_dict_metadata["tensor"].properties, "dtype", "float")


def number_a_key(metadata: Any) -> None:
    metadata.state_dict_metadata[4] = metadata.state_dict_metadata["tensor"]


MALFORMED = {
    "no dict of entries": set_field("state_dict_metadata", [1]),
    "no dict of places": set_field("storage_data", None),
    "an entry of another kind": lambda metadata: metadata.state_dict_metadata.update(tensor=3),
    "a key that is no text": number_a_key,
    "a size that is text": set_size("64"),
    "a negative size": set_size((-6, 4)),
    "sizes of other lengths": set_size((6, 4, 1)),
    "no dtype": name_a_dtype,
    "a place of another kind": lambda metadata: metadata.storage_data.update(
        dict.fromkeys(metadata.storage_data, "x")
    ),
    "no metadata at all": lambda metadata: {"state_dict_metadata": {}},
    "paths of another kind": set_field("planner_data", [1]),
    "reformulated shapes of another kind": set_field("mcore_data", 3),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_metadata_of_another_form_is_refused(kind: str, tmp_path: Path) -> None:
    path = of_two_chunks(tmp_path)
    edit(path, MALFORMED[kind])
    with pytest.raises(DamagedCheckpointError, match="metadata"):
        StoredCheckpoint(path)


def point_outside(name: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    return change


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/../../secret"])
def test_files_outside_of_the_checkpoint_are_not_read(name: str, tmp_path: Path) -> None:
    path = of_two_chunks(tmp_path)
    shutil.copy(path / "__0_0.distcp", tmp_path / "secret")
    (path / "sub").mkdir()
    edit(path, point_outside(name))
    with pytest.raises(DamagedCheckpointError, match="outside"):
        StoredCheckpoint(path)


def test_links_to_files_elsewhere_are_followed(tmp_path: Path) -> None:
    """Storage is often mounted and linked; the owner of a directory makes its links."""
    path, tensor = of_two_chunks(tmp_path), torch.arange(24.0).reshape(6, 4)
    shutil.move(path / "__0_0.distcp", tmp_path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(path)
    assert torch.equal(StoredCheckpoint(tmp_path / "link").lazy("tensor").read(), tensor)
    (tmp_path / "elsewhere").unlink()
    with pytest.raises(DamagedCheckpointError, match="missing"):
        StoredCheckpoint(path)


def test_all_missing_and_short_files_are_listed(tmp_path: Path) -> None:
    shape = small_models.shapes_of()
    path = small_models.write(small_models.state_of(shape), tmp_path / "out")
    source = samples.writable_copy(
        samples.iteration(samples.torch_dist(samples.DENSE)), tmp_path / "copy"
    )
    names = sorted(file.name for file in source.glob("*.distcp"))
    (source / names[0]).unlink()
    (source / names[1]).write_bytes((source / names[1]).read_bytes()[:1000])
    with pytest.raises(
        DamagedCheckpointError,
        match=f"(?s){names[0]} is missing.*{names[1]} is cut off: 1000 bytes of",
    ):
        StoredCheckpoint(source)
    assert StoredCheckpoint(path).tensors


NO_CHECKPOINTS: dict[str, tuple[dict[str, bytes], str]] = {
    "empty directory": ({}, "no checkpoint"),
    "tracker of words": ({TRACKER: b"seven"}, "should hold an iteration"),
    "tracker of nothing": ({TRACKER: b"7"}, "not there"),
    "tracker of bytes": ({TRACKER: b"\xff\xfe"}, "should hold an iteration"),
    "no tracker": ({"iter_0000004/file": b""}, "name one of iter_0000004"),
    "metadata a directory": ({".metadata/file": b""}, "no checkpoint"),
    "empty metadata": ({".metadata": b""}, "damaged"),
    "metadata of text": ({".metadata": b"not a pickle"}, "damaged"),
}
"""The files of a directory, and a part of what is said of it."""


def assert_is_none(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path)
    if message != "damaged":
        with pytest.raises(ValueError, match=message):
            locate(path)


@pytest.mark.parametrize(("files", "message"), NO_CHECKPOINTS.values(), ids=NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_said_to_be_none(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert_is_none(tmp_path, message)


def test_no_directory_is_no_checkpoint(tmp_path: Path) -> None:
    assert_is_none(tmp_path / "absent", "not there")
    (tmp_path / "file").touch()
    assert_is_none(tmp_path / "file", "a file")


@pytest.mark.parametrize("place", [".metadata", "object", "tensor"])
def test_no_part_of_a_checkpoint_runs_anything(place: str, tmp_path: Path) -> None:
    path, marker = tmp_path / "out", tmp_path / "executed"
    write_entries({"tensor": torch.ones(4), "object": [1]}, OutputDirectory(path))
    without_manifest(path)
    if place == ".metadata":
        (path / ".metadata").write_bytes(touch(marker))
    else:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == place)
        hostile = archive(touch(marker), **{"data/0": bytes(16)})
        (path / "crafted").write_bytes(hostile)
        info.relative_path, info.offset, info.length = "crafted", 0, len(hostile)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RefusedPickleError, match=r"posix\.system") as refused:
        stored = StoredCheckpoint(path)
        stored.read_object("object")
        stored.lazy("tensor").read()
    assert str(path) in str(refused.value)
    assert not marker.exists()
    try:
        assert find_problems(open_checkpoint(path))
    except RefusedPickleError:
        assert place == ".metadata"
    assert not marker.exists()


def test_a_tensor_that_repeats_few_bytes_is_refused(tmp_path: Path) -> None:
    """Strides of zero would make terabytes of them."""
    path = without_manifest(
        write_entries({"tensor": torch.ones(4)}, OutputDirectory(tmp_path / "out"))
    )
    crafted = safe_pickle.save_torch(torch.ones(1).expand(1 << 45))
    (path / "crafted").write_bytes(crafted)

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["tensor"]
        entry.size = torch.Size([1 << 45])
        entry.chunks[0] = ChunkStorageMetadata(torch.Size([0]), entry.size)
        info = next(iter(metadata.storage_data.values()))
        info.relative_path, info.offset, info.length = "crafted", 0, len(crafted)

    edit(path, change)
    with pytest.raises(DamagedCheckpointError, match="not enough"):
        StoredCheckpoint(path).lazy("tensor").read()


def test_overlap_is_found_as_a_count_of_elements_finds_it() -> None:
    random_numbers = random.Random(1)
    seen = set()
    for _ in range(500):
        boxes = []
        for _ in range(random_numbers.randrange(1, 5)):
            offsets = tuple(random_numbers.randrange(4) for _ in range(2))
            boxes.append(Chunk(offsets, tuple(random_numbers.randrange(1, 3) for _ in range(2))))
        cells = []
        for (a, b), (n, m) in boxes:
            cells += itertools.product(range(a, a + n), range(b, b + m))
        expected = len(cells) != len(set(cells))
        assert chunks_overlap(boxes) == expected, boxes
        seen.add(expected)
    assert seen == {True, False}
    assert chunks_overlap([Chunk((), ()), Chunk((), ())])
    assert not chunks_overlap([Chunk((), ())])
    assert Chunk((), ()).numel == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_tensors_of_eight_bits_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(4, 3).to(dtype)
    path = write_entries({"key": value}, OutputDirectory(tmp_path / "plain"))
    lazy = StoredCheckpoint(path).lazy("key")
    assert lazy.dtype == dtype and torch.equal(lazy.read().float(), value.float())
    assert torch.equal(lazy.read_rows(1, 3).float(), value[1:3].float())
    assert run_json("print-tensor", path, "key")["max"] == value.float().max()
    assert run_json("verify", path)["sound"]

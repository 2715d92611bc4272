# SPDX-License-Identifier: Apache-2.0
"""Chunks read into place, headers and metadata: the same as the careful readers."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from megatron.checkpoint.core import reading_threads
from megatron.checkpoint.dcp import safe_pickle, tensor_payload
from megatron.checkpoint.dcp.safe_loading import SafePlanner, SafeReader
from megatron.checkpoint.dcp.save_planner import EvenPlanner, assign
from megatron.checkpoint.dcp.signing_writer import SigningWriter
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.dcp.tensor_payload import read_header
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")


def content() -> dict[str, Any]:
    flat = torch.arange(5000.0)
    return {
        "view": flat[10:4210].view(60, 70),
        "transposed": flat[:35].view(5, 7).T,
        "half": flat[:9].bfloat16(),
        "scalar": torch.tensor(5.0),
        "empty": torch.zeros(0, 3),
        "settings": {"one": 1, "float": 1.0, "yes": True, "betas": (0.9, 0.95), "none": None},
        "more": {"one": 1, "nested": [{"a": 1}, "text"]},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    writer = SigningWriter(tmp_path)
    dcp.save(content(), storage_writer=writer, planner=EvenPlanner(), no_dist=True)
    return tmp_path


def cleared(value: Any) -> Any:
    """Return the same structure without the values."""
    if isinstance(value, dict):
        return {key: cleared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleared(item) for item in value]
    return torch.full_like(value, -1) if isinstance(value, torch.Tensor) else None


def assert_same(value: Any, expected: Any) -> None:
    for key, each in expected.items():
        if isinstance(each, dict):
            assert_same(value[key], each)
        elif isinstance(each, torch.Tensor):
            assert torch.equal(value[key], each) and value[key].dtype == each.dtype, key
        else:
            assert value[key] == each and type(value[key]) is type(each), key


@pytest.mark.parametrize("number", [1, 3])
def test_torch_and_the_safe_reader_load_the_same(
    saved: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_threads, "number_of_threads", lambda: number)
    readers: list[dict[str, Any]] = [
        {"checkpoint_id": saved},
        {"storage_reader": SafeReader(saved), "planner": SafePlanner()},
    ]
    for options in readers:
        state = cleared(content())
        dcp.load(state, no_dist=True, **options)
        assert_same(state, content())
    assert not StoredCheckpoint(saved).damaged_files(0, 1)


def test_the_safe_reader_reads_what_torch_has_written(tmp_path: Path) -> None:
    dcp.save(content(), checkpoint_id=tmp_path, no_dist=True)
    state = cleared(content())
    reader = SafeReader(tmp_path)
    dcp.load(state, storage_reader=reader, planner=SafePlanner(), no_dist=True)
    assert_same(state, content())


@pytest.mark.parametrize("block", [1 << 24, 280 * 16, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_chunk_is_read(
    saved: Path, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_payload, "_BLOCK", block)
    whole = content()["view"]
    info = StoredCheckpoint(saved)._storage["view", (0, 0)]
    path = saved / info.relative_path
    with open(path, "rb", buffering=0) as file:
        payload = read_header(file, info)
        for row, column, height, width in (
            *((0, 0, 60, 70), (3, 5, 7, 9), (3, 0, 7, 70), (4, 4, 1, 3), (0, 69, 60, 1)),
            (5, 3, 0, 4),
        ):
            target = torch.zeros(height, width, dtype=dtype)
            tensor_payload.read_chunk(file, payload, (row, column), target)
            expected = whole[row : row + height, column : column + width].to(dtype)
            assert torch.equal(target, expected)
        with pytest.raises(DamagedCheckpointError, match="has another one"):
            tensor_payload.read_chunk(file, payload, (59, 0), torch.zeros(2, 70))


def test_headers_are_the_same_without_a_comparison(saved: Path) -> None:
    stored = StoredCheckpoint(saved)
    for key, entry in stored.tensors.items():
        for chunk in entry.chunks:
            info = stored._storage[key, tuple(chunk.offsets)]
            path = saved / info.relative_path
            with open(path, "rb", buffering=0) as file:
                assert read_header(file, info, compares=False) == read_header(file, info)


@pytest.mark.parametrize("number", [1, 3])
def test_a_cut_file_is_refused(saved: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_threads, "number_of_threads", lambda: number)
    info = StoredCheckpoint(saved)._storage["view", (0, 0)]
    path = saved / info.relative_path
    with open(path, "r+b") as file:
        file.truncate(info.offset + info.length // 2)
    state = {"view": torch.zeros(60, 70)}
    with pytest.raises(BaseException, match="damaged"):
        reader = SafeReader(saved)
        dcp.load(state, storage_reader=reader, planner=SafePlanner(), no_dist=True)


def test_a_pickle_cannot_change_the_classes_of_metadata() -> None:
    """`BUILD` on the class itself, which the unpickler in C would obey."""
    module, name = Metadata.__module__, Metadata.__qualname__
    data = b"c" + f"{module}\n{name}\n".encode() + b"N}(X\x03\x00\x00\x00newK\x01u\x86b."
    assert pickle.loads(data) is Metadata and Metadata.new == 1
    del Metadata.new
    with pytest.raises(safe_pickle.RefusedPickleError):
        safe_pickle.load(data)
    assert not hasattr(Metadata, "new")


@pytest.mark.parametrize(
    ("spreads", "expected"),
    [(True, [["a", "c", "own"], ["b", "d"]]), (False, [[*"abcd", "own"], []])],
    ids=["spread", "first"],
)
def test_replicated_items_go_to_the_rank_with_the_fewest_bytes_or_to_the_first(
    spreads: bool, expected: list[list[str]]
) -> None:
    def items(**sizes: int) -> list[WriteItem]:
        planner = EvenPlanner()
        planner.set_up_planner({name: torch.empty(size) for name, size in sizes.items()})
        return planner.create_local_plan().items

    both = {"a": 1000, "b": 10000, "c": 9000, "d": 5000}
    first, second = items(**both, own=1000), items(**both)
    chosen = assign([first, second], spreads)
    names = [
        sorted(rank[position].index.fqn for position in positions)
        for rank, positions in zip((first, second), chosen)
    ]
    assert names == expected

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written part by part in the format of torch.distributed.checkpoint."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.core.lazy_tensor import LazyTensor, in_memory
from megatron.checkpoint.dcp import dcp_target
from megatron.checkpoint.dcp.dcp_target import DcpTarget, ObjectEntry, TensorEntry, whole
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.store.directory import OutputDirectory


def converted(target: DcpTarget, folder: Path) -> StoredCheckpoint:
    conversion.convert(target, OutputDirectory(folder / "out"), "a", show_progress=False)
    return StoredCheckpoint(folder / "out")


def test_every_tensor_is_read_once(tmp_path: Path) -> None:
    reads = []

    def lazy(number: int) -> LazyTensor:
        def read_rows(start: int, stop: int) -> torch.Tensor:
            reads.append(number)
            return torch.full((stop - start, 4), float(number))

        return LazyTensor((8, 4), torch.float32, read_rows)

    entries = [whole(f"t{number}", lazy(number)) for number in range(20)]
    stored = converted(DcpTarget(entries), tmp_path)
    assert sorted(reads) == list(range(20))
    for number in range(20):
        expected = torch.full((8, 4), float(number))
        assert torch.equal(stored.lazy(f"t{number}").read(), expected)


def test_parts_are_closed_when_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_target, "PART_BYTES", 256)
    target = DcpTarget([whole(f"t{number}", in_memory(torch.zeros(32))) for number in range(5)])
    assert [part.num_bytes for part in target.parts] == [256, 256, 128]
    assert len({part.name for part in target.parts}) == 3
    converted(target, tmp_path)
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 3


def test_objects_empty_tensors_and_scalars_are_written(tmp_path: Path) -> None:
    entries = [
        ObjectEntry("object", {"a": 1}),
        ObjectEntry("late", lambda: [2]),
        whole("empty", in_memory(torch.empty(0, 3))),
        whole("scalar", in_memory(torch.tensor(2.5))),
        TensorEntry("rows", (2, 3), (1, 0), in_memory(torch.ones(3))),
        TensorEntry("rows", (2, 3), (0, 0), in_memory(torch.zeros(3))),
    ]
    stored = converted(DcpTarget(entries, extra_files={"beside": lambda: b"x"}), tmp_path)
    assert stored.read_object("object") == {"a": 1} and stored.read_object("late") == [2]
    assert stored.lazy("empty").read().shape == (0, 3) and stored.lazy("scalar").read() == 2.5
    assert stored.lazy("rows").read().tolist() == [[0.0] * 3, [1.0] * 3]
    assert (tmp_path / "out" / "beside").read_bytes() == b"x"


def test_notes_of_what_was_read_are_returned(tmp_path: Path) -> None:
    notes: list[str] = []
    lazy = LazyTensor(
        (1,), torch.float32, lambda start, stop: (notes.append("seen"), torch.ones(1))[1]
    )
    target, output = DcpTarget([whole("t", lazy)], notes=notes), OutputDirectory(tmp_path / "out")
    assert conversion.convert(target, output, "a", show_progress=False) == ["seen"]


def test_a_conversion_in_parts_of_another_size_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def target(part_bytes: int, is_interrupted: bool) -> DcpTarget:
        monkeypatch.setattr(dcp_target, "PART_BYTES", part_bytes)

        def read(number: int) -> torch.Tensor:
            if is_interrupted and number == 5:
                raise KeyboardInterrupt
            return torch.full((32,), float(number))

        return DcpTarget(
            whole(
                f"t{n}",
                LazyTensor((32,), torch.float32, lambda start, stop, n=n: read(n)[start:stop]),
            )
            for n in range(8)
        )

    with pytest.raises(KeyboardInterrupt):
        converted(target(256, True), tmp_path)
    stored = converted(target(384, False), tmp_path)
    for n in range(8):
        assert stored.lazy(f"t{n}").read().tolist() == [float(n)] * 32
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 3

# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of fsdp_dtensor: their collectives, and the bytes that each rank moves."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.dcp.signing_writer import without_others
from megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, digest_of
from megatron.mcore_adapter.checkpoints.checkpoint_format import collector_paused
from megatron.mcore_adapter.run.run_state import Progress
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import SMALL, build, load_checkpoint, save_checkpoint
from tests.support.rank_pool import run_ranks

ITERATION = "iter_0000001"
WIDE = f"{SMALL} {FSDP}".replace("--hidden-size 32", "--hidden-size 256")


class CountedCollectives(TorchDispatchMode):
    """Counts what is sent within a context, by DTensors and objects too.

    Attributes:
        counts: number of calls by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls functions on its local tensors
        space, _, name = function.name().partition("::")
        if space in ("c10d", "_c10d_functional"):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def counted(action: Callable[[], object]) -> dict[str, int]:
    with CountedCollectives() as mode:
        action()
    return dict(mode.counts)


def collectives(line: str, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Job: count the collectives of a save and a load."""
    run = build(f"{line} --save {folder} --load {folder} --save-interval 1")
    run.progress = Progress(iteration=1)
    return counted(lambda: save_checkpoint(run)), counted(lambda: load_checkpoint(run))


def bytes_read() -> int:
    """Return the bytes that this process has read, from memory or disk, as the kernel counts."""
    fields = Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


def save(line: str, folder: Path) -> None:
    """Job: save a fresh run."""
    run = build(f"{line} --save {folder} --save-interval 1")
    run.progress = Progress(iteration=1)
    save_checkpoint(run)


def load_and_count(line: str) -> int:
    """Job: load, and return the bytes that this rank has read for it."""
    run = build(line)
    load_checkpoint(run)  # imports what it needs
    before = bytes_read()
    load_checkpoint(run)
    return bytes_read() - before


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "few", "many"),
    [("no_shard", 1, 3), ("optim", 2, 3), ("optim_grads_params", 1, 8)],
)
def test_collectives_do_not_depend_on_the_number_of_parameters(
    strategy: str, few: int, many: int, tmp_path: Path
) -> None:
    line = f"{SMALL} {FSDP} --data-parallel-sharding-strategy {strategy}"
    counts = []
    for layers in (few, many):
        deep = line.replace("--num-layers 2", f"--num-layers {layers}")
        counts.append(run_ranks(2, collectives, deep, tmp_path / str(layers)))
    assert counts[0] == counts[1]
    saved, loaded = counts[0][0]
    assert 0 < sum(saved.values()) <= 40 and 0 < sum(loaded.values()) <= 60, counts[0][0]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count")
def test_a_rank_reads_its_shards_and_not_those_of_others(tmp_path: Path) -> None:
    """One rank has written the file, so that every chunk in it is of several ranks."""
    run_ranks(1, save, WIDE, tmp_path)
    size = sum(path.stat().st_size for path in (tmp_path / ITERATION).glob("*.distcp"))
    assert size > 15e6
    of_ranks = run_ranks(4, load_and_count, f"{WIDE} --load {tmp_path} --no-verify-integrity")
    # Beside its quarter a rank reads the metadata, and the settings of all parameters.
    assert max(of_ranks) < 0.25 * size + 0.15 * size, (of_ranks, size)
    assert min(of_ranks) > 0.2 * size


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "strategy",
    ["no_shard", "optim_grads_params --num-distributed-optimizer-instances 2"],
    ids=["no_shard", "hybrid"],
)
def test_replicated_tensors_are_written_once_and_evenly(strategy: str, tmp_path: Path) -> None:
    run_ranks(4, save, f"{WIDE} --data-parallel-sharding-strategy {strategy}", tmp_path)
    source = tmp_path / ITERATION
    metadata = dcp.FileSystemReader(source).read_metadata()
    files: Counter[str] = Counter()
    largest = 0
    for info in metadata.storage_data.values():
        files[info.relative_path] += info.length
        largest = max(largest, info.length)
    assert files == {path.name: path.stat().st_size for path in source.glob("*.distcp")}
    assert len(files) == 4 and max(files.values()) - min(files.values()) <= largest, files


def test_the_manifest_has_the_digests_of_what_is_on_the_disk(tmp_path: Path) -> None:
    run_ranks(2, save, f"{SMALL} {FSDP}", tmp_path)
    source = tmp_path / ITERATION
    manifest = Manifest.read(source)
    assert manifest is not None
    assert manifest.files == {
        path.name: digest_of(path) for path in sorted(source.iterdir()) if path.name != MANIFEST
    }


def test_a_part_of_a_flat_buffer_is_written_without_a_copy() -> None:
    flat = torch.randn(100)
    for dtype in (torch.float32, torch.bfloat16):
        part = flat.to(dtype)[20:80].view(6, 10)
        alone = without_others(part)
        assert torch.equal(alone, part) and alone.dtype == dtype
        assert alone.data_ptr() == part.data_ptr()
        assert alone.untyped_storage().nbytes() == part.nbytes
    columns = flat.view(10, 10)[:, 2:4]
    assert torch.equal(without_others(columns), columns)
    assert without_others(columns).untyped_storage().nbytes() == columns.nbytes


def test_the_garbage_collector_is_as_it_was_after_a_save() -> None:
    assert gc.isenabled()
    with pytest.raises(OSError), collector_paused():
        assert not gc.isenabled()
        raise OSError
    assert gc.isenabled()
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
    gc.enable()

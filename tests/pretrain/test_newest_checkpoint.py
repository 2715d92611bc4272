# SPDX-License-Identifier: Apache-2.0
"""A load takes the newest sound checkpoint, says what it passes over, and writes nothing."""

import argparse
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, digests_of_rank
from megatron.checkpoint.store import directory
from megatron.checkpoint.store.directory import TRACKER
from megatron.checkpoint.torch_dist.checkpoint import MARKER
from megatron.mcore_adapter.checkpoints import checkpoint_source
from megatron.mcore_adapter.checkpoints.checkpoint_source import (
    CheckpointSource,
    Damage,
    find_source,
)
from megatron.mcore_adapter.checkpoints.save_directory import refuse_overwriting, settle
from megatron.mcore_adapter.run.errors import RunError
from megatron.pretrain.arguments import parse_arguments
from tests.pretrain.test_pretrain_gpt import cut, tree
from tests.support.checkpoint import samples
from tests.support.checkpoint.changed_checkpoints import flip_a_bit
from tests.support.pretrain.saved_runs import LINE
from tests.support.pretrain.training_runs import Record, error_of, train, trained
from tests.support.rank_pool import run_ranks

SHORT = f"{LINE} --train-iters 3 --save-interval 1"
TWO = f"{SHORT} --exit-interval 2"
NORM = "model.module.decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, trained(f"{TWO} --save {folder}")[0]


@pytest.fixture
def folder(saved: tuple[Path, Record], tmp_path: Path) -> Path:
    """Copy checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped_bit": lambda source: flip_a_bit(source, NORM),
    "incomplete": lambda source: (source / ".metadata").unlink(),
    "gone": shutil.rmtree,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_replaced_in_time(
    damage: str, folder: Path, saved: tuple[Path, Record]
) -> None:
    DAMAGES[damage](folder / "iter_0000002")
    line = f"{TWO} --load {folder}"
    looked, resumed = trained(line, f"{line} --save {folder}")
    for record in (looked, resumed):
        (told,) = [text for text in record.lines if "is loaded instead" in text]
        assert str(folder / "iter_0000002") in told and "iter_0000001 is loaded instead" in told
        assert "\n" not in told
        assert record.losses == saved[1].losses[1:]
    assert (folder / TRACKER).read_text() == "2"
    sound = trained(f"{SHORT} --load {folder} --no-load-fallback")[0]
    assert sound.column("iteration") == [3]


@pytest.mark.always("{}")
@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'{"sharded_backend": "zarr"}'])
def test_a_damaged_marker_of_torch_dist_is_found_without_a_manifest(
    content: bytes, folder: Path
) -> None:
    source = folder / "iter_0000002"
    (source / MANIFEST).unlink()
    (source / MARKER).write_bytes(content)
    found, damage = newest(folder)
    assert found.path == folder / "iter_0000001"
    assert f"{source / MARKER} is damaged" in damage[source]


@pytest.fixture
def common_object(tmp_path: Path) -> Path:
    """Copy a checkpoint whose common state is an object beside tensors, as 0.19 writes it."""
    sample = samples.torch_dist(samples.WITHOUT_COMMON_FILE)
    return samples.iteration(samples.writable_copy(sample, tmp_path / "sample"))


@pytest.mark.exhaustive
def test_files_of_tensors_are_left_to_all_ranks(common_object: Path) -> None:
    Manifest(common_object, digests_of_rank(common_object, 0, 1)).write()
    flip_a_bit(common_object, "decoder.final_layernorm.weight")
    assert newest(common_object.parent)[1] == {}
    assert StoredCheckpoint(common_object).damaged_files()


def test_an_unfinished_checkpoint_is_no_other_format(common_object: Path) -> None:
    """Megatron-Core writes the marker last."""
    (common_object / MARKER).unlink()
    for given in (dict(ckpt_step=3), {}):
        with pytest.raises(ValueError, match=f"has no {MARKER}, which is written last"):
            newest(common_object.parent, **given)


@pytest.mark.exhaustive
def test_a_checkpoint_under_the_name_of_another_iteration_is_told(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000002")
    shutil.copytree(folder / "iter_0000001", folder / "iter_0000002")
    lines = trained(f"{TWO} --load {folder}")[0].lines
    (line,) = [each for each in lines if each.startswith("loaded ")]
    assert f"{folder / 'iter_0000002'}, iteration 1, which is not that of its name: " in line


@pytest.mark.exhaustive
def test_a_load_writes_nothing(folder: Path) -> None:
    flip_a_bit(folder / "iter_0000002", NORM)
    before = tree(folder)
    run_ranks(2, train, f"{TWO} --load {folder}")
    (folder / TRACKER).unlink()
    run_ranks(2, train, f"{TWO} --load {folder}")
    assert tree(folder) == {name: text for name, text in before.items() if name != TRACKER}


@pytest.mark.exhaustive
def test_the_newest_itself_can_be_insisted_on(folder: Path) -> None:
    flip_a_bit(folder / "iter_0000002", NORM)
    before = tree(folder)
    for flags in ("--no-load-fallback", "--ckpt-step 2"):
        error = error_of(f"{SHORT} --load {folder} --save {folder} {flags}")
        assert "iter_0000002 is damaged, nothing of it was loaded" in error
    assert tree(folder) == before


def arguments(folder: Path, **given: Any) -> argparse.Namespace:
    flags = """pretrained_checkpoint finetune ckpt_step exit_on_missing_checkpoint no_load_fallback
        no_verify_integrity use_checkpoint_args no_check_checkpoint_args skip_train
        non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_save_interval
        save_retain_interval overwrite"""
    return argparse.Namespace(
        **{**dict.fromkeys(flags.split()), "load": str(folder), "save": str(folder), **given}
    )


def newest(folder: Path, **given: Any) -> tuple[CheckpointSource, Damage]:
    damage: Damage = {}
    source = find_source(arguments(folder, **given), lambda line: None, damage)
    assert source is not None
    return source, damage


@pytest.mark.parametrize("text", [None, "", "seven", "7", "release", "\x00\x00"])
def test_a_lost_or_damaged_tracker_file_is_rebuilt_where_the_run_saves(
    text: str | None, folder: Path
) -> None:
    (folder / TRACKER).unlink()
    if text is not None:
        (folder / TRACKER).write_text(text)
    source, damage = newest(folder)
    assert source.iteration == 2 and list(damage) == [folder / TRACKER]
    with pytest.raises(ValueError, match=TRACKER if text in (None, "seven") else "."):
        newest(folder, no_load_fallback=True)
    settle(arguments(folder, save=None), source)
    settle(arguments(folder, skip_train=True), source)
    assert ((folder / TRACKER).read_text() if text is not None else None) == text
    settle(arguments(folder), source)
    assert (folder / TRACKER).read_text() == "2"
    assert newest(folder) == (source, {})


def with_extra(folder: Path, iteration: int) -> Path:
    """Make checkpoint 1 the non-persistent one of another iteration; return it."""
    extra = folder / "non_persistent"
    shutil.copytree(folder / "iter_0000001", extra / f"iter_{iteration:07d}")
    (extra / TRACKER).write_text(str(iteration))
    return extra / f"iter_{iteration:07d}"


def test_a_run_goes_on_from_a_non_persistent_checkpoint_if_the_newest_is_damaged(
    folder: Path,
) -> None:
    shutil.copytree(folder / "iter_0000002", folder / "iter_0000004")
    (folder / TRACKER).write_text("4")
    extra = with_extra(folder, 3)
    (folder / "iter_0000004" / ".metadata").unlink()
    source, damage = newest(folder, non_persistent_ckpt_type="global")
    assert source.path == extra and list(damage) == [folder / "iter_0000004"]
    args = arguments(folder)
    refuse_overwriting(args, source)  # 4 is its own, and replaced in time
    args.load = str(folder.parent / "other")
    with pytest.raises(ValueError, match="begins at iteration 3"):
        refuse_overwriting(args, source)


@pytest.mark.exhaustive
def test_an_older_non_persistent_checkpoint_may_be_damaged(folder: Path) -> None:
    (with_extra(folder, 1) / ".metadata").unlink()
    given = dict(non_persistent_ckpt_type="global", no_load_fallback=True)
    source, damage = newest(folder, **given)
    assert source.path == folder / "iter_0000002" and not damage


def test_a_disk_that_cannot_be_read_is_no_damage(folder: Path) -> None:
    failing = patch.object(checkpoint_source, "stored_arguments", side_effect=OSError(5, "I/O"))
    with failing, pytest.raises(RunError, match=r"iter_0000002 cannot be read: .*I/O"):
        newest(folder)


def test_the_tracker_file_can_be_edited_to_go_back(folder: Path) -> None:
    (folder / TRACKER).write_text("1")
    assert newest(folder)[0].iteration == 1


def test_a_checkpoint_under_the_name_it_has_while_it_is_replaced_is_found(folder: Path) -> None:
    (folder / "iter_0000002").rename(folder / ".old_iter_0000002")
    (folder / TRACKER).unlink()
    assert newest(folder)[0].path == folder / ".old_iter_0000002"
    directory.tidy(folder)
    assert newest(folder)[0].path == folder / "iter_0000002"


def test_where_every_checkpoint_is_damaged_each_is_named(folder: Path) -> None:
    cut(folder / "iter_0000001" / "__0_0.distcp", 0.5)
    (folder / "iter_0000002" / ".metadata").unlink()
    with pytest.raises(ValueError, match="has no checkpoint that can be loaded") as caught:
        newest(folder)
    assert "__0_0.distcp is cut off" in str(caught.value)
    assert ".metadata is missing" in str(caught.value)


@pytest.mark.seldom("--no-verify-integrity")
@pytest.mark.parametrize("flags", ["", "--no-verify-integrity"])
def test_arguments_are_taken_from_the_checkpoint_that_is_loaded(flags: str, folder: Path) -> None:
    cut(folder / "iter_0000002" / ".metadata", 0.5)
    line = f"{SHORT} --load {folder} --use-checkpoint-args {flags}"
    args, notes = parse_arguments(
        shlex.split(line), world_size=2, cuda=False, transformer_engine=False
    )
    assert any(f"the model is that of {folder / 'iter_0000001'}" in note for note in notes)
    source, _ = newest(folder, use_checkpoint_args=True, no_verify_integrity=bool(flags))
    assert source.path == folder / "iter_0000001" and args.num_layers == 2


@pytest.mark.parametrize(
    ("present", "absent"),
    [
        (("__0_0.distcp", MARKER), ".metadata"),
        (("common.pt",), ".metadata"),
        (("model.safetensors", "tokenizer.json"), "config.json"),
        (("model.safetensors.index.json",), "config.json"),
        (("pytorch_model.bin",), "config.json"),
    ],
)
def test_a_folder_with_files_of_an_incomplete_checkpoint_starts_nothing_from_scratch(
    present: tuple[str, ...], absent: str, tmp_path: Path
) -> None:
    for name in present:
        (tmp_path / name).touch()
    with pytest.raises(ValueError) as caught:
        newest(tmp_path)
    assert f"{tmp_path} has {present[0]} but no {absent}" in str(caught.value)
    for name in present:
        (tmp_path / name).unlink()
    (tmp_path / "notes.txt").touch()
    assert find_source(arguments(tmp_path), lambda line: None, {}) is None

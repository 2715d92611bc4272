# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: every flipped bit, cut file and changed letter is reported or harmless."""

import functools
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.commands.comparison import compare_states
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.hugging_face.model_directory import read_json, read_tensors
from megatron.checkpoint.integrity.manifest import MANIFEST, DamagedCheckpointError
from megatron.checkpoint.torch_dist.checkpoint import check_marker
from tests.support.checkpoint import small_models
from tests.support.checkpoint.changed_checkpoints import change_common, without_manifest


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a checkpoint in each format, as programs do that write no manifest."""
    state = small_models.state_of(small_models.shapes_of(layers=["gated"], tied=True), num_layers=1)
    root = tmp_path_factory.mktemp("small")
    return {
        form: without_manifest(small_models.write(state, root / form, form))
        for form in ("torch_dist", "fsdp_dtensor")
    }


def says_the_same(path: Path, original: Path) -> bool:
    """Return False if an error is reported; fail if the content differs and none is."""
    try:
        opened = open_checkpoint(path)
        if find_problems(opened):
            return False
        state = opened.state()
    except ValueError:
        return False
    found = compare_states(state, _state(original))
    assert not found.differs, (found, path)
    return True


@functools.lru_cache
def _state(path: Path) -> TrainingState:
    return open_checkpoint(path).state()


FILES = {
    "torch_dist": (".metadata", "__0_0.distcp", "common.pt", "metadata.json"),
    "fsdp_dtensor": (".metadata", "__0_0.distcp"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FILES)
def test_every_flipped_bit_is_told_or_harmless(
    form: str, small: dict[str, Path], tmp_path: Path
) -> None:
    random_numbers = random.Random(f"bits of {form}")
    copy = shutil.copytree(small[form], tmp_path / "copy")
    told = 0
    for file, count in zip(FILES[form], (15, 12, 10, 4)):
        data = (copy / file).read_bytes()
        for _ in range(count):
            changed = bytearray(data)
            at, bit = random_numbers.randrange(len(data)), random_numbers.randrange(8)
            changed[at] ^= 1 << bit
            (copy / file).write_bytes(changed)
            told += not says_the_same(copy, small[form])
        (copy / file).write_bytes(data)
    assert told > 12  # the rest is padding
    assert says_the_same(copy, small[form])


@pytest.mark.parametrize("form", FILES)
def test_every_bit_of_a_tensor_is_under_its_checksum(
    form: str, small: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(small[form], tmp_path / "copy")
    stored = StoredCheckpoint(copy)
    key = next(key for key in stored.tensors if key.endswith("linear_qkv.weight"))
    payload = stored._payload(key, stored.chunks[key][0])
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    for at in (
        payload.offset,
        payload.offset + payload.num_bytes // 2,
        payload.offset + payload.num_bytes - 1,
    ):
        data[at] ^= 1
        (copy / "__0_0.distcp").write_bytes(data)
        index = (0,) if form == "torch_dist" else ()  # its first layer
        words = rf"__0_0\.distcp .*checksum of {re.escape(key)} "
        with pytest.raises(DamagedCheckpointError, match=words):
            StoredCheckpoint(copy).lazy(key).read()
        with pytest.raises(DamagedCheckpointError, match=words):
            StoredCheckpoint(copy).lazy(key, index).rows(2, 3).read()
        data[at] ^= 1


@pytest.mark.parametrize("form", FILES)
def test_a_damaged_archive_is_named_with_its_tensor(
    form: str, small: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(small[form], tmp_path / "copy")
    stored = StoredCheckpoint(copy)
    key = next(key for key in stored.tensors if key.endswith("linear_qkv.weight"))
    info = stored._storage[key, tuple(stored.tensors[key].chunks[0].offsets)]
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    data[info.offset + info.length - 22] ^= 1  # of the record at the end of a zip archive
    (copy / "__0_0.distcp").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=rf"__0_0\.distcp .*{re.escape(key)}"):
        StoredCheckpoint(copy).lazy(key).read()


@pytest.mark.parametrize("form", FILES)
def test_files_that_are_cut_off_are_told(form: str, small: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(small[form], tmp_path / "copy")
    for file in FILES[form]:
        data = (copy / file).read_bytes()
        for length in (0, 1, len(data) // 3, len(data) - 100, len(data) - 1):
            (copy / file).write_bytes(data[: max(length, 0)])
            assert not says_the_same(copy, small[form]), (file, length)
        (copy / file).unlink()
        assert not says_the_same(copy, small[form]), file
        (copy / file).write_bytes(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("final_layernorm.weight.lr", "final_layernorm.weight.ls"),
        (
            "module.decoder.final_layernorm.weight.wd_mult",
            "module.decoder.final_layernorm.weighu.wd_mult",
        ),
        ("opt_param_scheduler.max_lr", "opt_param_schedules.max_lr"),
        ("num_floating_point_operations_so_far", "num_floating_point_operations_so_faz"),
        ("final_layernorm.weight.exp_avg", "final_layernorm.weight.exp_avh"),
        (
            "model.module.decoder.layers.0.input_layernorm.weight",
            "model.module.decoder.layers.0.inpuu_layernorm.weight",
        ),
    ],
)
def test_a_changed_letter_of_a_key_is_told(
    old: str, new: str, small: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(small["fsdp_dtensor"], tmp_path / "copy")
    data = (copy / ".metadata").read_bytes()
    assert old.encode() in data
    (copy / ".metadata").write_bytes(data.replace(old.encode(), new.encode()))
    assert not says_the_same(copy, small["fsdp_dtensor"])


def test_json_that_is_nested_too_deeply_is_damage(small: dict[str, Path], tmp_path: Path) -> None:
    nested = "[" * 10**6
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    (copy / MANIFEST).write_text(nested)
    with pytest.raises(DamagedCheckpointError, match="has changed since it was written"):
        StoredCheckpoint(copy)
    (copy / "metadata.json").write_text(nested)
    with pytest.raises(DamagedCheckpointError, match=r"metadata\.json is damaged: maximum recur"):
        check_marker(copy)
    (tmp_path / "config.json").write_text(nested)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: maximum recursion"):
        read_json(tmp_path / "config.json")
    header = nested.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="cannot be read as a safetensors file: maximum recurs"):
        read_tensors(tmp_path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"config\.json.*this is a pipe or a device"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match="has neither"):
        read_tensors(tmp_path)


def test_an_empty_common_state_is_damage(small: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    change_common(copy, dict.clear)
    with pytest.raises(DamagedCheckpointError, match="the common state is empty"):
        open_checkpoint(copy).state()


@pytest.mark.parametrize("kind", ["directory", "link to nowhere"])
def test_a_manifest_that_is_no_file_is_damage(
    kind: str, small: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    if kind == "directory":
        (copy / MANIFEST).mkdir()
    else:
        (copy / MANIFEST).symlink_to(tmp_path / "gone")
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is no file"):
        StoredCheckpoint(copy)

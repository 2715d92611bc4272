# SPDX-License-Identifier: Apache-2.0
"""Damaged and foreign files are refused before anything is loaded, in both formats."""

import shutil
from pathlib import Path
from random import Random

import pytest

from benchmarks.soak.flips import (
    ITERATION,
    LINES,
    Flip,
    draw_flips,
    outcomes_of,
    save,
    toggle,
)
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import MANIFEST
from megatron.checkpoint.store.directory import TRACKER
from tests.support.checkpoint.changed_checkpoints import without_manifest
from tests.support.checkpoint.command_runs import run, run_json
from tests.support.pretrain.training_runs import error_of, train, trained
from tests.support.rank_pool import run_ranks

FORMATS = pytest.mark.parametrize("form", LINES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a run in each format; return the directories above the iteration."""
    root = tmp_path_factory.mktemp("saved")
    for form in LINES:
        save(form, root / form)
    return {form: root / form for form in LINES}


@pytest.fixture
def copy(form: str, saved: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(saved[form], tmp_path / "copy")


def refused_load(form: str, folder: Path, flags: str = "") -> str:
    return error_of(f"{LINES[form]} --exit-interval 2 --load {folder} {flags}")


def bit_of_a_weight(source: Path) -> tuple[str, Flip]:
    """Return a weight, and a bit of an exponent in the middle of it."""
    stored = StoredCheckpoint(source)
    key = next(key for key in stored.tensors if key.endswith("mlp.linear_fc2.weight"))
    payload = stored._payload(key, stored.chunks[key][0])
    return key, Flip(payload.file.name, payload.offset + payload.num_bytes // 2 + 3, 1)


@pytest.mark.exhaustive
@FORMATS
def test_no_flipped_bit_is_loaded_or_called_sound(form: str, saved: dict[str, Path]) -> None:
    """`python -m benchmarks.soak.flips` makes any number."""
    source = saved[form] / ITERATION
    flips = draw_flips(source, Random(form), 4)
    flips += [Flip(path.name, 0, 0) for path in sorted(source.iterdir())]
    outcomes = outcomes_of(form, saved[form], flips)
    assert {outcome.verdict for outcome in outcomes} == {"refused"}, outcomes
    assert run_json("verify", saved[form])["sound"]


@FORMATS
@pytest.mark.exhaustive
def test_without_manifest_flips_outside_of_the_metadata_are_never_silent(
    form: str, copy: Path
) -> None:
    source = without_manifest(copy) / ITERATION
    _, flip = bit_of_a_weight(source)
    flips = [each for each in draw_flips(source, Random(1), 6) if each.file != ".metadata"]
    verdicts = [outcome.verdict for outcome in outcomes_of(form, copy, [flip, *flips])]
    assert verdicts[0] == "refused" and set(verdicts) <= {"refused", "harmless"}


@FORMATS
@pytest.mark.exhaustive
def test_a_damaged_file_is_named_with_the_tensors_in_it(form: str, copy: Path) -> None:
    source = copy / ITERATION
    key, flip = bit_of_a_weight(source)
    toggle(source / flip.file, flip)
    for _ in range(2):
        error = refused_load(form, copy)
        assert f"{flip.file} has changed since it was written, in {key}" in error
        assert "nothing of it was loaded" in error
        without_manifest(copy)  # the second time by the checksum of the tensor


@FORMATS
@pytest.mark.exhaustive
def test_damage_is_loaded_without_verification(form: str, copy: Path) -> None:
    source = copy / ITERATION
    line = f"{LINES[form]} --exit-interval 2 --load {copy}"
    sound = trained(line)[0]
    _, flip = bit_of_a_weight(source)
    toggle(source / flip.file, flip)
    damaged = trained(f"{line} --no-verify-integrity")[0]
    assert damaged.iteration == sound.iteration == 2 and damaged.losses != sound.losses
    with open(source / flip.file, "ab") as file:
        file.write(b"more")
    assert f"{flip.file} has" in refused_load(form, copy, "--no-verify-integrity")
    (source / flip.file).unlink()
    error = refused_load(form, copy, "--no-verify-integrity")
    assert f"{flip.file} is missing; it has " in error


@FORMATS
@pytest.mark.exhaustive
def test_a_file_of_another_checkpoint_or_rank_is_found(
    form: str, copy: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    """All its checksums are right."""
    line = f"{LINES[form]} --exit-interval 2 --load {copy} --save {tmp_path / 'more'}"
    run_ranks(2, train, f"{line} --save-interval 1")
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        shutil.copy(tmp_path / "more" / "iter_0000002" / name, copy / ITERATION / name)
        assert name in refused_load(form, copy)
        assert name in str(run_json("verify", copy, "--fast", code=1))
        shutil.copy(saved[form] / ITERATION / name, copy / ITERATION / name)
        assert run_json("verify", copy, "--fast")["sound"]
    source = copy / ITERATION
    (source / "__0_0.distcp").rename(source / "third")
    (source / "__1_0.distcp").rename(source / "__0_0.distcp")
    (source / "third").rename(source / "__1_0.distcp")
    assert "__0_0.distcp" in refused_load(form, copy) and run_json("verify", copy, code=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("content", ["", '{"sharded_backend": "zarr"}', "[1]"])
def test_a_damaged_marker_of_torch_dist_is_refused(
    content: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(saved["torch_dist"], tmp_path / "copy")
    (copy / ITERATION / "metadata.json").write_text(content)
    for _ in range(2):
        assert "metadata.json" in refused_load("torch_dist", copy)
        assert "metadata.json" in str(run_json("verify", copy, code=1))
        without_manifest(copy)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["metadata.json", "common.pt"])
def test_without_manifest_a_lost_file_of_torch_dist_is_damage_of_the_newest(
    name: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    """A save of Megatron-Core that was killed leaves no metadata.json, which it writes last."""
    copy = without_manifest(shutil.copytree(saved["torch_dist"], tmp_path / "copy"))
    newer = shutil.copytree(copy / ITERATION, copy / "iter_0000002")
    (copy / TRACKER).write_text("2")
    if not (newer / name).exists():
        pytest.skip(f"this release of Megatron-Core writes no {name}")
    (newer / name).unlink()
    for flags in ("--no-load-fallback", "--ckpt-step 2"):
        error = refused_load("torch_dist", copy, flags)
        assert name in error and "iter_0000002" in error and "not in the file" not in error
    verified = run("verify", newer, code=1)
    assert name in verified.output
    for line in LINES.values():
        lines = trained(f"{line} --exit-interval 2 --load {copy}")[0].lines
        assert any(name in each and f"{ITERATION} is loaded instead" in each for each in lines)


@pytest.mark.exhaustive
def test_a_marker_of_another_format_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(saved["fsdp_dtensor"], tmp_path / "copy")
    shutil.copy(saved["torch_dist"] / ITERATION / "metadata.json", copy / ITERATION)
    unlisted = f"metadata.json is not listed in {MANIFEST}"
    assert unlisted in refused_load("fsdp_dtensor", copy)
    assert unlisted in str(run_json("verify", copy, code=1))
    without_manifest(copy)
    assert "has neither common.pt" in refused_load("fsdp_dtensor", copy)  # it is read as torch_dist
    run_json("verify", copy, code=1)


@pytest.mark.always("torch_dist")
@FORMATS
def test_the_manifest_of_another_checkpoint_is_refused(
    form: str, copy: Path, saved: dict[str, Path]
) -> None:
    other = next(name for name in LINES if name != form)
    shutil.copy(saved[other] / ITERATION / MANIFEST, copy / ITERATION / MANIFEST)
    assert "damaged" in refused_load(form, copy) and "error" in run_json("verify", copy, code=1)

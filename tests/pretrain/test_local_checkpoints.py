# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-ckpt-type local: parts on the disks of nodes, which are loaded all or none."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.checkpoint.store import directory
from megatron.pretrain.checkpoints import abandoned_checkpoints
from megatron.pretrain.checkpoints.abandoned_checkpoints import LIST
from megatron.pretrain.checkpoints.run_identity import RUN
from tests.pretrain.test_newest_checkpoint import flip
from tests.pretrain.test_non_persistent_saves import broken_off
from tests.pretrain.test_pretrain_gpt import cut
from tests.support.pretrain.saved_runs import DROPOUT, FSDP, GATED, LINE, SIX, STRATEGIES
from tests.support.pretrain.training_runs import Record, refuse, train
from tests.support.rank_pool import run_ranks

LAYOUTS = {
    **{name: f"--data-parallel-sharding-strategy {name}" for name in STRATEGIES},
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2",
    "experts": "--num-experts 4 --expert-model-parallel-size 2",
    "hybrid": "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    "torch_dist": "--ckpt-format torch_dist",
    "async": "--async-save",
}


def local(folder: Path) -> str:
    """Return the flags that load local checkpoints in a directory."""
    return f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {folder}"


def parts(folder: Path) -> list[str]:
    """Return the parts of a directory without that of the run, and what dead writers have left."""
    found = [path for path in folder.glob("*/rank_*/*") if path.is_dir()]
    return sorted(path.relative_to(path.parents[1]).as_posix() for path in found)


@pytest.mark.always("optim_grads_params")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_its_local_checkpoint_bitwise(layout: str, tmp_path: Path) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    line = f"{DROPOUT} {GATED} {FSDP} --bf16 {LAYOUTS[layout]}"
    saving = f"{line} --save {folder} --load {folder} --save-interval 4 {local(disk)}"
    saving += " --non-persistent-save-interval 1"
    unbroken = run_ranks(2, train, line.replace("--async-save", ""))[0][0]
    assert "broken off" in run_ranks(2, broken_off, saving, 5)[0]
    assert parts(disk) == ["rank_0/iter_0000005", "rank_1/iter_0000005"]
    if layout != "async":  # whose checkpoint of iteration 4 may not be written yet
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"

    resumed, again = run_ranks(2, train, saving, saving)[0]
    assert resumed.losses == unbroken.losses[5:]
    assert resumed.column("grad-norm") == unbroken.column("grad-norm")[5:]
    (loaded,) = [each for each in resumed.lines if each.startswith("loaded ")]
    assert loaded.startswith(f"loaded {disk}/run_") and loaded.endswith("iteration 5")
    # The persistent one is as new as the run now.
    assert again.iteration == 6 and not again.steps
    assert f"loaded {folder}/iter_0000006, iteration 6" in again.lines


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that broke off, in `run` and `twin`, with local checkpoints of step 3 in `disk`."""
    folder = tmp_path_factory.mktemp("local")
    for name, interval in (("run", 2), ("twin", 9)):
        own = folder / name
        if name == "twin":  # the same run, as far as its parts tell
            own.mkdir()
            shutil.copy(folder / "run" / RUN, own)
        line = f"{LINE} --save {own} --load {own} --save-interval {interval}"
        line += " --non-persistent-save-interval 1"
        assert "broken off" in run_ranks(2, broken_off, f"{line} {local(folder / 'disk')}", 3)[0]
    return folder


def take_part_of_twin(part: Path) -> None:
    """Put the part of another save of the same iteration in the place of a part."""
    (twin,) = part.parents[2].glob("twin_*")
    shutil.rmtree(part)
    shutil.copytree(twin / part.parent.name / part.name, part)


def take_part_of_first_rank(part: Path) -> None:
    shutil.rmtree(part)
    shutil.copytree(part.parents[1] / "rank_0" / part.name, part)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "replaced_node": (lambda part: shutil.rmtree(part.parent), "rank_1 has no part of it"),
    "flipped_bit": (lambda part: flip(part / "__0_0.distcp"), "__0_0.distcp has changed since"),
    "cut": (lambda part: cut(part / "__0_0.distcp", 0.5), "__0_0.distcp is cut off"),
    "incomplete": (lambda part: (part / ".metadata").unlink(), ".metadata is missing"),
    "other_save": (take_part_of_twin, "passed over: its parts are of different saves"),
    "other_rank": (take_part_of_first_rank, "rank was 0 when it was written, and is 1"),
}


@pytest.mark.always("replaced_node", "flipped_bit", "other_save")
@pytest.mark.parametrize("damage", DAMAGES)
def test_all_ranks_pass_over_a_local_checkpoint_of_which_one_part_is_not_sound(
    damage: str, saved: Path, fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    disk = Path(shutil.copytree(saved / "disk", tmp_path / "disk"))
    (part,) = disk.glob("run_*/rank_1/iter_0000003")
    strike, reason = DAMAGES[damage]
    strike(part)
    line = f"{LINE} --load {saved}/run {local(disk)} --exit-interval 4"
    records = [each[0] for each in run_ranks(2, train, line)]
    assert records[0].lines == records[1].lines
    (told,) = [each for each in records[0].lines if "passed over" in each]
    assert told.startswith("the local checkpoint of iteration 3 is passed over: ")
    assert reason in told and "\n" not in told
    assert f"loaded {saved}/run/iter_0000002, iteration 2" in records[0].lines
    assert records[0].losses == records[1].losses == fp32[1].losses[2:4]


def test_a_damaged_local_checkpoint_stops_a_run_without_fallback(
    saved: Path, tmp_path: Path
) -> None:
    disk = Path(shutil.copytree(saved / "disk", tmp_path / "disk"))
    (part,) = disk.glob("run_*/rank_1/iter_0000003")
    flip(part / "__0_0.distcp")
    errors = run_ranks(2, refuse, f"{LINE} --load {saved}/run {local(disk)} --no-load-fallback")
    assert errors[0] == errors[1]
    assert "ValueError: the local checkpoint of iteration 3: rank 1: " in errors[0]


@pytest.mark.always(
    "1--rank 0: world_size was 2 when it was written, and is 1",
    "2---data-parallel-sharding-strategy optim-optim_grads_params when it was written",
)
@pytest.mark.parametrize(
    ("world_size", "flags", "reason"),
    [
        (1, "", "rank 0: world_size was 2 when it was written, and is 1"),
        (2, "--data-parallel-sharding-strategy optim", "optim_grads_params when it was written"),
        (4, "", "rank 0: world_size was 2 when it was written, and is 4"),
        (2, "--tensor-model-parallel-size 2", "tensor_model_parallel_size was 1 when"),
        (2, "--make-vocab-size-divisible-by 64", "the shards of the model are others"),
    ],
)
def test_a_run_of_another_layout_passes_over_the_local_checkpoint(
    world_size: int, flags: str, reason: str, saved: Path
) -> None:
    line = f"{LINE} --data-parallel-sharding-strategy optim_grads_params {flags}"
    line += f" --load {saved}/run {local(saved / 'disk')} --exit-interval 3"
    record = run_ranks(world_size, train, line)[0][0]
    (told,) = [each for each in record.lines if "passed over" in each]
    assert reason in told
    assert record.column("iteration") == [3]


def test_a_local_checkpoint_makes_up_for_persistent_ones_that_are_damaged(
    saved: Path, fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    """And without a flag for the first, or for the very newest, it is not loaded."""
    metadata = saved / "run" / "iter_0000002" / ".metadata"
    content = metadata.read_bytes()
    metadata.unlink()
    line = f"{LINE} --load {saved}/run --exit-interval 4"
    loading = f"{line} {local(saved / 'disk')}"
    try:
        found = run_ranks(2, train, loading)[0][0]
        assert found.losses == fp32[1].losses[3:4]
        for flags in (line, f"{loading} --no-load-fallback", f"{loading} --ckpt-step 2"):
            assert "iter_0000002" in run_ranks(2, refuse, flags)[0]
    finally:
        metadata.write_bytes(content)


def refuse_with_one_part_published(command_line: str) -> str:
    """Job: the error of a run whose second rank cannot publish its part of iteration 3."""
    publish = directory.publish

    def publish_or_fail(root: Path, iteration: int) -> Path:
        if iteration == 3 and Path(root).name == "rank_1":
            raise OSError("the disk is gone")
        return publish(root, iteration)

    with patch.object(directory, "publish", publish_or_fail):
        return refuse(command_line)


def test_the_part_before_remains_until_all_ranks_have_published(
    fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    line = f"{LINE} --save {folder} --load {folder} --save-interval 9 {local(disk)}"
    line += " --non-persistent-save-interval 1"
    errors = run_ranks(2, refuse_with_one_part_published, line)
    assert errors[0] == errors[1]
    assert "RunError: the save of the local checkpoint of iteration 3 failed:" in errors[0]
    assert "rank 1: OSError: the disk is gone" in errors[0]
    # As a kill of the second rank leaves it.
    assert parts(disk) == [
        *("rank_0/iter_0000002", "rank_0/iter_0000003"),
        *("rank_1/.writing_iter_0000003", "rank_1/iter_0000002"),
    ]
    (run,) = disk.iterdir()
    (run / "rank_9" / "iter_0000001").mkdir(parents=True)  # it is on another node now
    resumed = run_ranks(2, train, f"{line} --exit-interval 5")[0][0]
    (told,) = [each for each in resumed.lines if "passed over" in each]
    assert "of iteration 3 is passed over: rank 1:" in told
    assert resumed.losses == fp32[1].losses[2:5]
    assert parts(disk) == ["rank_0/iter_0000005", "rank_1/iter_0000005"]


def test_local_checkpoints_of_a_run_that_is_not_continued_are_kept_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    line = f"{SIX} {FSDP} --exit-interval 1 --save-interval 2 {local(disk)}"
    saving = f"{line} --save {folder} --non-persistent-save-interval 1"
    run_ranks(2, train, saving)
    shutil.rmtree(folder)
    first, second = run_ranks(2, refuse, saving)
    assert first == second and "ValueError: local checkpoints cannot be saved:" in first
    assert f"rank_1/iter_0000001 belongs to --save {folder}, and this run would" in first
    assert f"--load {folder} without" in first and "--overwrite gives up" in first
    # A run in another directory has parts of its own.
    run_ranks(2, train, saving.replace(str(folder), str(tmp_path / "other")))
    assert len(parts(disk)) == 4
    longer = saving.replace("--non-persistent-save-interval 1", "--non-persistent-save-interval 3")
    run_ranks(2, train, f"{longer} --overwrite")
    # Parts of a run that has been deleted are not loaded, and give way to others.
    shutil.rmtree(folder)
    again = run_ranks(2, train, f"{saving} --load {folder}")[0][0]
    assert any("is of another run that saved here" in each for each in again.lines)
    assert [step["iteration"] for step in again.steps] == [1] and len(parts(disk)) == 4


@pytest.mark.exhaustive
def test_a_tracker_file_that_was_edited_goes_before_newer_local_checkpoints(
    saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    line = f"{LINE} --save {folder} --load {folder} --save-interval 1"
    run_ranks(2, train, f"{line} --exit-interval 2")
    line += f" {local(tmp_path)} --non-persistent-save-interval 2"
    line = line.replace("--save-interval 1 ", "--save-interval 9 ")
    assert "broken off" in run_ranks(2, broken_off, line, 4)[0]
    (folder / directory.TRACKER).write_text("1")
    (record,) = run_ranks(2, train, f"{line} --exit-interval 2")[0]
    assert f"loaded {folder}/iter_0000001, iteration 1" in record.lines
    (told,) = [each for each in record.lines if "passed over" in each]
    assert "iteration 4" in told and f"{directory.TRACKER} names 1" in told


def overwritten(folder: Path) -> str:
    """Save a run at 2, 4 and 6; return the start of the lines of another one that overwrites it."""
    run_ranks(2, train, f"{LINE} --save {folder} --save-interval 2")
    return f"{LINE} --seed 7 --save {folder} --save-interval 9 --non-persistent-save-interval 1"


def test_a_local_checkpoint_of_a_killed_run_goes_before_older_runs_that_it_overwrites(
    tmp_path: Path,
) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    anew = f"{overwritten(folder)} {local(disk)}"
    unbroken = run_ranks(2, train, f"{LINE} --seed 7")[0][0]
    assert "broken off" in run_ranks(2, broken_off, f"{anew} --overwrite", 3)[0]
    assert not directory.iterations(folder) and directory.read_tracker(folder) is None
    (resumed,) = run_ranks(2, train, f"{anew} --load {folder} --exit-interval 4")[0]
    assert resumed.losses == unbroken.losses[3:4]
    # The node is lost, and the run begins anew, not from the checkpoints of the other one.
    shutil.rmtree(disk)
    shutil.rmtree(folder / "iter_0000004")
    (folder / directory.TRACKER).unlink()
    (again,) = run_ranks(2, train, f"{anew} --load {folder} --exit-interval 1")[0]
    assert again.losses == unbroken.losses[:1]


def broken_off_before(what: str, command_line: str) -> str:
    """Job: a run that ends by an error where its first rank deletes what it gives up."""
    with patch.object(abandoned_checkpoints, what, side_effect=RuntimeError("broken off")):
        return refuse(command_line)


@pytest.mark.parametrize("what", ["succeed", "_delete"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_kill_after_the_first_local_checkpoint_leaves_checkpoints_of_one_of_both_runs(
    what: str, is_lost: bool, tmp_path: Path
) -> None:
    """It has been published, and those that it replaces have not been deleted."""
    folder, disk = tmp_path / "run", tmp_path / "disk"
    anew = f"{overwritten(folder)} {local(disk)}"
    assert "broken off" in run_ranks(2, broken_off_before, what, f"{anew} --overwrite")[0]
    assert (folder / LIST).exists() and directory.iterations(folder) == [6, 4, 2]
    if is_lost:
        (part,) = disk.glob("run_*/rank_1")
        shutil.rmtree(part)
    (resumed,) = run_ranks(2, train, f"{anew} --load {folder} --exit-interval 2")[0]
    assert not (folder / LIST).exists()
    if is_lost and what == "succeed":  # nothing is left of the run that was killed
        assert resumed.iteration == 6 and directory.iterations(folder) == [6, 4, 2]
    else:
        begin = 1 if is_lost else 2
        assert resumed.column("iteration") == list(range(begin, 3))
        assert directory.iterations(folder) == [2]


@pytest.mark.parametrize("is_local", [True, False])
def test_local_checkpoints_are_still_there_if_the_run_that_gives_them_up_has_saved_nothing(
    is_local: bool, fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    """Also where there are no others, and the run that is killed would not save local ones."""
    folder, disk = tmp_path / "run", tmp_path / "disk"
    line = f"{LINE} --save {folder} --save-interval 9"
    saving = f"{line} --non-persistent-save-interval 1 {local(disk)}"
    assert "broken off" in run_ranks(2, broken_off, saving, 3)[0]
    anew = saving.replace("interval 1", "interval 5") if is_local else line
    assert "broken off" in run_ranks(2, broken_off, f"{anew} --overwrite --seed 7", 2)[0]
    for own in (f"{LINE} {local(disk)}", saving):  # the first only loads
        (resumed,) = run_ranks(2, train, f"{own} --load {folder} --exit-interval 4")[0]
        assert resumed.losses == fp32[1].losses[3:4]


def test_local_checkpoints_of_a_run_that_was_overwritten_without_them_are_not_loaded(
    tmp_path: Path,
) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    line = f"{LINE} --save {folder} --save-interval 2"
    saving = f"{line} {local(disk)} --non-persistent-save-interval 1"
    assert "broken off" in run_ranks(2, broken_off, saving, 3)[0]
    run_ranks(2, train, f"{line} --seed 7 --overwrite --exit-interval 2")
    (resumed,) = run_ranks(2, train, f"{saving} --load {folder} --seed 7 --exit-interval 3")[0]
    assert f"loaded {folder}/iter_0000002, iteration 2" in resumed.lines
    assert any("is of another run that saved here" in each for each in resumed.lines)


@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_run_that_went_back_with_ckpt_step_goes_on_from_its_own_non_persistent_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_ranks(2, train, f"{LINE} --save {folder} --save-interval 2")
    line = f"{LINE} --save {folder} --load {folder} --save-interval 9"
    line += " --non-persistent-save-interval 1 "
    line += local(tmp_path / "disk") if kind == "local" else "--non-persistent-ckpt-type global"
    back = f"{line} --ckpt-step 2 --overwrite"
    assert "broken off" in run_ranks(2, broken_off, back, 2)[0]
    assert directory.iterations(folder) == [6, 4, 2] and directory.read_tracker(folder) == 6
    assert "broken off" in run_ranks(2, broken_off, back, 3)[0]
    assert directory.iterations(folder) == [2] and directory.read_tracker(folder) == 2
    (resumed,) = run_ranks(2, train, f"{line} --exit-interval 4")[0]
    assert resumed.column("iteration") == [4]

# SPDX-License-Identifier: Apache-2.0
"""The program trains, saves and loads on every release of Megatron-Core, with the same numbers."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import megatron_release
from tests.support.megatron_release import RELEASES
from tests.support.pretrain.files_by_release import WAYS, Way, compare
from tests.support.pretrain.release_runs import INSTALLED, train_on
from tests.support.pretrain.training_runs import (
    DATA,
    NO_DROPOUT,
    SIZES,
    SMALL,
    assert_same_run,
    train,
)
from tests.support.rank_pool import run_ranks

RUN = f"{SMALL} --train-iters 3 --log-params-norm"
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FSDP = "--use-megatron-fsdp"
GROWING = (
    f"{SIZES} {DATA} {NO_DROPOUT} {FSDP} --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine"
    " --train-samples 64 --rampup-batch-size 4 4 24 --lr-warmup-samples 0 --log-params-norm"
)
"""A run whose batch grows."""
MODES = {
    "ddp": "",
    **{level: f"{FSDP} --data-parallel-sharding-strategy {level}" for level in LEVELS},
}

NEWEST = RELEASES[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", RELEASES)
def test_losses_norms_and_checkpoints_are_those_of_the_installed_release(
    release: str, tmp_path: Path
) -> None:
    mine, theirs = tmp_path / "installed", tmp_path / release
    first = f"{RUN} {FSDP} --exit-interval 2 --save-interval 2"
    installed = run_ranks(2, train, f"{first} --save {mine}", RUN, GROWING)[0]
    # It goes on from the file of the installed release, and writes one for it. All in one process.
    resume, tune = (f"{RUN} {FSDP} --load {mine} {flag}" for flag in ("", "--finetune"))
    lines = [f"{RUN} {flags}" for flags in MODES.values()]
    lines += [GROWING, resume, tune, f"{first} --save {theirs}"]
    *records, grown, resumed, tuned, saved = train_on(release, tmp_path, 2, *lines)
    _, reference, growing = installed
    for record in records:
        assert_same_run(record, reference, loss=1e-6, norm=1e-5)
    assert saved.losses == pytest.approx(reference.losses[:2], rel=1e-6)
    assert resumed.losses == pytest.approx(reference.losses[2:], rel=1e-6)
    back, expected = run_ranks(2, train, f"{RUN} {FSDP} --load {theirs}", tune)[0]
    assert back.losses == pytest.approx(reference.losses[2:], rel=1e-6)
    assert tuned.losses == pytest.approx(expected.losses, rel=1e-6)
    assert grown.column("batch-size") == growing.column("batch-size")
    assert grown.column("batch-size")[0] == 4
    assert_same_run(grown, growing, loss=1e-6, norm=1e-5)


def goes_on_with_files_of(release: str, model: str, ways: Sequence[Way], folder: Path) -> None:
    """Load and convert files of a release under the installed one, and the other way round."""
    megatron_release.require(release)
    outcomes = [*compare([INSTALLED, release], [model], folder, ways)]
    assert len(outcomes) == 2 * len(ways)
    assert [str(each) for each in outcomes if not each.is_equal] == []


@pytest.mark.exhaustive
def test_files_of_the_newest_release_load_and_convert_both_ways(tmp_path: Path) -> None:
    loaded_by_megatron_core = WAYS[:1]
    converted = [way for way in WAYS if way.convert]
    goes_on_with_files_of(NEWEST, "llama", [*loaded_by_megatron_core, *converted], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", RELEASES)
def test_files_of_experts_load_and_convert_both_ways(release: str, tmp_path: Path) -> None:
    goes_on_with_files_of(release, "deepseek", WAYS, tmp_path)

# SPDX-License-Identifier: Apache-2.0
"""Ends of runs in which a rank dies or hangs, or that are interrupted.

`python -m benchmarks.soak.hangs` has many more of them, under the real torchrun.
"""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.hangs import TORCHRUN, VARIANTS, run
from benchmarks.soak.loops import MEGATRON_LM, OWN, loop_of

WARM = ("torchrun",)


def end(
    name: str,
    folder: Path,
    torchrun: tuple[str, ...],
    environment: dict[str, str],
    loop: str = OWN,
) -> None:
    """Run a variant and check its end."""
    variant = next(each for each in VARIANTS if each.name == name)
    variant = replace(variant, limit=4 * variant.limit)  # other tests run beside this one
    if torchrun == WARM:  # it ends with the code of the first rank that does, torchrun with 1
        variant = replace(variant, codes=(*variant.codes, signal.SIGKILL))
    ending = run(variant, folder, torchrun, environment, loop_of(loop))
    assert not ending.problems(variant), f"{ending.problems(variant)}\n{ending.errors}"


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_is_named_once(tmp_path: Path, commands: dict[str, str]) -> None:
    end("killed_with_save", tmp_path, WARM, commands)
    # The traceback of each rank that is left is in its file.
    for rank in (0, 2):
        assert "Traceback" in (tmp_path / "saved" / "errors" / f"rank{rank}.txt").read_text()


@pytest.mark.exhaustive  # these wait for the timeout of a collective, or start a real process
@pytest.mark.parametrize(
    ("name", "torchrun"),
    [
        ("hangs_with_save", WARM),
        ("announced", WARM),
        ("differs", WARM),
        ("interrupted_one_process", TORCHRUN),
    ],
)
def test_a_run_ends_with_one_message(
    name: str, torchrun: tuple[str, ...], tmp_path: Path, commands: dict[str, str]
) -> None:
    end(name, tmp_path, torchrun, commands)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["killed_with_save", "hangs_with_save", "differs", "own_error"])
def test_a_run_of_megatron_lms_loop_ends_with_the_same_message(
    name: str, tmp_path: Path, commands_of_newest: dict[str, str]
) -> None:
    end(name, tmp_path, WARM, commands_of_newest, MEGATRON_LM)

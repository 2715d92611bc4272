# SPDX-License-Identifier: Apache-2.0
"""The persistent checkpoint that a non-persistent one followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint.store import directory
from megatron.pretrain.checkpoints.followed_checkpoint import (
    followed_by,
    followed_now,
    is_given_up,
    tracked_in,
    write_followed,
)


@pytest.mark.parametrize(
    ("followed", "tracked", "expected"),
    [
        ("4", "4", False),
        ("4", "2", True),
        ("", "2", True),  # saved before there was any
        ("2 4", "4", False),  # saved while 4 was being written
        ("2 4", "2", False),  # which was killed
        ("40", "4", True),
        (None, "2", False),
        ("4", None, False),
        ("4", "8", False),  # a later one, which is damaged
        ("", "release", True),
    ],
)
def test_only_another_name_gives_a_branch_up(
    followed: str | None, tracked: str | None, expected: bool
) -> None:
    assert is_given_up(6, followed, tracked) is expected


def test_what_is_being_written_may_be_named_soon(tmp_path: Path) -> None:
    assert followed_now(tmp_path) == "" and tracked_in(tmp_path) is None
    assert followed_now(tmp_path, 2) == "2"
    directory.write_tracker(tmp_path, 2)
    assert followed_now(tmp_path, 4) == "2 4"
    (tmp_path / "extra").mkdir()
    assert followed_by(tmp_path / "extra") is None
    write_followed(tmp_path, tmp_path / "extra")
    assert followed_by(tmp_path / "extra") == "2"
    (tmp_path / directory.TRACKER).write_text("damaged")
    assert tracked_in(tmp_path) is None and followed_now(tmp_path) == ""

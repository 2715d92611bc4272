# SPDX-License-Identifier: Apache-2.0
"""Directories of checkpoints: what is visible is complete, whatever was interrupted."""

import os
from pathlib import Path

import pytest

from megatron.checkpoint.store.directory import (
    CONVERSION_JOURNAL,
    RELEASE,
    TRACKER,
    discard,
    find,
    iteration_directory,
    locate,
    prepare,
    publish,
    read_tracker,
    retain,
    staging_directory,
)


def write(root: Path, iteration: int | str, content: str = "data") -> None:
    (prepare(root, iteration) / "file").write_text(content)
    publish(root, iteration)


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_names_are_those_of_megatron(tmp_path: Path) -> None:
    assert iteration_directory("root", 3) == Path("root/iter_0000003")
    assert iteration_directory("root", 12345678) == Path("root/iter_12345678")
    assert TRACKER == "latest_checkpointed_iteration.txt"


def test_a_checkpoint_is_invisible_until_it_is_published(tmp_path: Path) -> None:
    root = tmp_path / "new" / "folder"
    staging = prepare(root, 3)
    (staging / "file").write_text("data")
    assert not list(root.glob("iter_*")) and read_tracker(root) is None
    assert publish(root, 3) == iteration_directory(root, 3)
    assert visible(root) == ["iter_0000003", TRACKER]
    assert (root / "iter_0000003" / "file").read_text() == "data"
    assert (root / TRACKER).read_text() == "3" and read_tracker(root) == 3


def test_what_an_interrupted_save_left_is_not_mixed_into_the_next(tmp_path: Path) -> None:
    (prepare(tmp_path, 3) / "half").write_text("written")
    assert list(prepare(tmp_path, 3).iterdir()) == []


def test_a_save_removes_what_killed_saves_have_left(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (prepare(tmp_path, 4) / "half").touch()
    (tmp_path / ".writing_iter_0000005" / CONVERSION_JOURNAL).mkdir(parents=True)
    for old in (".old_iter_0000003", ".old_iter_0000002"):
        (tmp_path / old).mkdir()
    (tmp_path / ".deleted_iter_0000001").mkdir()
    for temporary in (".loss.png.123.tmp", "latest_checkpointed_iteration.new"):
        (tmp_path / temporary).touch()
    prepare(tmp_path, 6)
    assert visible(tmp_path) == [
        ".writing_iter_0000005",  # a conversion, which can be continued
        ".writing_iter_0000006",
        "iter_0000002",  # the only copy of this iteration
        "iter_0000003",
        TRACKER,
    ]


def test_files_under_the_names_of_leftover_directories_stop_no_save(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for name in (".writing_iter_0000004", ".old_iter_0000002", ".deleted_iter_0000001"):
        (tmp_path / name).touch()
    (tmp_path / ".old_iter_0000003").symlink_to(tmp_path / "iter_0000003")
    write(tmp_path, 4)
    assert visible(tmp_path) == ["iter_0000003", "iter_0000004", TRACKER]


def test_an_iteration_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 3, "old")
    write(tmp_path, 3, "new")
    assert (tmp_path / "iter_0000003" / "file").read_text() == "new"
    assert visible(tmp_path) == ["iter_0000003", TRACKER]


def test_a_discarded_save_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 3)
    prepare(tmp_path, 4)
    discard(tmp_path, 4)
    discard(tmp_path, 4)
    assert visible(tmp_path) == ["iter_0000003", TRACKER] and read_tracker(tmp_path) == 3
    assert not staging_directory(tmp_path, 4).exists()


@pytest.mark.parametrize("text", ["", "latest", "-3", "3.5", "iter_0000003"])
def test_a_tracker_that_names_no_iteration_is_an_error_with_its_content(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(ValueError, match=TRACKER) as caught:
        read_tracker(tmp_path)
    assert repr(text) in str(caught.value)


def test_a_release_has_a_directory_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, RELEASE)
    (tmp_path / "release" / ".metadata").touch()
    assert visible(tmp_path) == [TRACKER, "release"]
    assert read_tracker(tmp_path) == RELEASE and locate(tmp_path) == tmp_path / "release"


def test_a_checkpoint_is_found_by_its_iteration_or_by_the_tracker_above(tmp_path: Path) -> None:
    write(tmp_path, 3, "")
    (tmp_path / "iter_0000003" / ".metadata").touch()
    assert locate(tmp_path) == locate(tmp_path / "iter_0000003") == tmp_path / "iter_0000003"


def test_where_no_checkpoint_is_the_error_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(ValueError, match="iter_0000007"):
        locate(tmp_path)
    with pytest.raises(ValueError, match="not there"):
        locate(tmp_path / "nothing")
    (tmp_path / TRACKER).write_text("9")
    with pytest.raises(ValueError, match="names iter_0000009, which is not there"):
        locate(tmp_path)


def test_a_tracker_may_end_with_a_line_break(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("12\n")
    assert read_tracker(tmp_path) == 12
    assert read_tracker(tmp_path / "nothing") is None


def test_multiples_and_the_newest_are_retained(tmp_path: Path) -> None:
    for iteration in (2, 4, 5, 6, 7):
        write(tmp_path, iteration)
    (tmp_path / "iter_notes").mkdir()
    retain(tmp_path, 4, newest=7)
    assert visible(tmp_path) == ["iter_0000004", "iter_0000007", "iter_notes", TRACKER]


def test_a_save_that_was_killed_while_it_replaced_an_iteration_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        (prepare(tmp_path, 3) / "content").write_text("complete")
        if find(tmp_path, 3) is None:
            publish(tmp_path, 3)
    original = os.replace

    def killed(source: Path, target: Path) -> None:
        if source.name.startswith(".writing"):
            raise KeyboardInterrupt
        original(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, 3)
    monkeypatch.undo()
    found = find(tmp_path, read_tracker(tmp_path))
    assert (found / "content").read_text() == "complete"
    prepare(tmp_path, 3)
    publish(tmp_path, 3)
    assert find(tmp_path, 3) == iteration_directory(tmp_path, 3)


def test_each_step_of_publishing_is_on_the_disk_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 3)
    (prepare(tmp_path, 3) / "file").touch()
    events = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        events.append(f"rename to {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    publish(tmp_path, 3)
    root = tmp_path.name
    assert events == [
        "sync .writing_iter_0000003",
        *("rename to .old_iter_0000003", f"sync {root}"),
        *("rename to iter_0000003", f"sync {root}"),
        *(f"sync .{TRACKER}.tmp", f"rename to {TRACKER}", f"sync {root}"),
    ]

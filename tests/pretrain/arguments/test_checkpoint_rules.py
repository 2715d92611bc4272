# SPDX-License-Identifier: Apache-2.0
"""Rules of the flags of checkpoints: which conflict, which have no effect, and where URLs lead."""

from pathlib import Path

import pytest

from megatron.checkpoint.store.url_staging import with_urls
from tests.support.pretrain.arguments.command_lines import MOCK, parse, problems


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--async-save --async-strategy nvrx", "--async-strategy nvrx: nvidia-resiliency-ext"),
        (
            "--non-persistent-ckpt-type global --non-persistent-save-interval 20",
            "--non-persistent-save-interval 20 must be no multiple of --save-interval 10",
        ),
        (
            "--non-persistent-ckpt-type global --non-persistent-save-interval 3"
            " --non-persistent-global-ckpt-dir s3://x",
            "s3://x: only checkpoints are written to URLs",
        ),
    ],
)
def test_flags_of_saves_that_do_not_fit_are_refused(flags: str, problem: str) -> None:
    found = problems(f"{MOCK} --save s --save-interval 10 {flags}")
    assert any(problem in each for each in found), found


def test_paths_that_no_file_system_follows_are_refused_by_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    name = "n" * 300
    line = f"{MOCK} --save {name} --load loop --tensorboard-dir loop/x --data-path 0.5 {name}"
    assert problems(line.replace("--mock-data", "")) == [
        f"--save {name[:40]}...{name[:40]} (300 characters): File name too long",
        "--load loop: Too many levels of symbolic links",
        "--tensorboard-dir loop/x: Too many levels of symbolic links",
        f"--data-path {name[:40]}...{name[:40]} (300 characters): File name too long",
    ]


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (
            "--finetune --no-load-rng",
            "--finetune, --no-load-rng: no effect without --load or --pretrained-checkpoint;",
        ),
        ("--finetune --pretrained-checkpoint p", None),
        ("--no-load-optim --exit-on-missing-checkpoint --load l", None),
        ("--no-save-optim", "--no-save-optim: no effect without --save"),
        ("--no-save-rng --save s --save-interval 10", None),
        ("--load l --ckpt-step 5 --no-load-fallback", "--no-load-fallback: no effect with"),
        ("--save s --save-interval 5 --async-save --skip-train", "--async-save: no effect with"),
        (
            "--use-megatron-fsdp --dist-ckpt-optim-fully-reshardable",
            "--dist-ckpt-optim-fully-reshardable: no effect with --use-megatron-fsdp",
        ),
    ],
)
def test_flags_of_checkpoints_without_effect_are_named(flags: str, note: str | None) -> None:
    _, notes = parse(f"{MOCK} {flags}")
    found = [each for each in notes if "no effect" in each]
    assert len(found) == (note is not None) and all(each.startswith(str(note)) for each in found)


def test_flags_of_background_and_extra_saves_fit_together() -> None:
    line = f"{MOCK} --use-megatron-fsdp --save s --save-interval 10 --async-save"
    line += " --use-persistent-ckpt-worker --async-strategy mcore"
    _, notes = parse(
        f"{line} --non-persistent-save-interval 3 --non-persistent-ckpt-type global"
        " --non-persistent-global-ckpt-dir other"
    )
    assert any(note.startswith("--async-strategy: each rank's writer process") for note in notes)


def test_a_url_is_of_a_store_that_is_known_or_refused() -> None:
    args, _ = parse(f"{MOCK} --save memory://a --load memory://b --save-interval 1")
    assert [with_urls(path) for path in (args.save, args.load)] == ["memory://a", "memory://b"]
    found = problems(f"{MOCK} --save nothing://bucket/run --load file://host/x --save-interval 1")
    assert [problem.partition(": ")[0] for problem in found] == [
        "--save nothing://bucket/run",
        "--load file://host/x",
    ]


def test_a_url_of_a_directory_is_its_path(tmp_path: Path) -> None:
    load = tmp_path / "x"
    args, _ = parse(f"{MOCK} --save file:///tmp/with%20blank --load {load} --save-interval 1")
    assert (args.save, args.load) == ("/tmp/with blank", str(load))


@pytest.mark.parametrize(
    ("flags", "world_size", "problem"),
    [
        ("--async-save", 1, "--save memory://a is the memory of one process"),
        ("", 2, "--save memory://a is the memory of one process"),
        ("--overwrite", 1, "--overwrite: nothing can be moved aside at a URL"),
        (
            "--non-persistent-save-interval 2 --non-persistent-ckpt-type global",
            1,
            "--non-persistent-save-interval 2: not with --save at a URL",
        ),
        (
            "--non-persistent-ckpt-type global --load memory://a",
            1,
            "--non-persistent-ckpt-type global: not with --save and --load at a URL",
        ),
    ],
)
def test_what_a_url_does_not_go_with_is_refused(flags: str, world_size: int, problem: str) -> None:
    line = f"{MOCK} --save memory://a --save-interval 3 {flags}"
    found = problems(line, world_size=world_size)
    assert any(each.startswith(problem) for each in found), found

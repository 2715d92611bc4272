# SPDX-License-Identifier: Apache-2.0
"""A release that cannot be used is refused in one line that names the files."""

import logging
import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from unittest.mock import patch

import pytest

import megatron
from megatron.mcore_adapter.releases import tested
from megatron.mcore_adapter.releases.tested import ReleaseError
from tests.support.warm_programs import ROOT


def checkout(folder: Path, release: str, loop: bool = False) -> Path:
    """Write what is read of a checkout of a release."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    names = zip(("MAJOR", "MINOR", "PATCH"), release.split("."))
    lines = "".join(f"{name} = {number}\n" for name, number in names)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text(lines)
    if loop:
        (folder / "megatron" / "training").mkdir()
        (folder / "megatron" / "training" / "__init__.py").touch()
    return folder


def path_of(*folders: Path) -> AbstractContextManager[object]:
    """Let `import megatron` look into folders only."""
    return patch.object(megatron, "__path__", [str(folder / "megatron") for folder in folders])


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    tested._warn_once.cache_clear()


def test_the_installed_release_is_tested() -> None:
    assert str(tested.check()) in tested.TESTED or "MEGATRON" in os.environ


@pytest.mark.parametrize("release", tested.TESTED)
def test_a_tested_release_is_used_without_a_word(
    release: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with path_of(checkout(tmp_path, release)):
        assert str(tested.check()) == release
    assert not caplog.records


def test_a_newer_release_is_used_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with path_of(checkout(tmp_path, "0.21.3")), caplog.at_level(logging.WARNING):
        tested.check()
        tested.check()
    (record,) = caplog.records
    assert "Megatron-Core 0.21.3" in record.message
    assert f"newer than {tested.TESTED[-1]}" in record.message
    assert str(tmp_path) in record.message and "\n" not in record.message


def test_only_the_first_rank_names_a_newer_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with path_of(checkout(tmp_path, "1.0.0")):
        tested.check()
    assert not caplog.records


def refusal() -> str:
    with pytest.raises(ReleaseError) as caught:
        tested.check()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_older_release_is_refused(tmp_path: Path) -> None:
    with path_of(checkout(tmp_path, "0.15.4")):
        message = refusal()
    assert "0.15.4" in message and "older than 0.16.0" in message
    assert str(tmp_path / "megatron" / "core" / "package_info.py") in message


def test_no_release_is_refused(tmp_path: Path) -> None:
    with path_of(tmp_path):
        assert "Megatron-Core is not installed" in refusal()


def test_the_loop_is_found_on_the_path_and_above_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkout(tmp_path / "checkout", "0.19.0", loop=True)
    with path_of(checkout(tmp_path / "wheel", "0.19.0")):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
        assert not tested.has_loop()
        monkeypatch.setattr(sys, "argv", [str(folder / "examples" / "multimodal" / "train.py")])
        assert tested.has_loop()
    monkeypatch.undo()
    with path_of(folder):
        assert tested.has_loop()


def test_the_checkout_above_a_program_comes_before_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkout(tmp_path / "checkout", "0.19.0", loop=True)
    installed = checkout(tmp_path / "lib" / "site-packages", "0.16.1")
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    with path_of(installed):
        tested.use_checkout_of(folder / "tools" / "train.py")
    assert sys.path == [str(folder / "tools"), str(folder), "elsewhere"]
    with path_of(folder):
        tested.use_checkout_of(folder / "tools" / "train.py")
    assert sys.path == [str(folder / "tools"), str(folder / "tools"), str(folder), "elsewhere"]


def test_an_editable_install_is_found_through_its_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = checkout(tmp_path / "checkout", "0.19.0") / "megatron" / "core"

    class Hook:
        """The hook that setuptools installs for a package whose parent is a namespace."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != "megatron.core":
                return None
            return spec_from_file_location(name, core / "__init__.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    with path_of(tmp_path / "placeholder"):
        assert tested.check() == tested.Release(core / "package_info.py", (0, 19, 0))


@pytest.mark.parametrize(
    ("folder", "names_path"),
    [
        ("lib/python3/dist-packages", True),
        ("editable", True),
        ("lib/site-packages", False),
    ],
)
def test_a_checkout_before_what_is_installed_is_used(
    folder: str, names_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = checkout(tmp_path / "checkout", "0.19.0", loop=True)
    if names_path:
        monkeypatch.setenv("PYTHONPATH", str(front))
    with path_of(front, checkout(tmp_path / folder, "0.16.1")):
        assert str(tested.check()) == "0.19.0"


def test_the_loop_must_be_of_the_release_of_the_wheel(tmp_path: Path) -> None:
    installed = checkout(tmp_path / "lib" / "site-packages", "0.16.1")
    with path_of(installed, checkout(tmp_path / "same", "0.16.1", loop=True)):
        assert str(tested.check()) == "0.16.1"
    behind = checkout(tmp_path / "checkout", "0.19.0", loop=True)
    with path_of(installed, behind):
        message = refusal()
    assert str(installed / "megatron" / "core" / "package_info.py") in message
    assert str(behind / "megatron" / "training" / "__init__.py") in message
    assert "pip install" not in message and "0.19.0" in message


@pytest.mark.exhaustive
def test_the_program_ends_with_one_line(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (ROOT, checkout(tmp_path / "a", "0.15.3"))))
    run = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py")],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert re.fullmatch(r"error: Megatron-Core 0.15.3 .* is older than 0.16.0.*\n", run.stderr)


def test_setup_allows_the_tested_releases_those_between_and_the_next_minor_one() -> None:
    minor = int(tested.TESTED[-1].split(".")[1])
    bound = f'"megatron-core>={tested.TESTED[0]},<0.{minor + 2}"'
    assert bound in (ROOT / "setup.py").read_text()

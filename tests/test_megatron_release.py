# SPDX-License-Identifier: Apache-2.0
"""Releases of Megatron-Core are downloaded once, and skipped with a reason where pip finds none."""

import zipfile
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support import megatron_release
from tools import wheels

WHEEL = "megatron_core-9.8.7-cp312-cp312-manylinux_2_28_x86_64.whl"
METADATA = "Metadata-Version: 2.1\nName: megatron-core\nVersion: 9.8.7\n"


@pytest.fixture(autouse=True)
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find the wheels of a folder alone."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(megatron_release, "UNPACKED", tmp_path / "unpacked")
    monkeypatch.setattr(megatron_release, "NEEDED", ())


@pytest.mark.exhaustive
def test_a_wheel_is_downloaded_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        wheel.writestr("megatron/core/datasets/__init__.py", "")
        wheel.writestr("megatron_core-9.8.7.dist-info/METADATA", METADATA)
        wheel.writestr("megatron_core-9.8.7.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    assert megatron_release.obstacle("9.8.7") is None
    with patch.object(wheels, "download", side_effect=AssertionError):
        folder = megatron_release.unpack("9.8.7")
    assert folder == tmp_path / "unpacked" / "9.8.7"
    assert (folder / "megatron" / "core" / "datasets" / "__init__.py").is_file()
    assert str(folder) in megatron_release.environment("9.8.7")["PYTHONPATH"]


@pytest.mark.exhaustive
def test_a_release_that_pip_does_not_find_is_an_obstacle() -> None:
    reason = megatron_release.obstacle("9.8.6")
    assert reason is not None and reason.startswith("pip finds no megatron-core==9.8.6: ERROR: ")
    assert [*megatron_release.UNPACKED.iterdir()] == [megatron_release.UNPACKED / "lock"]

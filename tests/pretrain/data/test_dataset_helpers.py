# SPDX-License-Identifier: Apache-2.0
"""The dataset functions of a checkout are compiled on first use, or an error says how."""

import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.pretrain.data import dataset_helpers
from megatron.pretrain.errors import RunError

MAKEFILE = "$(OUT):\n\techo $(CPPFLAGS) > $@\n"


@pytest.fixture
def pybind11(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(get_include=lambda: "/headers/of/pybind11")
    monkeypatch.setitem(sys.modules, "pybind11", stand_in)


def test_the_file_gets_this_pythons_suffix_and_headers(tmp_path: Path, pybind11: None) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    assert dataset_helpers.compile_helpers(tmp_path) == []
    compiled = tmp_path / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert "-I/headers/of/pybind11" in compiled.read_text()
    assert sysconfig.get_paths()["include"] in compiled.read_text()
    assert sorted(tmp_path.iterdir()) == sorted([compiled, tmp_path / "Makefile"])


def test_a_failure_names_the_folder_the_reason_and_the_fix(tmp_path: Path, pybind11: None) -> None:
    (tmp_path / "Makefile").write_text("$(OUT):\n\t@echo no compiler here >&2; exit 1\n")
    (problem,) = dataset_helpers.compile_helpers(tmp_path)
    assert str(tmp_path) in problem and "install pybind11" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_pybind11_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pybind11", None)
    (problem,) = dataset_helpers.compile_helpers(tmp_path)
    assert "pybind11 is not installed" in problem and "pip install pybind11" in problem


def test_what_is_compiled_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_helpers, "compile_helpers", lambda folder: ["compiled again"])
    dataset_helpers.compile_if_missing()


def test_what_cannot_be_compiled_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_helpers, "is_compiled", lambda: False)
    monkeypatch.setattr(dataset_helpers, "compile_helpers", lambda folder: ["no compiler"])
    with pytest.raises(RunError, match="no compiler"):
        dataset_helpers.compile_if_missing()

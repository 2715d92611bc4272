# SPDX-License-Identifier: Apache-2.0
"""Modules that the loop imports and nothing declares are named in one line, before any import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.mcore_adapter.loop_environment import check_installed
from tests.support.warm_programs import ROOT

LAYOUTS = {
    "0.18": ("transformer/moe/paged_stash.py", "triton"),
    "0.19": ("transformer/moe/ops/paged_stash.py", "triton"),
    "0.17": ("../training/yaml_arguments.py", "yaml"),
}

PROGRAM = "import sys; sys.modules['triton'] = None; import megatron.mcore_adapter.drop_in"
"""A program without triton, which builds of torch for CUDA install."""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    folder = tmp_path / "megatron" / "core"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\n")
    return folder


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("release", LAYOUTS)
def test_the_file_that_imports_an_absent_module_is_named(
    release: str, core: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, module = LAYOUTS[release]
    file = write((core / name).resolve(), f"import os\nimport {module}\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package = {"yaml": "pyyaml"}.get(module, module)
    with pytest.raises(RuntimeError) as error:
        check_installed(core)
    assert str(error.value) == (
        f"Megatron-LM's training loop needs the Python module {module}, which {file} imports (pip"
        f" install {package})"
    )


def test_an_import_that_may_fail_needs_nothing(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(core / "transformer/moe/paged_stash.py", "try:\n    import triton\nexcept: pass\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(core)


def test_importing_the_drop_in_names_what_is_absent(core: Path) -> None:
    file = write(core / "transformer/moe/ops/paged_stash.py", "import triton\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": f"{core.parents[1]}{os.pathsep}{ROOT}"},
        cwd=core,
        text=True,
        capture_output=True,
    )
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: Megatron-LM's training loop needs the Python module triton, which"
        f" {file} imports (pip install triton)"
    )

# SPDX-License-Identifier: Apache-2.0
"""The wheel installs no name of others, and `make lint` has the same tools everywhere."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).parents[1]

MEGATRON_LM = {
    # Names in `megatron/` of Megatron-LM, today and before, and of the megatron-core wheel.
    *("megatron.core", "megatron.data", "megatron.deprecated", "megatron.fp16_deprecated"),
    *("megatron.fused_kernels", "megatron.inference", "megatron.legacy", "megatron.model"),
    *("megatron.mpu", "megatron.optimizer", "megatron.post_training", "megatron.rl"),
    *("megatron.schedules", "megatron.static", "megatron.text_generation", "megatron.tokenizer"),
    *("megatron.training", "megatron.virtual_pipeline", "megatron.global_vars", "megatron.utils"),
    *("megatron.arguments", "megatron.checkpointing", "megatron.initialize", "megatron.timers"),
    # Top-level folders and modules of a checkout.
    *("docker", "docs", "examples", "gpt_builders", "images", "mamba_builders", "model_provider"),
    *("pretrain_bert", "pretrain_gpt", "pretrain_hybrid", "pretrain_ict", "pretrain_mamba"),
    *("pretrain_retro", "pretrain_t5", "pretrain_vision_classify", "pretrain_vision_dino"),
    *("pretrain_vision_inpaint", "pretrain_vlm", "scripts", "setup", "tasks", "tests", "tools"),
    *("train_rl",),
}
"""Top names of a Megatron-LM checkout: an equal name of ours would hide theirs."""


def arguments_of_setup() -> dict[str, Any]:
    """Return the arguments with which setup.py calls `setuptools.setup`."""
    before = Path.cwd()
    os.chdir(REPOSITORY)  # setuptools looks for packages in the working directory
    try:
        with patch("setuptools.setup") as setup:
            runpy.run_path("setup.py")
    finally:
        os.chdir(before)
    return setup.call_args.kwargs


def test_no_installed_name_exists_in_a_megatron_lm_checkout() -> None:
    packages = arguments_of_setup()["packages"]
    assert "megatron" not in packages  # a namespace that the megatron-core wheel shares
    ours = {".".join(package.split(".")[:2]) for package in packages}
    assert {"megatron.fsdp", "megatron.pretrain", "megatron_fsdp"} <= ours
    collisions = ours & MEGATRON_LM
    assert not collisions, f"{sorted(collisions)} exist in Megatron-LM too: rename ours"


def test_every_package_in_the_repository_is_installed() -> None:
    packages = set(arguments_of_setup()["packages"])
    folders = {path.parent for path in (REPOSITORY / "megatron").rglob("*.py")}
    names = {".".join(folder.relative_to(REPOSITORY).parts) for folder in folders}
    assert names <= packages


def test_a_checkout_of_megatron_lm_behind_us_on_the_path_is_found(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def get_args(): ...\n")
    program = (
        "from megatron.training import get_args; import megatron.pretrain, megatron.checkpoint"
    )
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)


def test_pre_commit_has_the_versions_of_make_lint() -> None:
    pinned = arguments_of_setup()["extras_require"]["lint"]
    versions = dict(requirement.split("==") for requirement in pinned)
    assert set(versions) == {"mypy", "ruff"}
    configuration = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"rev: v(\S+)", configuration) == [versions["ruff"]]
    assert ".venv/bin/python -m mypy" in configuration  # the one that `make lint` has installed


def make_targets(file: str) -> set[str]:
    """Return the targets that a script or workflow calls."""
    text = (REPOSITORY / file).read_text()
    return set(re.findall(r"^ *(?:- run: )?make ([a-z-]+)", text, re.MULTILINE))


def test_every_continuous_integration_calls_the_same_make_targets() -> None:
    own = make_targets(".ci/run")
    assert own == {"lint", "docs", "test-all"}
    # Beside them `test`, with which `test-all` begins, on several Pythons.
    assert make_targets(".github/workflows/ci.yml") == own | {"test"}


def test_the_version_is_the_newest_of_the_changelog() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    dated = re.findall(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", changelog, re.MULTILINE)
    assert dated == sorted(dated, key=lambda text: tuple(map(int, text.split("."))), reverse=True)
    assert arguments_of_setup()["version"] == dated[0]

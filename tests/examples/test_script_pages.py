# SPDX-License-Identifier: Apache-2.0
"""The pages beside the scripts: they name every script, and their commands are accepted."""

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.examples.conftest import Shell
from tests.examples.test_scripts import parsed, write_tokenizer
from tests.support.examples.documents import command_blocks
from tests.support.pretrain.training_runs import CORPUS
from tests.support.warm_programs import ROOT

FEWER_NODES = ("--nodes=64", "--nodes=8")
"""What a page says, and what the test runs: a process records the words of each node."""


def page_of(folder: str) -> Path:
    return ROOT / "examples" / folder / "README.md"


@pytest.mark.parametrize("folder", ["megatron_fsdp", "finetune"])
def test_the_page_names_every_script_and_only_files_that_exist(folder: str) -> None:
    text = page_of(folder).read_text()
    scripts = {path.name for path in page_of(folder).parent.glob("*.sh")}
    assert set(re.findall(r"`(\w+\.sh)`", text)) == scripts
    links = re.findall(r"\]\(([^)#:\s]+)\)", text)
    assert links and all((page_of(folder).parent / link).exists() for link in links), links
    assert not [line for line in text.splitlines() if len(line) > 100 and line[0] != "|"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("folder", "runs"), [("megatron_fsdp", [2, 2, 2, 16, 64]), ("finetune", [2] * 6)]
)
def test_every_command_of_the_page_is_accepted(
    folder: str,
    runs: list[int],
    recorder: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(recorder.directory)
    (tmp_path / "models").mkdir()
    write_tokenizer(tmp_path / "models" / "DeepSeek-V3")
    (tmp_path / "data").mkdir()
    for name, suffix in itertools.product(("tokens", "mine", "lines"), (".bin", ".idx")):
        (tmp_path / "data" / f"{name}_text_document{suffix}").symlink_to(f"{CORPUS}{suffix}")
    commands = "".join(block.commands for block in command_blocks(page_of(folder)))
    record = tmp_path / "record"
    done = recorder.run("bash", "-ec", commands.replace(*FEWER_NODES), RECORD=str(record))
    assert done.returncode == 0, done.stdout
    requests = {line: json.loads(line) for line in record.read_text().splitlines()}
    different = {json.dumps(each["words"]): each for each in requests.values()}
    args = [parsed(request) for request in different.values()]
    assert [each.world_size for each in args if each is not None] == runs
    assert all(each is None or each.use_megatron_fsdp for each in args)


def test_the_recommended_settings_are_those_of_the_largest_script() -> None:
    table = page_of("megatron_fsdp").read_text().split("## What to give beside")[1]
    flags = re.findall(r"^\| `(--[\w-]+)`", table, re.MULTILINE)
    script = (page_of("megatron_fsdp").parent / "sbatch_mfsdp_deepseek_v3.sh").read_text()
    assert len(flags) == 5 and all(flag in script for flag in flags), flags
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in script

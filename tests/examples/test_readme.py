# SPDX-License-Identifier: Apache-2.0
"""README.md: its size, its links, its commands word for word, and the output that it quotes."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.checkpoint.commands import command_line
from megatron.pretrain.arguments import parse_arguments
from tests.examples.conftest import Shell, repository_in, with_inspector
from tests.examples.test_examples import ROOT
from tests.support.examples.documents import (
    DocumentRun,
    check_block,
    command_blocks,
    run_document,
)
from tests.support.examples.page_programs import the_class_is_the_drop_ins
from tests.support.rank_pool import run_ranks

README = ROOT / "README.md"
BLOCKS = command_blocks(README)
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
FIGURES = re.findall(r"^\|.*\| `([^`|]+)`[^|]*\|$", README.read_text(), re.MULTILINE)
"""Commands of the table of figures."""

SMALLER = {
    "convert_checkpoint.py": "--gigabytes 0.1 --hidden-size 256 --ranks 1",
    "parity_with_ddp.py": "--iterations 2",
    "padding_table.py": "",
}
"""Options that make the measurements short; without them the commands are those of the table."""

TENTH = (
    "--train-iters 10 --eval-interval 5 --eval-iters 1 --log-interval 1 --save-interval 5"
    " --micro-batch-size 1 --global-batch-size 2"
)
"""Flags that make `make pretrain` a tenth as long, on few tokens."""
SHORTER = {
    "--num-layers 4 --hidden-size 256": "--num-layers 2 --hidden-size 64",
    "--micro-batch-size 8 --train-iters 20": "--micro-batch-size 1 --train-iters 2 --eval-iters 1",
    "--save-interval 10": "--save-interval 1",
}
"""Parts of the commands of the README, and what stands there in the test."""
RECORDED = ROOT / "benchmarks" / "results" / "make_pretrain.md"
"""The whole output of `make pretrain`, of which the README quotes lines."""


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    too_long = [line for line in lines if len(line) > 100]
    assert not too_long, "\n".join(too_long)


def test_every_test_command_of_the_readme_is_a_target_of_make() -> None:
    targets = set(re.findall(r"make ([a-z-]+)", README.read_text()))
    assert {"test", "test-all", "lint", "pretrain"} <= targets
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= rules


class TransformerLayer(nn.Module):
    """A stand-in for the reader's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(input)) + input


def train_with(snippet: str) -> list[float]:
    """Run the README's training loop and return the mean of the weights before and after it."""
    torch.manual_seed(1)
    model = nn.Sequential(TransformerLayer(), TransformerLayer(), nn.Linear(8, 1))
    names = {
        "torch": torch,
        "TransformerLayer": TransformerLayer,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": torch.randn(20, 4, 8).unbind(),
        "loss": lambda output: (output - 1).square().mean(),
    }
    inputs = torch.randn(64, 8)
    before = names["loss"](model(inputs)).item()
    exec(snippet, names)
    return [before, names["loss"](names["model"](inputs)).item()]


def test_the_training_loop_of_the_readme_learns() -> None:
    for before, after in run_ranks(2, train_with, SNIPPETS[0]):
        assert after < before / 2


def install_with(snippet: str) -> None:
    """Run the README's line for Megatron-LM, and look at the class that there then is."""
    exec(snippet, {})
    the_class_is_the_drop_ins({})


def test_the_line_for_megatron_lm_installs_the_drop_in() -> None:
    run_ranks(1, install_with, SNIPPETS[1])


def with_make(folder: Path, commands: Path) -> Path:
    """Add what `make` needs to a folder that looks like this repository.

    The commands of its virtual environment are those of another folder.
    """
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(commands)
    (folder / ".venv" / ".installed").touch()
    return folder


@pytest.fixture(scope="module")
def run(commands: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> DocumentRun:
    stand_ins = Path(commands["PATH"].partition(":")[0])
    folder = with_make(repository_in(tmp_path_factory.mktemp("readme")), stand_ins)
    # Not the flags of a `make test` around this one.
    variables = {**commands, "MAKEFLAGS": "", "ARGS": TENTH}
    shorter = []
    for block in BLOCKS:
        text = block.commands
        for old, new in SHORTER.items():
            text = text.replace(old, new)
        shorter.append(replace(block, commands=text))
    return run_document(shorter, with_inspector(Shell(folder, variables)), timeout=300)


def in_a_tenth(quoted: str) -> str:
    """Return quoted output as a run of a tenth of the iterations prints it, with any losses."""
    text = re.sub(r"\d+\.\d+E[+-]\d+", "...", quoted)
    return re.sub(
        r"(?<![\d.])\d+0(?![\d.])",
        lambda number: f"{int(number[0]) // 10:0{digits(number[0])}}",
        text,
    )


def digits(number: str) -> int:
    """Return the width of a number that is filled up with zeros, and 0 for any other."""
    return len(number) if number.startswith("0") else 0


@pytest.mark.exhaustive
def test_commands_print_what_is_quoted(run: DocumentRun) -> None:
    blocks = [replace(block, quoted=in_a_tenth(block.quoted)) for block in BLOCKS]
    for block, output, code in zip(blocks, run.outputs, run.codes):
        check_block(block, output, code)


def test_the_command_for_checkpoints_is_installed() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="checkpoint-inspector")
    assert script.load() is command_line.main


def test_the_output_of_the_whole_run_was_recorded() -> None:
    """Another version of Python has another standard library, the text that the model learns."""
    (quoting,) = (block for block in BLOCKS if "make pretrain" in block.commands)
    check_block(quoting, RECORDED.read_text(), 0)


def test_the_command_of_megatron_core_is_accepted_as_it_stands() -> None:
    (block,) = (block for block in BLOCKS if "pretrain_gpt.py" in block.commands)
    words = shlex.split(block.commands.partition("pretrain_gpt.py")[2].replace("\\\n", ""))
    args, _ = parse_arguments(words, world_size=2, cuda=False, transformer_engine=False)
    assert args.use_megatron_fsdp and all(old in block.commands for old in SHORTER)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [each for each in FIGURES if "compare.py" not in each])
def test_a_command_of_the_figures_runs(command: str, commands: dict[str, str]) -> None:
    """The commands measure the figures; run in the smallest form, they show that they can.

    That of benchmarks/compare.py is a step of tests/gpu/check.py; test_gpu_check.py rehearses it.
    """
    program = next(name for name in SMALLER if name in command)
    done = subprocess.run(
        ["bash", "-c", f"{command} {SMALLER[program]}"],
        cwd=ROOT,
        env={**commands, "PATH": f"{commands['PATH']}:{Path(sys.executable).parent}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_table_of_figures_names_its_commands() -> None:
    assert len(FIGURES) >= 4
    for command in FIGURES:
        assert any(name in command for name in ("compare.py", *SMALLER)), command

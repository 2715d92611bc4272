# SPDX-License-Identifier: Apache-2.0
"""README.md: its size, its links, its commands word for word, and the output that it quotes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.examples.conftest import Shell, repository_in
from tests.examples.test_examples import ROOT
from tests.support.examples.documents import (
    CommandBlock,
    DocumentRun,
    check_block,
    command_blocks,
    run_document,
)
from tests.support.rank_pool import run_ranks

README = ROOT / "README.md"
BLOCKS = command_blocks(README)
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
FIGURES = re.findall(r"^\|.*\| `([^`|]+)`[^|]*\|$", README.read_text(), re.MULTILINE)
"""Commands of the table of figures."""

SMALLER = {
    "compare.py": "--rounds 1 --layers 2 --hidden 64 --length 32 --steps 1",
    "convert_checkpoint.py": "--gigabytes 0.1 --hidden-size 256",
    "parity_with_ddp.py": "--iterations 3",
    "padding_table.py": "",
}
"""Options that make the measurements short; without them the commands are those of the table."""


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    too_long = [line for line in lines if len(line) > 100]
    assert not too_long, "\n".join(too_long)


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) >= 5
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing, missing


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


def drop_in_with(snippet: str) -> str:
    """Run the README's line for Megatron-LM; return the module that its class then comes from."""
    import megatron.core.distributed as core_distributed

    from megatron.mcore_adapter import drop_in

    exec(snippet, {})
    try:
        return core_distributed.__dict__["FullyShardedDataParallel"].__module__
    finally:
        drop_in.uninstall()


def test_the_line_for_megatron_lm_installs_the_drop_in() -> None:
    (module,) = run_ranks(1, drop_in_with, SNIPPETS[1])
    assert module.startswith("megatron.mcore_adapter.")


def with_make(folder: Path) -> Path:
    """Add what `make` needs to a folder that looks like this repository."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv" / ".installed").touch()
    return folder


@pytest.fixture(scope="module")
def run(commands: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> DocumentRun:
    folder = with_make(repository_in(tmp_path_factory.mktemp("readme")))
    # As after `source .venv/bin/activate`; but torchrun and python are the warm stand-ins.
    activated = {**commands, "PATH": f"{commands['PATH']}:{folder / '.venv' / 'bin'}"}
    activated.update(MAKEFLAGS="", ARGS="")  # not those of a `make test` around this one
    return run_document(BLOCKS, Shell(folder, activated), timeout=900)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "block"), list(enumerate(BLOCKS)), ids=[f"block_{n + 1}" for n in range(len(BLOCKS))]
)
def test_a_block_of_commands_prints_what_is_quoted(
    number: int, block: CommandBlock, run: DocumentRun
) -> None:
    # Another version of Python has another standard library, the text that the model learns.
    check_block(block, run.outputs[number], run.codes[number], tolerance=0.15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", FIGURES)
def test_a_command_of_the_figures_runs(command: str, commands: dict[str, str]) -> None:
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
        assert any(name in command for name in SMALLER), command

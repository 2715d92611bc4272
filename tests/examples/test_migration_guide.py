# SPDX-License-Identifier: Apache-2.0
"""Commands of docs/migrating_to_fsdp.md, word for word: their output, and losses that continue."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.conftest import Shell, repository_in
from tests.warm_programs import ROOT

GUIDE = ROOT / "docs" / "migrating_to_fsdp.md"
BLOCK = re.compile(r"^```(bash|bash fails|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "-- exit code of the block: "


@dataclass(frozen=True)
class GuideStep:
    """One block of commands and what is quoted of its output."""

    commands: str
    fails: bool
    quoted: str


def steps() -> list[GuideStep]:
    text = GUIDE.read_text()
    assert text.count("```") == 2 * len(BLOCK.findall(text)), (
        "every block of the guide is commands or output"
    )
    found: list[GuideStep] = []
    for kind, content in BLOCK.findall(text):
        if kind == "text":
            assert found and not found[-1].quoted, f"output without commands: {content}"
            found[-1] = GuideStep(found[-1].commands, found[-1].fails, content)
        else:
            found.append(GuideStep(content, kind == "bash fails", ""))
    return found


STEPS = steps()


@dataclass(frozen=True)
class GuideRun:
    """The guide, gone through: output and exit code of every step, and where the results are."""

    directory: Path
    outputs: list[str]
    codes: list[int]


@pytest.fixture(scope="module")
def run(commands: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> GuideRun:
    """Run all blocks in one shell, as a reader does; a block that fails runs in a subshell."""
    shell = Shell(repository_in(tmp_path_factory.mktemp("guide")), commands)
    program = ["set -euo pipefail"]
    for step in STEPS:
        if step.fails:
            program.append(f"code=0\n(\n{step.commands}) || code=$?\necho '{MARK}'$code")
        else:
            program.append(f"{step.commands}echo '{MARK}'0")
    done = shell.run("bash", "-c", "\n".join(program), timeout=240)
    pieces = re.split(rf"^{MARK}(\d+)$", done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0 and len(pieces) == 2 * len(STEPS) + 1, pieces[-1]
    return GuideRun(shell.directory, pieces[0::2], list(map(int, pieces[1::2])))


def matches(quoted: str, line: str) -> bool:
    """Return whether the line is as quoted; blanks count as one, `...` stands for anything."""
    pattern = ".*".join(map(re.escape, " ".join(quoted.split()).split("...")))
    return re.fullmatch(pattern, " ".join(line.split())) is not None


@pytest.mark.exhaustive  # what it shows, test_scripts.py shows by the scripts that it names
@pytest.mark.parametrize("number", range(len(STEPS)), ids=lambda number: f"block_{number + 1}")
def test_a_block_of_commands_prints_what_is_quoted(number: int, run: GuideRun) -> None:
    step, output = STEPS[number], run.outputs[number]
    assert (run.codes[number] != 0) == step.fails, output
    lines = iter(output.splitlines())
    for quoted in step.quoted.splitlines():
        if quoted != "...":
            assert any(matches(quoted, line) for line in lines), (
                f"{quoted!r} is not, or not in this place, in\n{output}"
            )


def losses(run: GuideRun, name: str) -> dict[int, float]:
    entries = map(
        json.loads, (run.directory / "checkpoints" / name / "losses.jsonl").read_text().splitlines()
    )
    return {entry["iteration"]: entry["train"] for entry in entries}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "first"), [("fsdp", 7), ("3d_end", 10)], ids=["with_fsdp", "and_back"]
)
def test_the_loss_curve_continues_as_if_nothing_had_happened(
    name: str, first: int, run: GuideRun
) -> None:
    whole, continued = losses(run, "3d"), losses(run, name)
    assert list(continued) == list(range(first, 13)) and list(whole) == list(range(1, 13))
    assert whole[12] < whole[7] < whole[1] - 1
    assert continued == pytest.approx(
        {iteration: whole[iteration] for iteration in continued}, rel=1e-5
    )


def test_the_guide_names_only_files_that_exist() -> None:
    named = re.findall(r"`((?:examples|tests|tools|docs)/[\w./]+)`", GUIDE.read_text())
    assert named and all((ROOT / name).is_file() for name in named), named

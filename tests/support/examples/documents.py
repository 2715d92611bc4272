# SPDX-License-Identifier: Apache-2.0
"""Documents whose commands are run, block by block, and compared with the output that they quote.

A block is fenced as `bash`, as `bash fails` where it must end with an error, or as `text`: the
output of the block before it. In quoted output `...` stands for anything, and a line of only `...`
for any number of lines.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.conftest import Shell

BLOCK = re.compile(r"^```(bash|bash fails|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END_OF_BLOCK = "-- exit code of the block: "
NUMBER = re.compile(r"-?\d+\.\d+(?:E[+-]\d+)?(?!\d|\.\.\.)")  # but not the beginning of one


@dataclass(frozen=True)
class CommandBlock:
    """One block of commands and what is quoted of its output."""

    commands: str
    fails: bool
    quoted: str


@dataclass(frozen=True)
class DocumentRun:
    """A document that was run: output and exit code of every block, and the folder of results."""

    directory: Path
    outputs: list[str]
    codes: list[int]


def command_blocks(document: Path) -> list[CommandBlock]:
    """Read the blocks of commands of a document, in order.

    Raises:
        ValueError: for quoted output that follows no commands.
    """
    text = document.read_text()
    found: list[CommandBlock] = []
    for kind, content in BLOCK.findall(text):
        if kind != "text":
            found.append(CommandBlock(content, kind == "bash fails", ""))
        elif not found or found[-1].quoted:
            raise ValueError(f"output without commands: {content}")
        else:
            found[-1] = CommandBlock(found[-1].commands, found[-1].fails, content)
    return found


def run_document(blocks: list[CommandBlock], shell: Shell, timeout: float) -> DocumentRun:
    """Run all blocks in one shell, as a reader does; one that must fail runs in a subshell."""
    program = ["set -euo pipefail"]
    for block in blocks:
        if block.fails:
            program.append(f"code=0\n(\n{block.commands}) || code=$?\necho '{END_OF_BLOCK}'$code")
        else:
            program.append(f"{block.commands}echo '{END_OF_BLOCK}'0")
    done = shell.run("bash", "-c", "\n".join(program), timeout=timeout)
    parts = re.split(rf"^{END_OF_BLOCK}(\d+)$", done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0 and len(parts) == 2 * len(blocks) + 1, parts[-1]
    return DocumentRun(shell.directory, parts[0::2], list(map(int, parts[1::2])))


def is_quoted(quoted: str, line: str, tolerance: float) -> bool:
    """Compare a line of output with the quoted one; several blanks count as one.

    Numbers with a decimal point agree within the relative ``tolerance``: another processor adds up
    in another order.
    """
    expected = [float(number) for number in NUMBER.findall(quoted)]
    template = NUMBER.sub("\0", " ".join(quoted.split()))
    pattern = ".*".join(map(re.escape, template.split("...")))
    found = re.fullmatch(pattern.replace("\0", f"({NUMBER.pattern})"), " ".join(line.split()))
    if found is None:
        return False
    return list(map(float, found.groups())) == pytest.approx(expected, rel=tolerance)


def check_block(block: CommandBlock, output: str, code: int, tolerance: float = 0) -> None:
    """Assert that a block ended as it says and printed the quoted lines in their order."""
    assert (code != 0) == block.fails, output
    lines = iter(output.splitlines())
    for quoted in block.quoted.splitlines():
        if quoted != "...":
            found = any(is_quoted(quoted, line, tolerance) for line in lines)
            assert found, f"{quoted!r} is not, or not in this place, in\n{output}"

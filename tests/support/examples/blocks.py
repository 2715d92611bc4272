# SPDX-License-Identifier: Apache-2.0
"""Fenced blocks of the pages, and the commands in their text."""

import re
from dataclasses import dataclass
from functools import cache

from tests.support.warm_programs import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
INLINE = re.compile(
    r"`((?:[A-Z_]+=\S+ )*(?:python|torchrun|make|pip|checkpoint-inspector)\s[^`]+)`"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path in the repository.
        language: the word behind the fence, with what `bash` blocks say about their end.
        title: the title of a block that has one, else "".
        code: its lines.
    """

    page: str
    language: str
    title: str
    code: str

    @property
    def name(self) -> str:
        """The page and the first line, by which tests name a block."""
        return f"{self.page}: {self.code.splitlines()[0]}"


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """Return all blocks of a page of the repository, in order."""
    found = []
    for _, words, code in FENCE.findall((ROOT / page).read_text()):
        language, _, title = words.partition(' title="')
        found.append(Block(page, language.strip(), title.removesuffix('"'), code))
    return tuple(found)


def python_of(page: str) -> list[Block]:
    """Return the Python blocks of a page that are no side of a comparison."""
    return [block for block in blocks_of(page) if block.language == "python" and not block.title]


def inline_commands(page: str) -> list[str]:
    """Return the commands that stand in the text of a page, on one line each."""
    text = FENCE.sub("", (ROOT / page).read_text())
    return [" ".join(command.split()) for command in INLINE.findall(text)]

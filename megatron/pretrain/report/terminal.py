# SPDX-License-Identifier: Apache-2.0
"""Messages on a terminal: rows of at most 100 columns; files and pipes get whole lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

from megatron.pretrain.report.quantities import WIDTH

_errors: TextIO | None = None


def errors() -> TextIO:
    """Return the stream for errors of the run, which the terminal gets from every rank."""
    return _errors or sys.stderr


def set_errors(stream: TextIO | None) -> None:
    """Let errors of the run go to another stream; None for ``sys.stderr``."""
    global _errors
    _errors = stream


def complain(text: str) -> None:
    """Print an error of the run."""
    stream = errors()
    print(fitted(text, stream), file=stream, flush=True)


def fitted(text: str, stream: TextIO) -> str:
    """Break lines between words where a terminal would break them anywhere.

    Args:
        text: one or more lines.
        stream: that they are written to. Unless it is a terminal, the text stays as it is, so that
            a search finds whole messages.
    """
    if not stream.isatty():
        return text
    width = min(WIDTH, shutil.get_terminal_size().columns)
    return "\n".join(_broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )

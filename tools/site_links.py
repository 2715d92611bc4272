# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: the site has the files of the repository that its pages link to, and all flags.

Pages are read in the repository too, where their links lead to files outside of docs/. The site has
these files below `repository/`: Markdown as pages, everything else as it is.
"""

import os.path
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COPIES = "repository"
"""Folder of the site with files from outside docs/."""

FLAGS = "<!-- output of pretrain_gpt.py --help-all -->"
"""Where a page has the flags of the Megatron-Core that is installed where the site is built."""

LINK = re.compile(r"(\]\(\s*)([^)\s#:]+)((?:#[^)\s]*)?\))")
"""A link to a file: what is before its path, the path, and what is behind it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file of the repository that a page leads to, over any number of links."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(waiting)
    while waiting:
        for target in linked_files(waiting.pop()):
            if target in seen:
                continue
            seen.add(target)
            if not target.is_relative_to(DOCS):
                files.append(copied_file(target, config))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to their place in the site."""
    source = Path(page.file.abs_src_path or "")
    if FLAGS in markdown:
        markdown = markdown.replace(FLAGS, f"```text\n{all_flags()}```")

    def in_site(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / link[2]))
        if not target.is_file():
            return link[0]  # MkDocs reports it
        path = os.path.relpath(place_of(target), Path(page.file.src_uri).parent)
        return f"{link[1]}{path}{link[3]}"

    return LINK.sub(in_site, markdown)


def all_flags() -> str:
    """Return what --help-all prints."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--help-all"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def linked_files(page: Path) -> list[Path]:
    """Return the existing files to which the relative links of a Markdown file lead."""
    found = (
        Path(os.path.normpath(page.parent / link[2])) for link in LINK.finditer(page.read_text())
    )
    return [path for path in found if path.is_file()]


def place_of(path: Path) -> Path:
    """Return the path in the site's sources of a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    return COPIES / path.relative_to(ROOT)


def copied_file(path: Path, config: MkDocsConfig) -> File:
    """Return a file of the repository as a file of the site."""
    return File.generated(config, place_of(path).as_posix(), abs_src_path=str(path))

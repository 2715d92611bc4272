# SPDX-License-Identifier: Apache-2.0
"""Releases of Megatron-Core that the project was run on, and the one that Python finds.

Nothing here imports Megatron-Core: releases are read from the files that an import would take.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTED = ("0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Releases that the tests were run on, the oldest first."""

GRACE_SECONDS = 5
"""Time that the first rank has to report an error before the others end."""

logger = logging.getLogger(__name__)
_say_once = functools.cache(logger.warning)


class ReleaseError(ImportError):
    """Megatron-Core is absent, too old, or of another release than the loop."""


@dataclass(frozen=True)
class Release:
    """Megatron-Core in one folder."""

    file: Path
    """Its ``megatron/core/package_info.py``."""
    numbers: tuple[int, int, int]
    """Major, minor, patch."""

    def __str__(self) -> str:
        return ".".join(map(str, self.numbers))


def check() -> Release:
    """Return the release that ``import megatron.core`` finds, after a check that it can be used.

    A release newer than those tested is logged, in one line on the first rank.

    Raises:
        ReleaseError: one line that names the files.
    """
    found = next(releases_on_path(), None)
    if found is None:
        raise ReleaseError(
            "Megatron-Core is not installed: pip install"
            f" 'megatron-core>={TESTED[0]}', or put a checkout of Megatron-LM on PYTHONPATH"
        )
    problem = _too_old(found) or _other_loop(found)
    if problem is not None:
        raise ReleaseError(problem)
    newest = tuple(int(number) for number in TESTED[-1].split("."))
    if found.numbers[:2] > newest[:2] and os.environ.get("RANK", "0") == "0":
        _say_once(
            f"Megatron-Core {found} ({found.file}) is newer than {TESTED[-1]}, the newest"
            " release that this version was tested on"
        )
    return found


def check_or_exit() -> None:
    """Check the release, and end the program with one line on the first rank if it fails."""
    try:
        check()
    except ReleaseError as error:
        end_program(f"error: {error}", 1)


def end_program(message: str, status: int) -> None:
    """Print one line on the first rank, and exit there; other ranks are ended by torchrun then."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_SECONDS)
    raise SystemExit(status)


def releases_on_path() -> Iterator[Release]:
    """Yield what ``import megatron.core`` takes, then what the folders of ``sys.path`` have."""
    namespace = importlib.import_module("megatron")
    folders = [Path(folder) / "core" for folder in namespace.__path__]
    seen = set()
    for core in (*_found_by_import("megatron.core"), *folders):
        release = read_release(core)
        if release is not None and release.file.resolve() not in seen:
            seen.add(release.file.resolve())
            yield release


def has_loop() -> bool:
    """Return True if Megatron-LM's loop is loaded, can be imported, or is above the program.

    Programs in ``examples`` and ``tools`` of a checkout add its folder when they run.
    """
    if "megatron.training" in sys.modules or any(_found_by_import("megatron.training")):
        return True
    return _checkout_above(Path(sys.argv[0])) is not None


def use_checkout_of(program: Path) -> None:
    """Let imports find the folder of a program first, then the checkout that it is in, if any.

    Programs in ``examples`` and ``tools`` of a checkout append its folder when they run. Its loop
    would then meet the release of Megatron-Core that is installed.
    """
    sys.path.insert(0, str(program.resolve().parent))
    checkout = _checkout_above(program)
    if checkout is not None and not any(_found_by_import("megatron.training")):
        sys.path.insert(1, str(checkout))


def _checkout_above(program: Path) -> Path | None:
    """Return the folder above a program that has Megatron-LM's loop, or None."""
    for folder in program.resolve().parents:
        if (folder / "megatron" / "training" / "__init__.py").is_file():
            return folder
    return None


def _found_by_import(package: str) -> Iterator[Path]:
    """Yield the folder of a package in ``megatron``; editable installs have a hook that finds it.

    ``importlib.util.find_spec`` would return what has been imported, from wherever that was.
    """
    path = importlib.import_module("megatron").__path__
    for finder in sys.meta_path:
        spec = finder.find_spec(package, list(path))
        if spec is not None:
            if spec.origin is not None:
                yield Path(spec.origin).parent
            return


def read_release(core: Path) -> Release | None:
    """Return the release in a folder ``megatron/core``, or None if there is none."""
    file = core / "package_info.py"
    if not file.is_file():
        return None
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", file.read_text(), re.MULTILINE))
    if len(found) < 3:
        return None
    return Release(file, (int(found["MAJOR"]), int(found["MINOR"]), int(found["PATCH"])))


def _too_old(release: Release) -> str | None:
    oldest = tuple(int(number) for number in TESTED[0].split("."))
    if release.numbers >= oldest:
        return None
    return (
        f"Megatron-Core {release} ({release.file}) is older than {TESTED[0]}, the oldest release"
        f" that works: pip install 'megatron-core>={TESTED[0]}'"
    )


def _other_loop(core: Release) -> str | None:
    """Find Megatron-LM's loop of another release than that of ``megatron.core``."""
    namespace = importlib.import_module("megatron")
    for folder in namespace.__path__:
        loop = Path(folder) / "training" / "__init__.py"
        if not loop.is_file():
            continue
        beside = read_release(Path(folder) / "core")
        if beside is None or beside.numbers == core.numbers:
            return None
        return (
            f"megatron.core is release {core} ({core.file}) but megatron.training is of release"
            f" {beside} ({loop}): put the checkout before what is installed on PYTHONPATH, or"
            f" install megatron-core {beside}"
        )
    return None

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
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TESTED = ("0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Releases that the tests were run on, the oldest first."""

FIRST_WITH_LOOP = "0.17.1"
"""The first tested release whose wheel has Megatron-LM's training loop."""

GRACE_SECONDS = 5
"""Time that the first rank has to report an error before the others end."""

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)


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
        major, minor, patch = self.numbers
        return f"{major}.{minor}.{patch}"


def check() -> Release:
    """Return the release that ``import megatron.core`` finds, after a check that it can be used.

    A release newer than those tested is logged, in one line on the first rank.

    Raises:
        ReleaseError: one line that names the files.
    """
    core = _found_by_import("megatron.core")
    found = None
    if core is not None:
        found = read_release(core)
    if found is None:
        raise ReleaseError(
            "Megatron-Core is not installed: pip install"
            f" 'megatron-core>={TESTED[0]}', or put a checkout of Megatron-LM on PYTHONPATH"
        )
    if found.numbers < _numbers(TESTED[0]):
        raise ReleaseError(
            f"Megatron-Core {found} ({found.file}) is older than {TESTED[0]}, the oldest release"
            f" that works: pip install 'megatron-core>={TESTED[0]}'"
        )
    _check_loop(found)
    newest_tested = _numbers(TESTED[-1])
    is_newer = found.numbers[:2] > newest_tested[:2]
    if is_newer and os.environ.get("RANK", "0") == "0":
        _warn_once(
            f"Megatron-Core {found} ({found.file}) is newer than {TESTED[-1]}, the newest"
            " release that this version was tested on"
        )
    return found


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split("."))


def check_or_exit() -> None:
    """Check the release, and end the program with one line on the first rank if it fails."""
    try:
        check()
    except ReleaseError as error:
        end_program(f"error: {error}", 1)


def end_program(message: str, status: int) -> NoReturn:
    """Print one line on the first rank, and exit there; other ranks are ended by torchrun then."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_SECONDS)
    raise SystemExit(status)


def has_loop() -> bool:
    """Return True if Megatron-LM's loop is loaded, can be imported, or is above the program.

    Programs in ``examples`` and ``tools`` of a checkout add its folder when they run.
    """
    if "megatron.training" in sys.modules or _found_by_import("megatron.training"):
        return True
    return _checkout_above(Path(sys.argv[0])) is not None


def use_checkout_of(program: Path) -> None:
    """Let imports find the folder of a program first, then the checkout that it is in, if any.

    Programs in ``examples`` and ``tools`` of a checkout append its folder when they run. Its loop
    would then meet the release of Megatron-Core that is installed.
    """
    sys.path.insert(0, str(program.resolve().parent))
    find_loop_of(program)


def find_loop_of(program: Path) -> None:
    """Let imports find the loop of the checkout that a program is in, if they find none."""
    checkout = _checkout_above(program)
    if checkout is not None and _found_by_import("megatron.training") is None:
        sys.path.insert(1, str(checkout))


def _checkout_above(program: Path) -> Path | None:
    """Return the folder above a program that has Megatron-LM's loop, or None."""
    for folder in program.resolve().parents:
        if (folder / "megatron" / "training" / "__init__.py").is_file():
            return folder
    return None


def _found_by_import(package: str) -> Path | None:
    """Return the folder of a package in ``megatron``; editable installs have a hook that finds it.

    ``importlib.util.find_spec`` would return what has been imported, from wherever that was.
    """
    path = list(importlib.import_module("megatron").__path__)
    for finder in sys.meta_path:
        spec = finder.find_spec(package, path)
        if spec is not None:
            if spec.origin is None:
                return None
            return Path(spec.origin).parent
    return None


def read_release(core: Path) -> Release | None:
    """Return the release in a folder ``megatron/core``, or None if it has no release."""
    file = core / "package_info.py"
    if not file.is_file():
        return None
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", file.read_text(), re.MULTILINE))
    if len(found) < 3:
        return None
    major = int(found["MAJOR"])
    minor = int(found["MINOR"])
    patch = int(found["PATCH"])
    return Release(file, (major, minor, patch))


def _check_loop(core: Release) -> None:
    """Refuse Megatron-LM's loop of another release than that of ``megatron.core``."""
    loop = _found_by_import("megatron.training")
    if loop is None:
        return
    release = read_release(loop.with_name("core"))
    if release is not None and release.numbers != core.numbers:
        file = loop / "__init__.py"
        raise ReleaseError(
            f"megatron.core is release {core} ({core.file}) but megatron.training is of release"
            f" {release} ({file}): put the checkout before what is installed on PYTHONPATH, or"
            f" install megatron-core {release}"
        )

# SPDX-License-Identifier: Apache-2.0
"""Other releases of Megatron-Core than the installed one, with Megatron-LM's loop, for tests.

    python -m tests.support.megatron_release 0.19.2    unpack it, and print the environment for it
    eval "$(.venv/bin/python -m tests.support.megatron_release 0.19.2)"     use it in this shell

pip downloads the wheel once, from the index that it is configured for, and it is unpacked into
`build/megatron_core`. Wheels from 0.17 on are for Python 3.12 and newer, and hold
`megatron/training`. Earlier versions of Python run them too: only functions for data sets are
compiled, and those of the installed release are the same.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import wheels

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / "build" / "megatron_core"
PACKAGES = Path(sys.prefix) / "for_releases"
"""Installed by the Makefile, and only for these runs: torch must not see triton in others."""
NEEDED = ("triton", "pybind11", "six")
FOR_PYTHON_3_12 = "--python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64"
"""Words of pip; the same wheel serves every machine, as what is compiled in it is not needed."""
HELPERS = Path(
    "megatron", "core", "datasets", f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
)

RELEASES = ("0.17.1", "0.18.2", "0.19.2")


@functools.cache  # a failed download takes a while
def obstacle(release: str) -> str | None:
    """Return the reason for which a release cannot run here, or None."""
    missing = [
        name for name in NEEDED if not any(PACKAGES.glob(f"{name}*")) and not find_spec(name)
    ]
    if missing:
        return (
            f"Megatron-Core {release} imports {', '.join(NEEDED)}: install them with pip install"
            f" --no-deps --target {PACKAGES} {' '.join(NEEDED)}"
        )
    try:
        unpack(release)
    except wheels.DownloadError as error:
        return str(error)
    return None


def require(release: str) -> None:
    """Skip the test, with the reason, where the release cannot run."""
    reason = obstacle(release)
    if reason is not None:
        pytest.skip(reason)


def unpack(release: str) -> Path:
    """Download and unpack a release unless it is there already, and return its folder.

    Raises:
        wheels.DownloadError: pip cannot download it.
    """
    folder = wheels.unpack("megatron-core", release, UNPACKED, FOR_PYTHON_3_12)
    installed = Path(sysconfig.get_path("platlib"), HELPERS)
    if installed.exists() and not (folder / HELPERS).exists():
        shutil.copy(installed, folder / HELPERS)
    return folder


def environment(release: str) -> dict[str, str]:
    """Return the variables of a process that imports a release instead of the installed one."""
    folders = [ROOT, unpack(release), PACKAGES]
    return {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders),
        "NO_VCS_VERSION": "1",  # its version would end in the commit of this repository
    }


def main(releases: list[str]) -> int:
    """Print the environment of the one release that is named."""
    if len(releases) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    reason = obstacle(releases[0])
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    for name, value in environment(releases[0]).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Other releases of Megatron-Core than the installed one, with Megatron-LM's program, for tests.

    python -m tests.support.megatron_release 0.19.0    unpack it, and print the environment for it
    eval "$(.venv/bin/python -m tests.support.megatron_release 0.19.0)"     use it in this shell

The archive of a release is that of the public tag core_vX of Megatron-LM, as GitHub packs it
(`curl -LO https://github.com/NVIDIA/Megatron-LM/archive/refs/tags/core_v0.19.0.tar.gz`). It lies in
`build/megatron_releases`, or where MEGATRON_RELEASES says; `.tar.xz` will do as well. It is
unpacked into `build/megatron_core`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ARCHIVES = Path(os.environ.get("MEGATRON_RELEASES", ROOT / "build" / "megatron_releases"))
ORIGIN = "https://github.com/NVIDIA/Megatron-LM/archive/refs/tags"
UNPACKED = ROOT / "build" / "megatron_core"
PACKAGES = Path(sys.prefix) / "for_releases"
"""Installed by the Makefile, and only for these runs: torch must not see triton in others."""
NEEDED = ("triton", "pybind11", "six")

RELEASES = ("0.17.1", "0.18.2", "0.19.0")


def obstacle(release: str) -> str | None:
    """Return the reason for which a release cannot run here, or None."""
    if archive_of(release) is None:
        return (
            f"no Megatron-Core {release}: put {ORIGIN}/core_v{release}.tar.gz into {ARCHIVES}"
            " (MEGATRON_RELEASES names another folder)"
        )
    missing = [
        name for name in NEEDED if not any(PACKAGES.glob(f"{name}*")) and not find_spec(name)
    ]
    if missing:
        return (
            f"Megatron-Core {release} imports {', '.join(NEEDED)}: install them with pip install"
            f" --no-deps --target {PACKAGES} {' '.join(NEEDED)}"
        )
    return None


def require(release: str) -> None:
    """Skip the test, with the reason, where the release cannot run."""
    reason = obstacle(release)
    if reason is not None:
        pytest.skip(reason)


def archive_of(release: str) -> Path | None:
    """Return the archive of a release, or None where there is none."""
    return next(iter(sorted(ARCHIVES.glob(f"core_v{release}.tar.*"))), None)


def unpack(release: str) -> Path:
    """Unpack a release unless it is there already, and return its folder."""
    target = UNPACKED / release
    if not target.is_dir():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        # Under a name of its own first: two test processes may need it at once.
        with tempfile.TemporaryDirectory(dir=UNPACKED) as folder:
            with tarfile.open(archive_of(release)) as archive:
                extract(archive, folder)
            inner = next(Path(folder).rglob("megatron")).parent
            try:
                inner.rename(target)
            except OSError:
                shutil.rmtree(inner)  # the other process was faster
    return target


def extract(archive: tarfile.TarFile, folder: str) -> None:
    """Unpack an archive of the project; early releases of Python 3.11 know no filters."""
    filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(folder, **filters)


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

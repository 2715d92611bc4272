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

import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / "build" / "megatron_core"
PACKAGES = Path(sys.prefix) / "for_releases"
"""Installed by the Makefile, and only for these runs: torch must not see triton in others."""
NEEDED = ("triton", "pybind11", "six")
DOWNLOAD = (
    "download --quiet --disable-pip-version-check --retries 1 --timeout 30 --no-deps"
    " --only-binary=:all: --python-version 3.12 --implementation cp"
    " --platform manylinux_2_28_x86_64"
)
"""Words of pip; the same wheel serves every machine, as what is compiled in it is not needed."""
HELPERS = Path(
    "megatron", "core", "datasets", f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
)

RELEASES = ("0.17.1", "0.18.2", "0.19.2")


class DownloadError(RuntimeError):
    """pip cannot download a release."""


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
    except DownloadError as error:
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
        DownloadError: pip cannot download it.
    """
    target = UNPACKED / release
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with open(UNPACKED / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes may need it at once
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=UNPACKED) as folder:
                with zipfile.ZipFile(download(release, folder)) as wheel:
                    wheel.extractall(Path(folder, "wheel"))
                Path(folder, "wheel").rename(target)
        installed = Path(sysconfig.get_path("platlib"), HELPERS)
        if installed.exists() and not (target / HELPERS).exists():
            shutil.copy(installed, target / HELPERS)
    return target


def download(release: str, folder: str) -> Path:
    """Download the wheel of a release into a folder and return its path."""
    words = [*DOWNLOAD.split(), "--dest", folder, f"megatron-core=={release}"]
    run = subprocess.run([sys.executable, "-m", "pip", *words], text=True, capture_output=True)
    wheels = [*Path(folder).glob("*.whl")]
    if run.returncode or not wheels:
        reason = (run.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DownloadError(f"pip finds no Megatron-Core {release}: {reason}")
    return wheels[0]


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

# SPDX-License-Identifier: Apache-2.0
"""Wheels that are imported without being installed: pip downloads each once."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DOWNLOAD = (
    "download --quiet --disable-pip-version-check --retries 1 --timeout 30 --no-deps"
    " --only-binary=:all:"
)
"""Words of pip, which asks the index that it is configured for."""


class DownloadError(RuntimeError):
    """pip cannot download a wheel."""


def unpack(package: str, release: str, folder: Path, options: str = "") -> Path:
    """Download a wheel, and unpack it below ``folder``, unless it is there; return its folder.

    Args:
        package: name of the package on the index.
        release: its version, which the folder is called by.
        folder: gets a folder for each release.
        options: further words of pip.

    Raises:
        DownloadError: pip cannot download it.
    """
    target = folder / release
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes may need it at once
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                with zipfile.ZipFile(download(f"{package}=={release}", place, options)) as wheel:
                    wheel.extractall(Path(place, "wheel"))
                Path(place, "wheel").rename(target)
    return target


def download(requirement: str, folder: str, options: str) -> Path:
    """Download a wheel into a folder and return its path."""
    words = [*f"{DOWNLOAD} {options}".split(), "--dest", folder, requirement]
    run = subprocess.run([sys.executable, "-m", "pip", *words], text=True, capture_output=True)
    wheels = [*Path(folder).glob("*.whl")]
    if run.returncode or not wheels:
        reason = (run.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DownloadError(f"pip finds no {requirement}: {reason}")
    return wheels[0]

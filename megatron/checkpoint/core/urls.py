# SPDX-License-Identifier: Apache-2.0
"""URLs in the place of directories."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit


def local_path(location: str) -> str:
    """Return a path unchanged, and the path of a URL ``file://``.

    Raises:
        ValueError: for any other URL, of which a path would make a directory named ``s3:``.
    """
    if "://" not in location:
        return location
    parts = urlsplit(location)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return unquote(parts.path)
    raise ValueError(
        f"{location}: checkpoints are in directories (a path, or file:///path); mount the store, or"
        " copy the checkpoint"
    )

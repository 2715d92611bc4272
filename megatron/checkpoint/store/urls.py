# SPDX-License-Identifier: Apache-2.0
"""URLs in the place of directories."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from megatron.checkpoint.store import directory
from megatron.checkpoint.store.stores import Store
from megatron.checkpoint.store.url_staging import staged_directory


def local_path(location: str) -> str:
    """Return the local path of a location.

    That is a path unchanged, the path of a URL ``file://``, and for any other URL the directory in
    which its checkpoints are staged, with the names that are at the URL now.

    Raises:
        ValueError: if there is no file system for the URL, or it cannot be reached.
    """
    if "://" not in location:
        return location
    parts = urlsplit(location)
    if parts.scheme == "file":
        if parts.netloc in ("", "localhost") and parts.path.startswith("/"):
            return unquote(parts.path)
        raise ValueError(f"{location}: a directory of this machine is file:///path")
    url = location.rstrip("/")
    above, _, name = url.rpartition("/")
    is_iteration = directory.is_checkpoint_name(name) and not above.endswith("/")
    store = Store(above if is_iteration else url, staged_directory(above if is_iteration else url))
    store.refresh()
    if not is_iteration:
        return str(store.staged)
    store.fetch_telling(name)
    return str(store.staged / name)

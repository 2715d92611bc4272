# SPDX-License-Identifier: Apache-2.0
"""Views of a buffer whose storage is freed, which torch makes of allocated storage only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def allocated(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return ``view``, ``uint8``, with memory inside of the context, if its storage is freed."""
    storage = view.untyped_storage()
    size = storage.nbytes()
    if not size:
        storage.resize_(int(view.storage_offset()) + view.numel())
    yield view.data
    storage.resize_(size)

# SPDX-License-Identifier: Apache-2.0
"""This process among the ranks of a run, before there is a process group, and its messages."""

from __future__ import annotations

import os
import sys

from megatron.checkpoint.store import durable
from megatron.checkpoint.store.url_staging import with_urls


def environment_rank() -> int:
    """Return this process' rank, which is known before there is a process group."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """Return the number of ranks, which is known before there is a process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def log(message: str) -> None:
    """Print on the first rank."""
    if environment_rank() == 0:
        with durable.standard_output():
            print(with_urls(message), flush=True)


def complain(message: str) -> None:
    """Print an error of the run, on any rank."""
    print(with_urls(message), file=sys.stderr, flush=True)

# SPDX-License-Identifier: Apache-2.0
"""Syntax trees of sources, parsed once in each process."""

import ast
import functools
import gc


@functools.cache
def parse(source: str) -> ast.Module:
    """Parse a source without garbage collection, which would walk all trees before it each time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()

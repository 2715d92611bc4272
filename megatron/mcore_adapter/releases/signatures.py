# SPDX-License-Identifier: Apache-2.0
"""Parameters that a function of the installed release has."""

import inspect
from collections.abc import Callable
from typing import Any


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return True if the function takes an argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )

# SPDX-License-Identifier: Apache-2.0
"""Names of the published package that this one does not offer, with what does their work here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn


def attributes_of(module: str, alternatives: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a function for the ``__getattr__`` of a module.

    It raises ``ImportError`` with the alternative for the names of the published package, and
    ``AttributeError`` for any other name.

    Args:
        module: name of the module.
        alternatives: by name that is not offered.
    """

    def get(name: str) -> NoReturn:
        if name in alternatives:
            raise ImportError(f"{module} does not offer {name}: {alternatives[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get

# SPDX-License-Identifier: Apache-2.0
"""References from tensors to the process that they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Target = TypeVar("Target")


@dataclass(frozen=True, eq=False)
class ProcessLink(Generic[Target]):
    """A reference from a tensor to a part of the model; copies and pickles have None instead.

    Stagers of checkpoints copy the attributes of a tensor with it, and parts of the model lead to
    process groups, which cannot be copied.
    """

    target: Target

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

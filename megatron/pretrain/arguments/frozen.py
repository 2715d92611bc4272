# SPDX-License-Identifier: Apache-2.0
"""The arguments of a run as its parts see them: complete, checked and read-only."""

import argparse
from typing import Any, NoReturn


class FrozenArguments(argparse.Namespace):
    """A copy of ``args`` that cannot be changed, with ``values`` put in.

    What changes during a run is in :class:`megatron.pretrain.run_state.Progress`.

    Raises:
        AttributeError: on every attempt to set or delete an attribute.
    """

    def __init__(self, args: argparse.Namespace, **values: Any) -> None:
        vars(self).update(vars(args) | values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"arguments are read-only during a run: cannot set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"arguments are read-only during a run: cannot delete {name}")

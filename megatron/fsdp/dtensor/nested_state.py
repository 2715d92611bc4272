# SPDX-License-Identifier: Apache-2.0
"""Paths of the items in nested state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


def filter_unflattened_state_dict(
    state_dict: Any,
    key_chain: list[Any] = [],  # noqa: B006  # the published default; it is not changed here
    visit_condition: Callable[[Any], bool] = lambda x: False,
) -> list[list[Any]]:
    """List the paths of items in nested mappings, lists and tuples.

    Args:
        state_dict: the nested state.
        key_chain: the path of ``state_dict`` itself, with which all paths begin.
        visit_condition: returns True for the items to list. It is not called with mappings, lists
            and tuples, whose items are visited.

    Returns:
        The path of each item: a list of keys and positions.
    """
    items: Iterable[tuple[Any, Any]]
    if isinstance(state_dict, Mapping):
        items = state_dict.items()
    elif isinstance(state_dict, list | tuple):
        items = enumerate(state_dict)
    else:
        return [[*key_chain]] if visit_condition(state_dict) else []
    paths: list[list[Any]] = []
    for key, value in items:
        paths += filter_unflattened_state_dict(value, [*key_chain, key], visit_condition)
    return paths


def get_unflattened_state_dict(
    state_dict: Any,
    key_chain: list[Any] = [],  # noqa: B006  # the published default; it is not changed here
) -> Any:
    """Return the item at a path of keys and positions; ``state_dict`` itself at the empty path.

    Raises:
        KeyError: if a mapping does not have the key.
        IndexError: if a list or tuple does not have the position.
    """
    for key in key_chain:
        state_dict = state_dict[key]
    return state_dict

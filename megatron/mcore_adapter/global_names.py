# SPDX-License-Identifier: Apache-2.0
"""Names of parameters that are the same under every parallel layout.

Layers are numbered across pipeline stages, and experts across expert ranks.
"""

from __future__ import annotations

import re

from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn

# Grouped experts are one module, with one weight, or bias, for each expert.
_OF_GROUPED_EXPERT = re.compile(r"^(weight|bias)(\d+)$")
_WRAPPERS = re.compile(r"^(module\.)*")


class GlobalNames:
    """A translation between the keys of one model chunk's ``state_dict`` and global names.

    Megatron-Core numbers layers from 0 in every pipeline stage, and experts on every expert rank.
    If embedding and output layer are tied but in different stages, the last stage has a copy of the
    first one's weight, and both have the same global name. Leading ``module.`` prefixes, one for
    each wrapper, are not changed.
    """

    def __init__(self, model: nn.Module):
        model = _unwrapped(model)
        # Paths of modules, with a dot at the end, local -> global.
        self._global_path: dict[str, str] = {}
        # Global number of the first expert here, by the local path of a module of grouped experts.
        self._first_expert: dict[str, int] = {}
        self._visit(model, "", "")
        self._global_key: dict[str, str] = {}
        output_weight = getattr(getattr(model, "output_layer", None), "weight", None)
        if getattr(output_weight, "shared_embedding", False):  # a copy of the first stage's weight
            self._global_key["output_layer.weight"] = "embedding.word_embeddings.weight"
        self._local_path = _inverse(self._global_path)
        self._local_key = _inverse(self._global_key)

    def _visit(
        self,
        module: nn.Module,
        path: str,
        global_path: str,
        first_number: int | None = None,
    ) -> None:
        """Store the paths of a module and of all below it.

        Args:
            module: the model, or a module inside of it.
            path: its path with a dot at the end; "" for the model.
            global_path: the same with global numbers.
            first_number: if it is a list of experts, the global number of the first of them.
        """
        self._global_path[path] = global_path
        first_expert = _first_expert(module)
        for name, child in module.named_children():
            child_path = f"{path}{name}."
            layer_number = getattr(child, "layer_number", None)  # counted from 1
            if first_number is not None:
                name = str(first_number + int(name))
            elif name.isdigit() and isinstance(layer_number, int):
                name = str(layer_number - 1)
            if first_expert and _holds_grouped_weights(child):
                self._first_expert[child_path] = first_expert
            is_list = isinstance(module, SequentialMLP) and name == "local_experts"
            number = None
            if is_list:
                number = first_expert
            child_global_path = f"{global_path}{name}."
            self._visit(child, child_path, child_global_path, number)

    def to_global(self, key: str) -> str:
        """Return the global name of a local key."""
        return self._translate(
            key,
            keys=self._global_key,
            paths=self._global_path,
            to_global=True,
        )

    def to_local(self, key: str) -> str:
        """Return the key in this chunk of a global name; a name of another chunk is not changed."""
        return self._translate(
            key,
            keys=self._local_key,
            paths=self._local_path,
            to_global=False,
        )

    def _translate(
        self,
        key: str,
        keys: dict[str, str],
        paths: dict[str, str],
        to_global: bool,
    ) -> str:
        """Translate a key by the tables of whole keys and of paths.

        Example: on the second of two expert ranks with 4 experts each, ``weight1`` of grouped
        experts is ``weight5`` globally.
        """
        inner_key = _WRAPPERS.sub("", key)
        wrappers = key.removesuffix(inner_key)
        if inner_key in keys:
            return wrappers + keys[inner_key]
        path, dot, leaf = inner_key.rpartition(".")
        path += dot
        if path not in paths:
            return key
        translated = paths[path]
        if to_global:
            shift = self._first_expert.get(path, 0)
        else:
            shift = -self._first_expert.get(translated, 0)
        found = _OF_GROUPED_EXPERT.match(leaf)
        if shift and found is not None:
            number = int(found[2]) + shift
            leaf = f"{found[1]}{number}"
        return f"{wrappers}{translated}{leaf}"


def _inverse(table: dict[str, str]) -> dict[str, str]:
    return {value: key for key, value in table.items()}


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", None)
    while isinstance(inner, nn.Module):
        model = inner
        inner = getattr(model, "module", None)
    return model


def _first_expert(module: nn.Module) -> int:
    """Return the global number of the first expert on this rank for a module of experts, else 0."""
    group = getattr(module, "ep_group", None)
    num_experts = getattr(module, "num_local_experts", None)
    if group is None or num_experts is None:
        return 0
    return group.rank() * num_experts


def _holds_grouped_weights(module: nn.Module) -> bool:
    own_parameters = module.named_parameters(recurse=False)
    return any(_OF_GROUPED_EXPERT.match(name) for name, _ in own_parameters)

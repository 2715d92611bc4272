# SPDX-License-Identifier: Apache-2.0
"""Names that do not depend on the layout: layers are numbered across pipeline stages, experts across expert ranks."""

from __future__ import annotations

import re

from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn

# One weight, or bias, an expert, in one module for all of them.
_OF_GROUPED_EXPERT = re.compile(r"^(weight|bias)(\d+)$")


class GlobalNames:
    """Translates keys of one model chunk, as its ``state_dict`` has them, to names that are the same under every layout.

    Megatron-Core numbers layers from 0 in every pipeline stage, and experts on every expert rank;
    where embedding and output layer are tied but lie in different stages, the last one has a copy
    of the first one's weight. Leading ``module.``, one for each wrapper, stay as they are.
    """

    def __init__(self, model: nn.Module):
        self._global_path: dict[str, str] = {}
        self._first_expert: dict[
            str, int
        ] = {}  # by the path of a module that holds the weights of several experts
        self._visit(_unwrapped(model), "", "")
        output_weight = getattr(getattr(_unwrapped(model), "output_layer", None), "weight", None)
        is_copy = getattr(output_weight, "shared_embedding", False)  # of the first stage's weight
        self._global_key = (
            {"output_layer.weight": "embedding.word_embeddings.weight"} if is_copy else {}
        )
        self._local_path = {path: local for local, path in self._global_path.items()}
        self._local_key = {key: local for local, key in self._global_key.items()}

    def _visit(self, module: nn.Module, path: str, global_path: str) -> None:
        self._global_path[path] = global_path
        offset = _first_expert(module)
        for name, child in module.named_children():
            if isinstance(module, SequentialMLP) and name == "local_experts":
                for number, expert in child.named_children():
                    self._visit(
                        expert,
                        f"{path}{name}.{number}.",
                        f"{global_path}{name}.{offset + int(number)}.",
                    )
                continue
            if offset and _holds_grouped_weights(child):
                self._first_expert[f"{path}{name}."] = offset
            number = (
                str(child.layer_number - 1)
                if name.isdigit() and hasattr(child, "layer_number")
                else name
            )
            self._visit(child, f"{path}{name}.", f"{global_path}{number}.")

    def to_global(self, key: str) -> str:
        """The global name of a local key."""
        return self._translate(key, self._global_key, self._global_path, +1)

    def to_local(self, key: str) -> str:
        """The key in this chunk of a global name; a name of another chunk stays as it is."""
        return self._translate(key, self._local_key, self._local_path, -1)

    def _translate(self, key: str, keys: dict[str, str], paths: dict[str, str], sign: int) -> str:
        wrappers = _WRAPPERS.match(key).group()
        own = key.removeprefix(wrappers)
        if own in keys:
            return wrappers + keys[own]
        path, leaf = _split(own)
        known = paths.get(path)
        if known is None:
            return key
        offset = self._first_expert.get(path if sign > 0 else known, 0)
        found = _OF_GROUPED_EXPERT.match(leaf) if offset else None
        if found is not None:
            leaf = f"{found[1]}{int(found[2]) + sign * offset}"
        return f"{wrappers}{known}{leaf}"


_WRAPPERS = re.compile(r"^(module\.)*")


def _split(key: str) -> tuple[str, str]:
    """Path of the module, with a dot at its end, and the rest."""
    path, dot, leaf = key.rpartition(".")
    return path + dot, leaf


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def _first_expert(module: nn.Module) -> int:
    """The global number of the first expert that this rank holds, for a module of experts; else 0."""
    group, number = getattr(module, "ep_group", None), getattr(module, "num_local_experts", None)
    return group.rank() * number if group is not None and number is not None else 0


def _holds_grouped_weights(module: nn.Module) -> bool:
    return any(_OF_GROUPED_EXPERT.match(name) for name, _ in module.named_parameters(recurse=False))

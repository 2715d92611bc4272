# SPDX-License-Identifier: Apache-2.0
"""Names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKind:
    """What the spelling of a layer's parameters depends on."""

    has_experts: bool
    is_latent: bool  # multi-latent attention


@dataclass(frozen=True)
class FusedNorm:
    """A norm whose weight and bias can be called ``<linear layer>.layer_norm_weight`` and ``_bias``.

    Attributes:
        in_transformer_engine: in which layers of Transformer Engine it is so, in the model as in files.
        in_files_of_local_layers: in which layers torch_dist files call it so although the model is of
            local layers.
    """

    norm: str
    linear: str
    in_transformer_engine: Callable[[LayerKind], bool]
    in_files_of_local_layers: Callable[[LayerKind], bool]


FUSED_NORMS = (
    FusedNorm(
        "input_layernorm",
        "self_attention.linear_qkv",
        lambda kind: not kind.is_latent,
        lambda kind: not kind.is_latent,
    ),
    FusedNorm(
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        lambda kind: not kind.has_experts,
        lambda kind: not kind.is_latent,
    ),
    FusedNorm(
        "self_attention.q_layernorm",
        "self_attention.linear_q_up_proj",
        lambda kind: kind.is_latent,
        lambda kind: False,
    ),
    FusedNorm(
        "self_attention.kv_layernorm",
        "self_attention.linear_kv_up_proj",
        lambda kind: True,
        lambda kind: False,
    ),
    # Releases after 0.16 can join both down projections of latent attention, and then the norm
    # before them.
    FusedNorm(
        "input_layernorm",
        "self_attention.linear_qkv_down_proj",
        lambda kind: False,
        lambda kind: False,
    ),
)
HALVES = ("_w", "_v")
"""Endings of the gate and of what it multiplies.

A rank's fused tensor is no contiguous slice of the global one.
"""

INNER_LAYER = "transformer_layer."
OTHER_INNER_LAYER = "mtp_model_layer."
"""What the layer inside a multi-token prediction layer is called from Megatron-Core 0.17 on."""

_WRAPPERS = re.compile(r"^(module\.)*")
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(linear_fc[12]\.(?:weight|bias))$")
_LAYER = re.compile(r"^((?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?)(.+)$")
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_NUMBER = re.compile(r"^decoder\.layers\.(\d+)\.")
_FUSED = re.compile(r"\.layer_norm_(weight|bias)$")


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers around the model."""
    return name[_WRAPPERS.match(name).end() :]


def canonical_name(name: str) -> str:
    """The canonical name of a parameter that a module or a file calls ``name``, whichever layers the model is made of."""
    name = plain_name(name).replace(f".{OTHER_INNER_LAYER}", f".{INNER_LAYER}")
    name = _GROUPED.sub(r".mlp.experts.local_experts.\3.\1.\2", name)
    if _FUSED.search(name):
        for row in FUSED_NORMS:
            name = re.sub(
                rf"\.{re.escape(row.linear)}\.layer_norm_(weight|bias)$", rf".{row.norm}.\1", name
            )
    return name


@dataclass(frozen=True)
class Spelling:
    """How one model's modules and files call parameters.

    Attributes:
        transformer_engine: the layers are Transformer Engine's.
        grouped_experts: all experts of a layer are one module.
        stacked: torch_dist files stack the decoder's layers, which are all alike.
        layers: kind of each layer, by its path with a dot at the end.
        inner_layer: name of the layer inside a multi-token prediction layer.
    """

    transformer_engine: bool
    grouped_experts: bool
    stacked: bool
    layers: dict[str, LayerKind]
    inner_layer: str = INNER_LAYER

    def module_name(self, name: str) -> str:
        """What the model calls the parameter with this canonical name."""
        name = self._with_fused_norm(
            name, lambda row, kind: self.transformer_engine and row.in_transformer_engine(kind)
        )
        if self.grouped_experts:
            name = _EXPERT.sub(lambda found: f".mlp.experts.{found[2]}{found[1]}", name)
        return name.replace(f".{INNER_LAYER}", f".{self.inner_layer}")

    def stacked_key(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The key of a torch_dist file that holds the parameter, and its place along the key's leading axes."""
        name = self._with_fused_norm(
            name,
            lambda row, kind: (
                row.in_transformer_engine
                if self.transformer_engine
                else row.in_files_of_local_layers
            )(kind),
        )
        index: tuple[int, ...] = ()
        expert = _EXPERT.search(name)
        if expert is not None:
            index = (int(expert[1]),)
            name = f"{name[: expert.start()]}.mlp.experts.experts.{expert[2]}"
        number = _NUMBER.match(name) if self.stacked else None
        if number is not None:
            index = (int(number[1]), *index)
            name = f"decoder.layers.{name[number.end() :]}"
        return name.replace(f".{INNER_LAYER}", f".{self.inner_layer}"), index

    def _with_fused_norm(self, name: str, is_fused: Callable[[FusedNorm, LayerKind], bool]) -> str:
        layer = _LAYER.match(name)
        if layer is None:
            return name
        module, _, leaf = layer[2].rpartition(".")
        for row in FUSED_NORMS:
            if module == row.norm and is_fused(row, self.layers[layer[1]]):
                return f"{layer[1]}{row.linear}.layer_norm_{leaf}"
        return name


def layer_kinds(names: Iterable[str]) -> dict[str, LayerKind]:
    """The kind of every layer of a model whose parameters have these canonical names."""
    parts: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None:
            parts.setdefault(layer[1], []).append(layer[2])
    return {
        path: LayerKind(
            has_experts=any(part.startswith(("mlp.router.", "mlp.experts.")) for part in tails),
            is_latent=any(part.startswith("self_attention.linear_kv_down_proj.") for part in tails),
        )
        for path, tails in parts.items()
    }


def unstacked(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The canonical names of the parameters that one key of a torch_dist file holds, with their place along its axes.

    Raises:
        ValueError: where the tensor has fewer axes than its key says.
    """
    layers = _STACKED_LAYERS.match(key)
    experts = _STACKED_EXPERTS.search(key)
    if len(shape) < (layers is not None) + (experts is not None):
        raise ValueError(f"{key} has the shape {shape}: an axis of layers or experts is missing")
    numbers: list[tuple[int, ...]] = [()]
    for axis in range((layers is not None) + (experts is not None)):
        numbers = [(*number, each) for number in numbers for each in range(shape[axis])]
    for index in numbers:
        name = key
        if experts is not None:
            name = f"{key[: experts.start()]}.mlp.experts.local_experts.{index[-1]}.{experts[1]}"
        if layers is not None:
            name = f"decoder.layers.{index[0]}.{name[layers.end() :]}"
        yield canonical_name(name), index

# SPDX-License-Identifier: Apache-2.0
"""Spellings of parameter names, and the way from each to the canonical name and back.

A parameter has one *canonical* name: that in a GPTModel of local layers on one rank, with layers
and experts counted over the whole model and gated weights whole, such as
``decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight``. Files and modules spell it in
other ways:

- Transformer Engine's layers keep some norms inside the linear layer that follows
  (``FUSED_NORMS``), and all experts of a layer in one module, ``mlp.experts.linear_fc1.weight3``;
- fsdp_dtensor files have the spelling of the model's modules, and the two halves of gated weights
  apart (``HALVES``);
- torch_dist files stack layers and experts:
  ``decoder.layers.mlp.experts.experts.linear_fc1.weight``, with two leading axes. They name norms
  nearly as Transformer Engine does (``FUSED_NORMS`` again).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from megatron.checkpoint.core.lazy_tensor import Shape
from megatron.checkpoint.core.training_state import TrainingState


@dataclass(frozen=True)
class LayerKind:
    """Properties of a layer that the spelling of its parameters depends on.

    Attributes:
        has_experts: its MLP is a mixture of experts.
        is_latent: it has multi-latent attention.
    """

    has_experts: bool
    is_latent: bool


@dataclass(frozen=True)
class FusedNorm:
    """A norm whose parameters can be called ``<linear>.layer_norm_weight`` and ``_bias``.

    Attributes:
        norm: path of the norm in the layer.
        linear: path of the linear layer that follows it.
        in_transformer_engine: returns True for the layers of Transformer Engine where this is so,
            in the model and in files.
        in_files_of_local_layers: returns True for the layers where torch_dist files call it so
            although the model is made of local layers.
    """

    norm: str
    linear: str
    in_transformer_engine: Callable[[LayerKind], bool] = lambda kind: False
    in_files_of_local_layers: Callable[[LayerKind], bool] = lambda kind: False


FUSED_NORMS = (
    FusedNorm(
        "input_layernorm",
        "self_attention.linear_qkv",
        in_transformer_engine=lambda kind: not kind.is_latent,
        in_files_of_local_layers=lambda kind: not kind.is_latent,
    ),
    FusedNorm(
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        in_transformer_engine=lambda kind: not kind.has_experts,
        in_files_of_local_layers=lambda kind: not kind.is_latent,
    ),
    FusedNorm(
        "self_attention.q_layernorm",
        "self_attention.linear_q_up_proj",
        in_transformer_engine=lambda kind: kind.is_latent,
    ),
    FusedNorm(
        "self_attention.kv_layernorm",
        "self_attention.linear_kv_up_proj",
        in_transformer_engine=lambda kind: True,
    ),
    # Releases after 0.16 can join both down projections of latent attention, and then the norm
    # before them.
    FusedNorm(
        "input_layernorm",
        "self_attention.linear_qkv_down_proj",
    ),
)
HALVES = ("_w", "_v")
"""Suffixes of the two halves of a gated weight: the gate, and the rows that it multiplies.

A rank's fused tensor is no contiguous slice of the global one.
"""

INNER_LAYER = "transformer_layer."
"""Name of the layer inside a multi-token prediction layer."""
OTHER_INNER_LAYER = "mtp_model_layer."
"""Name of the same from Megatron-Core 0.17 on."""

_WRAPPERS = re.compile(r"^(?:module\.)+")
_LEAF = "weight|bias|_extra_state"
_GROUPED = re.compile(rf"\.mlp\.experts\.(linear_fc[12])\.({_LEAF})(\d+)$")
_EXPERT = re.compile(rf"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:{_LEAF}))$")
_STACKED_EXPERTS = re.compile(rf"\.mlp\.experts\.experts\.(linear_fc[12]\.(?:{_LEAF}))$")
_LAYER = re.compile(r"^((?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?)(.+)$")
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_NUMBER = re.compile(r"^decoder\.layers\.(\d+)\.")
_FUSED = re.compile(r"\.layer_norm_(weight|bias)$")


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers around the model."""
    return _WRAPPERS.sub("", name)


def canonical_name(name: str) -> str:
    """Return the canonical name of a parameter that a module or a file calls ``name``."""
    name = plain_name(name).replace(f".{OTHER_INNER_LAYER}", f".{INNER_LAYER}")
    name = _GROUPED.sub(r".mlp.experts.local_experts.\3.\1.\2", name)
    if _FUSED.search(name):
        for fused in FUSED_NORMS:
            in_linear = rf"\.{re.escape(fused.linear)}\.layer_norm_(weight|bias)$"
            name = re.sub(in_linear, rf".{fused.norm}.\1", name)
    return name


def layer_number(name: str) -> int | None:
    """Return the number of the decoder layer that has a parameter; None for one outside."""
    found = _NUMBER.match(name)
    if found is None:
        return None
    return int(found[1])


def expert_number(name: str) -> int | None:
    """Return the number of the expert that has a parameter; None for one outside experts."""
    found = _EXPERT.search(name)
    if found is None:
        return None
    return int(found[1])


def is_in_expert(name: str) -> bool:
    """Return True if a parameter belongs to an expert of an expert-parallel layer."""
    return ".mlp.experts." in name


def is_grouped(module_name: str) -> bool:
    """Return True if a module's parameter name is that of grouped experts."""
    return _GROUPED.search(module_name) is not None


@dataclass(frozen=True)
class Spelling:
    """Names that one model's modules and files give to parameters.

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
        """Return the name that the model's modules give to the parameter of a canonical name."""
        if self.transformer_engine:
            name = self._with_fused_norm(name)
        if self.grouped_experts:
            name = _EXPERT.sub(lambda found: f".mlp.experts.{found[2]}{found[1]}", name)
        return name.replace(f".{INNER_LAYER}", f".{self.inner_layer}")

    def stacked_key(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the key of a torch_dist file that has a parameter, and its index in that tensor.

        The index is along the leading axes, of layers and experts: that of
        ``decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight`` is (7, 3).
        """
        name = self._with_fused_norm(name)
        index: tuple[int, ...] = ()
        expert = _EXPERT.search(name)
        if expert is not None:
            index = (int(expert[1]),)
            name = f"{name[: expert.start()]}.mlp.experts.experts.{expert[2]}"
        number = _NUMBER.match(name)
        if number is not None and self.stacked:
            index = (int(number[1]), *index)
            name = f"decoder.layers.{name[number.end() :]}"
        return name.replace(f".{INNER_LAYER}", f".{self.inner_layer}"), index

    def _with_fused_norm(self, name: str) -> str:
        """Return the name of a norm's parameter inside the linear layer, where it is fused."""
        layer = _LAYER.match(name)
        if layer is None:
            return name
        path, inside = layer[1], layer[2]
        module, _, leaf = inside.rpartition(".")
        for fused in FUSED_NORMS:
            is_fused = fused.in_files_of_local_layers
            if self.transformer_engine:
                is_fused = fused.in_transformer_engine
            if module == fused.norm and is_fused(self.layers[path]):
                return f"{path}{fused.linear}.layer_norm_{leaf}"
        return name


def layer_kinds(names: Iterable[str]) -> dict[str, LayerKind]:
    """Return the kind of every layer, by its path, of a model with these canonical names."""
    inside: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None:
            names_of_layer = inside.setdefault(layer[1], [])
            names_of_layer.append(layer[2])
    kinds = {}
    for path, parts in inside.items():
        kinds[path] = LayerKind(
            has_experts=any(part.startswith(("mlp.router.", "mlp.experts.")) for part in parts),
            is_latent=any(part.startswith("self_attention.linear_kv_down_proj.") for part in parts),
        )
    return kinds


def unstacked(key: str, shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield canonical name and index of every parameter that a key of a torch_dist file has.

    The index is along the leading axes. A key of stacked layers with the shape (2, 8, 4) has the
    layers 0 and 1 at (0,) and (1,), of the shape (8, 4).

    Raises:
        ValueError: if the tensor has fewer axes than its key implies.
    """
    has_layers = _STACKED_LAYERS.match(key) is not None
    has_experts = _STACKED_EXPERTS.search(key) is not None
    num_axes = int(has_layers) + int(has_experts)
    if len(shape) < num_axes:
        raise ValueError(f"{key} has the shape {shape}: an axis of layers or experts is missing")
    axes = [range(length) for length in shape[:num_axes]]
    for index in itertools.product(*axes):
        yield name_at(key, index), index


def name_at(key: str, index: tuple[int, ...]) -> str:
    """Return the canonical name of what a key of a torch_dist file has at an index.

    The key of an object may have an index although nothing is stacked.
    """
    layers = _STACKED_LAYERS.match(key)
    experts = _STACKED_EXPERTS.search(key)
    name = key
    if experts is not None:
        name = f"{key[: experts.start()]}.mlp.experts.local_experts.{index[-1]}.{experts[1]}"
    if layers is not None:
        name = f"decoder.layers.{index[0]}.{name[layers.end() :]}"
    return canonical_name(name)


# ---- the spelling of the model that will load a checkpoint

IMPLEMENTATIONS = ("local", "transformer_engine")


def choose_spelling(
    state: TrainingState,
    transformer_impl: str | None = None,
    rename_mtp: bool = True,
) -> Spelling:
    """Return the spelling of the parameter names in the model that will load ``state``.

    Args:
        state: the content of a checkpoint.
        transformer_impl: "local" or "transformer_engine", the layers of the model. Default: those
            of the run that wrote the checkpoint, by its names or its arguments.
        rename_mtp: the layer inside a multi-token prediction layer is named as in files. False: it
            is named as in modules of newer releases of Megatron-Core.

    Raises:
        ValueError: if neither the file nor ``transformer_impl`` determines the layers.
    """
    kinds = layer_kinds([*state.weights, *state.buffers])
    local = Spelling(transformer_engine=False, grouped_experts=False, stacked=True, layers=kinds)
    engine = _is_engine(state, local, transformer_impl)
    inner_layer = INNER_LAYER
    if not rename_mtp:
        inner_layer = OTHER_INNER_LAYER
    return replace(
        local,
        transformer_engine=engine,
        grouped_experts=_has_grouped_experts(state, engine),
        stacked=_is_stacked(state),
        inner_layer=inner_layer,
    )


def _is_engine(
    state: TrainingState,
    local: Spelling,
    chosen: str | None,
) -> bool:
    """Decide between layers of Transformer Engine and local ones, if none are ``chosen``.

    They differ in names wherever Transformer Engine has a norm inside a linear layer.
    """
    engine = replace(local, transformer_engine=True)

    def differs(name: str) -> bool:
        return local.module_name(name) != engine.module_name(name)

    in_file = [name for name in state.module_names if differs(name)]
    if in_file and chosen is None:
        return any(state.module_names[name] == engine.module_name(name) for name in in_file)
    implementation = chosen or getattr(state.args, "transformer_impl", None)
    if implementation in IMPLEMENTATIONS:
        return implementation == "transformer_engine"
    if not any(differs(name) for name in state.weights):
        return False
    raise ValueError(
        "which layers the model is made of is not in the checkpoint: add --transformer-impl local,"
        " or transformer_engine"
    )


def _has_grouped_experts(state: TrainingState, engine: bool) -> bool:
    """Decide whether the experts of a layer are one module, ``weight0``, ``weight1`` and so on.

    If the file names no experts, the arguments decide for layers of Transformer Engine.
    """
    in_file = []
    for name, path in state.module_names.items():
        if is_in_expert(name):
            in_file.append(path)
    if in_file:
        return not any(".local_experts." in path for path in in_file)
    return engine and bool(getattr(state.args, "moe_grouped_gemm", False))


def _is_stacked(state: TrainingState) -> bool:
    """Decide whether torch_dist files have all layers of the decoder in one tensor.

    They do if all layers are alike, unless an argument of the run excludes it.
    """
    frequency = getattr(state.args, "moe_layer_freq", 1)
    if not isinstance(frequency, int) or frequency > 1:
        return False
    if getattr(state.args, "heterogeneous_layers_config_path", None):
        return False
    layers: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in (state.weights | state.buffers).items():
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            tensors_of_layer = layers.setdefault(number, set())
            tensors_of_layer.add((rest, tensor.shape))
    kinds = {frozenset(tensors) for tensors in layers.values()}
    return len(kinds) <= 1

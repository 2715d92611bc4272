# SPDX-License-Identifier: Apache-2.0
"""Choice of the parameter names of the model that will load a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from megatron.checkpoint.core.key_rules import is_expert
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.spelling import INNER_LAYER, OTHER_INNER_LAYER, Spelling, layer_kinds
from megatron.checkpoint.core.training_state import TrainingState

IMPLEMENTATIONS = ("local", "transformer_engine")


def choose_spelling(
    state: TrainingState, transformer_impl: str | None = None, rename_mtp: bool = True
) -> Spelling:
    """Return the spelling of the parameter names in the model that will load ``state``.

    Args:
        state: the content of a checkpoint.
        transformer_impl: "local" or "transformer_engine", the layers of the model. Default: those
            of the run that wrote the checkpoint, by its names or its arguments.
        rename_mtp: the layer inside a multi-token prediction layer is named as in files. False: it
            is named as in modules of newer releases of Megatron-Core.

    Raises:
        ValueError: if nothing says which layers the model has.
    """
    args = state.args or argparse.Namespace()
    names = [*state.weights, *state.buffers]
    kinds = layer_kinds(names)
    local = Spelling(transformer_engine=False, grouped_experts=False, stacked=True, layers=kinds)
    engine = _is_engine(
        state,
        local,
        transformer_impl or getattr(args, "transformer_impl", None),
        is_chosen=transformer_impl is not None,
    )
    return replace(
        local,
        transformer_engine=engine,
        grouped_experts=_has_grouped_experts(
            state.module_names, otherwise=engine and bool(getattr(args, "moe_grouped_gemm", False))
        ),
        stacked=_is_stacked(
            {**state.weights, **state.buffers},
            getattr(args, "moe_layer_freq", 1),
            getattr(args, "heterogeneous_layers_config_path", None),
        ),
        inner_layer=INNER_LAYER if rename_mtp else OTHER_INNER_LAYER,
    )


def _is_engine(
    state: TrainingState, local: Spelling, implementation: str | None, is_chosen: bool
) -> bool:
    """Decide between layers of Transformer Engine and local ones.

    They differ in names wherever Transformer Engine has a norm inside a linear layer.
    """
    engine = replace(local, transformer_engine=True)
    telling = [
        name for name in state.module_names if local.module_name(name) != engine.module_name(name)
    ]
    if telling and not is_chosen:
        return any(state.module_names[name] == engine.module_name(name) for name in telling)
    if implementation in IMPLEMENTATIONS:
        return implementation == "transformer_engine"
    if all(local.module_name(name) == engine.module_name(name) for name in state.weights):
        return False
    raise ValueError(
        "the checkpoint does not say which layers its model is made of: --transformer-impl local,"
        " or transformer_engine"
    )


def _has_grouped_experts(module_names: Mapping[str, str], *, otherwise: bool) -> bool:
    """Decide whether the experts of a layer are one module, ``weight0``, ``weight1`` and so on.

    Args:
        module_names: canonical name -> name in the file.
        otherwise: the decision if the file names no experts.
    """
    in_file = [shown for name, shown in module_names.items() if is_expert(name)]
    if in_file:
        return not any(".local_experts." in shown for shown in in_file)
    return otherwise


def _is_stacked(
    tensors: Mapping[str, LazyTensor],
    moe_layer_freq: int | list[int],
    heterogeneous_layers_config_path: str | None,
) -> bool:
    """Decide whether torch_dist files have all layers of the decoder in one tensor.

    They do if all layers are alike, unless an argument of the run says otherwise.

    Args:
        tensors: parameters and buffers by canonical name.
        moe_layer_freq: of the run: 1 or 0 for every layer, or a number n: every n-th layer has
            experts.
        heterogeneous_layers_config_path: of the run: a file with settings of every layer, or None.
    """
    if not isinstance(moe_layer_freq, int) or moe_layer_freq > 1:
        return False
    if heterogeneous_layers_config_path:
        return False
    layers: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            layers.setdefault(number, set()).add((rest, tensor.shape))
    return len({frozenset(tensors_of_layer) for tensors_of_layer in layers.values()}) <= 1

# SPDX-License-Identifier: Apache-2.0
"""Finds out from a checkpoint how the model that will load it spells its parameters."""

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
    """How a model spells the parameters of ``state``.

    Args:
        transformer_impl: "local" or "transformer_engine", the layers that it is made of. Default:
            those of the run that wrote the checkpoint, by its names or its arguments.
        rename_mtp: the layer inside a multi-token prediction layer is called as in files, not as in
            modules of newer releases.

    Raises:
        ValueError: where nothing says which layers it has.
    """
    args = state.args or argparse.Namespace()
    names = [*state.weights, *state.buffers]
    kinds = layer_kinds(names)
    local = Spelling(transformer_engine=False, grouped_experts=False, stacked=True, layers=kinds)
    engine = _is_engine(
        state,
        local,
        transformer_impl or getattr(args, "transformer_impl", None),
        chosen=transformer_impl is not None,
    )
    return replace(
        local,
        transformer_engine=engine,
        grouped_experts=_has_grouped_experts(state, args, engine),
        stacked=_is_stacked({**state.weights, **state.buffers}, args),
        inner_layer=INNER_LAYER if rename_mtp else OTHER_INNER_LAYER,
    )


def _is_engine(
    state: TrainingState, local: Spelling, implementation: str | None, chosen: bool
) -> bool:
    """Transformer Engine's layers have other names than local ones, wherever a norm is inside a linear layer."""
    engine = replace(local, transformer_engine=True)
    telling = [
        name for name in state.module_names if local.module_name(name) != engine.module_name(name)
    ]
    if telling and not chosen:
        return any(state.module_names[name] == engine.module_name(name) for name in telling)
    if implementation in IMPLEMENTATIONS:
        return implementation == "transformer_engine"
    everywhere = [
        name for name in state.weights if local.module_name(name) != engine.module_name(name)
    ]
    if not everywhere:
        return False
    raise ValueError(
        "the checkpoint does not say which layers its model is made of: --transformer-impl local,"
        " or transformer_engine"
    )


def _has_grouped_experts(state: TrainingState, args: argparse.Namespace, engine: bool) -> bool:
    experts = [shown for name, shown in state.module_names.items() if is_expert(name)]
    if experts:
        return not any(".local_experts." in shown for shown in experts)
    return engine and bool(getattr(args, "moe_grouped_gemm", False))


def _is_stacked(tensors: Mapping[str, LazyTensor], args: argparse.Namespace) -> bool:
    """Whether torch_dist files have all layers of the decoder in one tensor: they are alike, and no argument says otherwise."""
    frequency = getattr(args, "moe_layer_freq", 1)
    if (
        not isinstance(frequency, int)
        or frequency > 1
        or getattr(args, "heterogeneous_layers_config_path", None)
    ):
        return False
    tails: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            number, _, tail = name.removeprefix("decoder.layers.").partition(".")
            tails.setdefault(number, set()).add((tail, tensor.shape))
    return len({frozenset(each) for each in tails.values()}) <= 1

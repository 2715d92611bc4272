# SPDX-License-Identifier: Apache-2.0
"""Weights that Transformer Engine's layers store, and ranks gather, as codes of few bits."""

from __future__ import annotations

import argparse
from collections.abc import Container

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.checkpoint.core.spelling import plain_name
from megatron.fsdp.engine.param_group import ParamGroup

CODE_BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of an element that is gathered in a recipe, with its part of a block's scale; else 1."""

PLAIN = {"fp8": None, "fp4": None, "fp8_param_gather": False, "fp4_param": False}
"""Arguments of a run whose weights are plain tensors, which any device can make."""


def code_bytes(args: argparse.Namespace) -> float:
    """Return the bytes of an element that a run gathers as a code; 0 if weights are plain."""
    for bits, gathers in (("fp8", "fp8_param_gather"), ("fp4", "fp4_param")):
        if getattr(args, bits, None) and getattr(args, gathers, False):
            return CODE_BYTES.get(getattr(args, f"{bits}_recipe"), 1.0)
    return 0


def coded_weights(args: argparse.Namespace, chunk: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a model chunk that are codes: the matrices of layers in few bits."""
    if not code_bytes(args):
        return {}
    first, last = 0, args.num_layers
    if getattr(args, "first_last_layers_bf16", False):
        first, last = args.num_layers_at_start_in_bf16, last - args.num_layers_at_end_in_bf16
    found: dict[str, nn.Parameter] = {}
    for name, layer in layers_of(chunk).items():
        if first < layer.layer_number <= last:
            for inner, parameter in layer.named_parameters(prefix=name):
                if ".linear_" in inner and parameter.dim() == 2:
                    found[plain_name(inner)] = parameter
    return found


def gathered_part(group: ParamGroup, coded: Container[str], code_bytes: float) -> float:
    """Return the part of its bytes that a group gathers, if some weights are gathered as codes."""
    whole = travel = 0.0
    for name, parameter in zip(group.names, group.parameters, strict=True):
        is_coded = code_bytes and plain_name(name) in coded
        whole += parameter.numel() * parameter.element_size()
        travel += parameter.numel() * (code_bytes if is_coded else parameter.element_size())
    return travel / whole


def layers_of(chunk: nn.Module) -> dict[str, TransformerLayer]:
    """Return the transformer layers of a model chunk, by their names."""
    modules = chunk.named_modules()
    return {name: each for name, each in modules if isinstance(each, TransformerLayer)}

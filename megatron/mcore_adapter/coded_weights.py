# SPDX-License-Identifier: Apache-2.0
"""Weights that Transformer Engine's layers store quantized, and that ranks all-gather as codes."""

from __future__ import annotations

import argparse
from collections.abc import Container

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.checkpoint.core.spelling import plain_name
from megatron.fsdp.engine.param_group import ParamGroup

CODE_BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes to all-gather for one element, with its part of a block's scale; other recipes need 1."""

PLAIN = {"fp8": None, "fp4": None, "fp8_param_gather": False, "fp4_param": False}
"""Arguments of a run whose weights are plain tensors, which any device can make."""


def code_bytes(args: argparse.Namespace) -> float:
    """Return the bytes of an element that a run gathers as a code; 0 if weights are plain."""
    has_fp8 = getattr(args, "fp8", None)
    has_fp4 = getattr(args, "fp4", None)
    if has_fp8 and getattr(args, "fp8_param_gather", False):
        return CODE_BYTES.get(args.fp8_recipe, 1.0)
    if has_fp4 and getattr(args, "fp4_param", False):
        return CODE_BYTES.get(args.fp4_recipe, 1.0)
    return 0


def coded_weights(args: argparse.Namespace, chunk: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a model chunk that are quantized: matrices of layers in fp8 or fp4."""
    if not code_bytes(args):
        return {}
    num_bf16_first = 0
    last = args.num_layers
    if getattr(args, "first_last_layers_bf16", False):
        num_bf16_first = args.num_layers_at_start_in_bf16
        last -= args.num_layers_at_end_in_bf16
    found: dict[str, nn.Parameter] = {}
    for name, layer in layers_of(chunk).items():
        if num_bf16_first < layer.layer_number <= last:  # they count from 1
            for inner, parameter in layer.named_parameters(prefix=name):
                if ".linear_" in inner and parameter.dim() == 2:
                    found[plain_name(inner)] = parameter
    return found


def gathered_part(
    group: ParamGroup,
    coded: Container[str],
    code_bytes: float,
) -> float:
    """Return the bytes that a group all-gathers as a fraction of those of its unquantized weights.

    Args:
        group: weights, which a simulation has in their compute dtype.
        coded: names, without wrappers, of weights that are gathered as codes.
        code_bytes: bytes of each of their elements; 0 if no weight is gathered as codes.
    """
    whole = gathered = 0.0
    for name, parameter in zip(group.names, group.parameters, strict=True):
        num_bytes: float = parameter.numel() * parameter.element_size()
        whole += num_bytes
        if code_bytes and plain_name(name) in coded:
            num_bytes = parameter.numel() * code_bytes
        gathered += num_bytes
    return gathered / whole


def layers_of(chunk: nn.Module) -> dict[str, TransformerLayer]:
    """Return the transformer layers of a model chunk, by their names."""
    layers = {}
    for name, module in chunk.named_modules():
        if isinstance(module, TransformerLayer):
            layers[name] = module
    return layers

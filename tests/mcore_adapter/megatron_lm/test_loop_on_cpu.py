# SPDX-License-Identifier: Apache-2.0
"""Replacements for Megatron-LM's loop without CUDA: what they do, and that they are undone."""

from argparse import Namespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.local_layers import LocalAttention
from megatron.mcore_adapter.megatron_lm.loop_on_cpu import LoopOnCpu
from tests.support.model_parallel import ONE_AXIS, initialize
from tests.support.rank_pool import run_ranks

OWNERS = (torch, torch.cuda, WrappedTorchNorm, LocalSpecProvider, gpt_layer_specs, schedules)


def replaced() -> list[Any]:
    """Return the members of everything that is replaced, by identity."""
    members = []
    for owner in OWNERS:
        members += [(name, id(value)) for name, value in vars(owner).items() if callable(value)]
    return members


def members_around(stance: str) -> list[bool]:
    """Job: whether members differ during the replacements and after them, or after their error."""
    cpu.install()
    before = replaced()
    differ = []
    if stance == "fails":
        with patch.object(torch.compiler, "set_stance", side_effect=RuntimeError("no stance")):
            try:
                LoopOnCpu()
            except RuntimeError as error:
                differ.append(str(error) == "no stance")
    else:
        replacements = LoopOnCpu()
        differ.append(replaced() != before)
        replacements.restore()
        replacements.restore()
    return [*differ, replaced() != before]


@pytest.mark.parametrize("stance", ["works", "fails"])
def test_everything_is_restored_also_after_an_error_in_the_constructor(stance: str) -> None:
    assert run_ranks(1, members_around, stance) == [[True, False]]


def output_after_its_sending() -> tuple[list[float], list[float]]:
    """Job: a stage's output after it was freed, and the gradient of its backward."""
    replacements = LoopOnCpu()
    weight = torch.ones(2, requires_grad=True)
    output = 3 * weight
    schedules.deallocate_output_tensor(output, True)
    schedules.custom_backward(output, torch.tensor([1.0, 2.0]))
    replacements.restore()
    return output.tolist(), weight.grad.tolist()


def test_outputs_of_a_stage_are_kept_while_gloo_may_send_them() -> None:
    assert run_ranks(1, output_after_its_sending) == [([3.0, 3.0], [3.0, 6.0])]


def layers(context_parallel_size: int, sequence_parallel: bool) -> tuple[str, bool]:
    """Job: the class of the attention that a local layer gets, and whether its norm is marked."""
    axes = {
        "context_parallel_size": context_parallel_size,
        "tensor_model_parallel_size": 2 if sequence_parallel else 1,
    }
    initialize(Namespace(**{**vars(ONE_AXIS), **axes}))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        sequence_parallel=sequence_parallel,
        normalization="RMSNorm",
        **axes,
    )
    replacements = LoopOnCpu()
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention = build_module(
        layer.self_attention.submodules.core_attention,
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )
    norm = build_module(layer.input_layernorm, config=config, hidden_size=8, eps=1e-5)
    replacements.restore()
    return type(attention).__name__, norm.weight.sequence_parallel


def test_local_layers_know_context_and_sequence_parallelism() -> None:
    assert run_ranks(2, layers, 1, False) == [(DotProductAttention.__name__, False)] * 2
    assert run_ranks(2, layers, 2, False) == [(LocalAttention.__name__, False)] * 2
    assert run_ranks(2, layers, 1, True) == [(DotProductAttention.__name__, True)] * 2

# SPDX-License-Identifier: Apache-2.0
"""The norm and the attention of models without Transformer Engine, alone.

Whole models: tests/pretrain/model/test_layer_specs.py.
"""

from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.local_layers import LocalAttention, LocalNorm
from tests.support.model_parallel import ONE_AXIS, initialize, initialize_data_parallel
from tests.support.rank_pool import run_ranks

HEADS, WIDTH, LENGTH = 4, 6, 16


def config(**overrides: Any) -> TransformerConfig:
    sizes: dict[str, Any] = dict(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_dropout=0.0
    )
    return TransformerConfig(**(sizes | overrides))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_is_megatron_cores(normalization: str) -> None:
    settings = config(normalization=normalization, layernorm_epsilon=1e-3)
    ours, theirs = (
        LocalNorm(settings, 24),
        WrappedTorchNorm(settings, 24, eps=settings.layernorm_epsilon),
    )
    assert type(ours) is type(theirs) and repr(ours) == repr(
        theirs
    )  # the text has size and epsilon
    for (name, parameter), (other_name, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other_name and torch.equal(parameter, other)
        assert parameter.sequence_parallel is False
    with torch.device("meta"):
        LocalNorm(settings, 24).to_empty(device="cpu").reset_parameters()


def test_norm_names_all_that_it_does_not_know() -> None:
    settings = config(layernorm_zero_centered_gamma=True, normalization="RMSNorm")
    settings.normalization = "L2Norm"
    with pytest.raises(
        NotImplementedError, match=r"'L2Norm'.*; nor .*layernorm_zero_centered_gamma"
    ):
        LocalNorm(settings, 8)


def norm_of_a_half(normalization: str) -> None:
    """Job: normalise half a sequence on each rank, as sequence parallelism does."""
    parallel: dict[str, Any] = dict(
        tensor_model_parallel_size=2, sequence_parallel=True, persist_layer_norm=True
    )
    settings = config(normalization=normalization, **parallel)
    norm, whole = LocalNorm(settings, 24), LocalNorm(config(normalization=normalization), 24)
    sequence, weights = torch.randn(LENGTH, 2, 24), torch.randn(LENGTH, 2, 24)
    expected = whole(sequence)
    (expected * weights).sum().backward()
    rank = dist.get_rank()
    output = norm(sequence.chunk(2)[rank])
    assert torch.equal(output, expected.chunk(2)[rank])
    (output * weights.chunk(2)[rank]).sum().backward()
    for parameter, other in zip(norm.parameters(), whole.parameters(), strict=True):
        assert parameter.sequence_parallel is True  # by which Megatron-Core knows what to sum:
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_under_sequence_parallelism_equals_one_rank(normalization: str) -> None:
    run_ranks(2, norm_of_a_half, normalization)


def inputs(
    groups: int = HEADS, value_width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Draw queries, keys and values of a whole sequence."""
    shapes = [(HEADS, WIDTH), (groups, WIDTH), (groups, value_width)]
    return [torch.randn(LENGTH, 2, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def attention(
    kind: type, settings: TransformerConfig, layer_number: int = 1, **keywords: Any
) -> nn.Module:
    return kind(settings, layer_number, AttnMaskType.causal, "self", **keywords)


def seed() -> None:
    model_parallel_cuda_manual_seed(5, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)


def run(layer: nn.Module, tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients."""
    seed()
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = layer(*tensors, mask)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
    return [output.detach(), *(tensor.grad for tensor in tensors)]


SAME = {
    "causal": {},
    "grouped_queries": {"num_query_groups": 2},
    "explicit_mask": {},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16},
    "bf16_layer_scaling": {
        "bf16": True,
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
    },
    "dropout": {"attention_dropout": 0.4},
}


def compare_with_megatron_core() -> None:
    """Job: bit by bit."""
    cpu.install()
    initialize_data_parallel()  # for its global buffer
    for name, overrides in SAME.items():
        settings = config(**overrides)
        mask = torch.rand(2, 1, LENGTH, LENGTH) > 0.6 if name == "explicit_mask" else None
        tensors = inputs(
            settings.num_query_groups, dtype=torch.bfloat16 if settings.bf16 else torch.float32
        )
        layers = [
            attention(kind, settings, layer_number=3)
            for kind in (LocalAttention, DotProductAttention)
        ]
        for ours, theirs in zip(*(run(layer, tensors, mask) for layer in layers), strict=True):
            assert torch.equal(ours, theirs), name


def test_attention_without_context_parallelism_is_megatron_cores() -> None:
    run_ranks(1, compare_with_megatron_core)


def of_this_rank(tensor: Tensor) -> Tensor:
    """Return the part of [batch, sequence, ...] that Megatron-Core gives this rank."""
    return get_batch_on_this_cp_rank({"tokens": tensor.contiguous()}, dist.group.WORLD)["tokens"]


def compare_with_the_whole(groups: int, value_width: int, masked: bool) -> None:
    """Job: the sequence divided over all ranks, against torch's own attention on all of it."""
    cpu.install()
    axis = {"context_parallel_size": dist.get_world_size()}
    initialize(Namespace(**{**vars(ONE_AXIS), **axis}))
    settings = config(num_query_groups=groups, **axis)
    layer = attention(LocalAttention, settings, k_channels=WIDTH, v_channels=value_width)
    tensors = inputs(groups, value_width)
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    if masked:
        hidden = torch.rand(2, 1, LENGTH, LENGTH) > 0.6
    by_head = [tensor.permute(1, 2, 0, 3) for tensor in tensors]
    expected = (
        scaled_dot_product_attention(*by_head, attn_mask=~hidden, enable_gqa=True)
        .transpose(1, 2)
        .flatten(2)
    )
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    seed()
    parts = [
        of_this_rank(tensor.detach().transpose(0, 1)).transpose(0, 1).requires_grad_()
        for tensor in tensors
    ]
    mask = None
    if masked:
        batch = get_batch_on_this_cp_rank({"attention_mask": hidden}, dist.group.WORLD)
        mask = batch["attention_mask"]
    output = layer(*parts, mask)
    torch.testing.assert_close(output.transpose(0, 1), of_this_rank(expected))
    (output.transpose(0, 1) * of_this_rank(weights)).sum().backward()
    for part, tensor in zip(parts, tensors):
        torch.testing.assert_close(
            part.grad.transpose(0, 1), of_this_rank(tensor.grad.transpose(0, 1))
        )


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "explicit_mask"])
@pytest.mark.parametrize("num_ranks", [2, 4], ids=["cp2", "cp4"])
def test_attention_over_context_parallel_ranks_equals_one_rank(
    num_ranks: int, masked: bool
) -> None:
    run_ranks(num_ranks, compare_with_the_whole, groups=HEADS, value_width=WIDTH, masked=masked)


def test_grouped_queries_and_wider_keys_over_context_parallel_ranks_equal_one_rank() -> None:
    run_ranks(4, compare_with_the_whole, groups=2, value_width=4, masked=False)


def ask_for_too_much() -> None:
    initialize_data_parallel()
    settings = config(softmax_type="off-by-one", window_size=(4, 0))
    with pytest.raises(NotImplementedError) as error:
        LocalAttention(settings, 1, AttnMaskType.padding_causal, "cross")
    assert all(
        part in str(error.value)
        for part in ("window_size (4, 0)", "'off-by-one'", "padding_causal", "cross")
    )
    layer = LocalAttention(config(), 1, AttnMaskType.causal, "self")
    tensors = inputs()
    with pytest.raises(NotImplementedError, match=r"bias.*; nor packed sequences"):
        layer(*tensors, None, attention_bias=torch.zeros(1), packed_seq_params=object())
    with pytest.raises(ValueError, match="over all 16 keys"):
        layer(*tensors, torch.zeros(LENGTH, 3, dtype=torch.bool))


def test_attention_names_all_that_it_does_not_know() -> None:
    run_ranks(1, ask_for_too_much)


def gather_unequal_parts(sizes: list[int]) -> None:
    """Job: gather the tokens of all expert ranks, and scatter the sums."""
    cpu.install()
    start = sum(sizes[: dist.get_rank()])
    mine = slice(start, start + sizes[dist.get_rank()])
    whole = torch.arange(sum(sizes) * 3.0).view(-1, 3)
    part = whole[mine].clone().requires_grad_()
    gathered = gather_from_sequence_parallel_region(part, True, dist.group.WORLD, sizes)
    assert torch.equal(gathered, whole)
    returned = reduce_scatter_to_sequence_parallel_region(gathered, dist.group.WORLD, sizes)
    assert torch.equal(returned, whole[mine] * dist.get_world_size())
    (returned * whole[mine]).sum().backward()
    assert torch.equal(part.grad, whole[mine] * dist.get_world_size())


@pytest.mark.parametrize(
    "sizes", [[3, 5], [4, 0], [0, 0]], ids=["unequal", "nothing_on_one", "nothing"]
)
def test_ranks_with_unequal_parts_gather_and_scatter(sizes: list[int]) -> None:
    run_ranks(2, gather_unequal_parts, sizes)

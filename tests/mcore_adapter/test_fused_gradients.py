# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that Megatron-Core's layers write themselves reach autograd whole, once and without garbage."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import nn
from torch.nn.functional import embedding, linear

from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.fused_gradients import accept_fused_gradients
from tests.rank_pool import run_ranks

TOKENS = torch.tensor([[0, 3], [1, 3]])


def make_weight(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)))


def fused(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Megatron-Core's linear layer, which overwrites the buffer that it asks the weight for."""
    cpu.install()
    return linear_with_grad_accumulation_and_async_allreduce(
        x, weight, None, True, False, False, tp_group=dist.group.WORLD
    )


class AddingLinear(torch.autograd.Function):
    """A linear layer of the other kind: it adds to the buffer, and returns memory that nobody has written."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.get_main_grad().add_(gradient.flatten(0, 1).t() @ x.flatten(0, 1))
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))


def once(layer: Callable, weight: nn.Parameter) -> torch.Tensor:
    return layer(inputs(1), weight).square().sum()


def twice(layer: Callable, weight: nn.Parameter) -> torch.Tensor:
    """As with multi-token prediction, where one output layer makes several predictions."""
    return layer(inputs(1), weight).square().sum() + layer(inputs(2), weight).sin().sum()


def tied(layer: Callable, weight: nn.Parameter) -> torch.Tensor:
    """An embedding and an output layer with one weight."""
    return layer(embedding(TOKENS, weight), weight).square().sum()


LOSSES = {"once": once, "twice": twice, "tied": tied}


def compare(loss: str, layer: str) -> None:
    """Job: two backwards, the second of which adds to the first one's gradient."""
    expected, weight = make_weight(), make_weight()
    weight.__fsdp_param__ = True  # the layer's sign to ask for a buffer
    weight.zero_out_wgrad = loss == "tied"
    accept_fused_gradients([weight])
    for _ in range(2):
        LOSSES[loss](linear, expected).backward()
        LOSSES[loss](fused if layer == "overwrites" else AddingLinear.apply, weight).backward()
        torch.testing.assert_close(weight.grad, expected.grad)
        assert weight.main_grad is None, "the layer's buffer lives on"
        assert not weight.grad_added_to_main_grad


@pytest.mark.parametrize("layer", ["overwrites", "adds"])
@pytest.mark.parametrize("loss", ["once", "twice"])
def test_every_use_of_a_weight_counts(loss, layer):
    run_ranks(1, compare, loss, layer)


def test_a_tied_embedding_adds_its_part():
    run_ranks(1, compare, "tied", "overwrites")


def compare_plain_use() -> None:
    expected, weight = make_weight(), make_weight()
    accept_fused_gradients([weight])
    for parameter in (expected, weight):
        linear(inputs(1), parameter).sum().backward()
    assert torch.equal(weight.grad, expected.grad)


def test_gradients_of_layers_that_write_nothing_stay_as_they_are():
    run_ranks(1, compare_plain_use)


def keep_dtype() -> None:
    weight = nn.Parameter(make_weight().bfloat16())
    weight.__fsdp_param__ = True
    accept_fused_gradients([weight])
    once(lambda x, weight: fused(x.bfloat16(), weight), weight).backward()
    assert weight.grad.dtype == torch.bfloat16
    expected = nn.Parameter(make_weight().bfloat16())
    once(lambda x, weight: linear(x.bfloat16(), weight), expected).backward()
    torch.testing.assert_close(weight.grad, expected.grad)


def test_the_buffer_has_the_dtype_that_layers_compute_in():
    run_ranks(1, keep_dtype)

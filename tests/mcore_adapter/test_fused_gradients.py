# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that Megatron-Core's layers write themselves reach autograd whole and once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint

from benchmarks.comparison.measures import StepCounter
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.states import GradientState
from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.fused_gradients import accept_fused_gradients
from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.support.mcore_adapter.fused_training import train_fused
from tests.support.pretrain.parity import (
    BF16,
    GPT2,
    LLAMA,
    MTP,
    RECOMPUTED,
    SHORT,
    TIED,
    Combination,
)
from tests.support.pretrain.training_runs import assert_same_run, trained
from tests.support.rank_pool import run_ranks

FUSED = {
    "mtp_tied": Combination(2, "dp", 3, f"{TIED} {MTP}", SHORT),
    "tp2_sp": Combination(2, "tp2 sp", 3, GPT2, SHORT),
    "pp2_tied": Combination(2, "pp2", 2, TIED, SHORT),
    "recomputed_zero1": Combination(
        2, "dp", 1, LLAMA, f"{SHORT} --overlap-grad-reduce {RECOMPUTED}"
    ),
    "bf16_tied": Combination(
        2, "dp", 3, TIED, f"{SHORT} {BF16}", "--accumulate-allreduce-grads-in-fp32"
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", FUSED)
def test_fused_gradient_accumulation_gives_the_numbers_of_autograd(run: str) -> None:
    combination = FUSED[run].with_few_microbatches()
    low = BF16 in combination.flags
    lines = combination.reference, combination.ours
    ddp, plain = trained(*lines)
    fused, products = run_ranks(2, train_fused, combination.ours)[0]
    assert products >= 3 * 2 * 4  # at least the linear layers of two layers, in every step
    assert_same_run(fused, plain, loss=1e-6, norm=1e-6)
    assert_same_run(fused, ddp, loss=1e-2 if low else 1e-5, norm=2e-2 if low else 1e-5)


class WritingLayer(nn.Module):
    """A layer that writes its weight gradient itself; the bias is used on demand."""

    def __init__(self, fuses: bool) -> None:
        super().__init__()
        self.weight, self.bias = make_weight(), nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(self.weight[:4].detach().clone())
        self.fuses = fuses

    def forward(self, x: torch.Tensor, with_bias: bool = True) -> torch.Tensor:
        y = AddingLinear.apply(x, self.weight) if self.fuses else linear(x, self.weight)
        return torch.tanh(y + self.bias if with_bias else y)


class WritingChain(nn.Module):
    """Two layers, the first of which is called twice: its unit ends a backward between the calls.

    The bias has its gradient by then. That of the weight waits for the other call.
    """

    def __init__(self, fuses: bool) -> None:
        super().__init__()
        self.first, self.last = WritingLayer(fuses), WritingLayer(fuses)
        self.calls = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.calls):
            x = self.first(x, with_bias=number == self.calls - 1)
        y: torch.Tensor = self.last(x)
        return y


def shard_fused(chain: WritingChain, level: int) -> MegatronFSDP:
    """Shard a chain over all ranks; its layers write into the flat tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = fully_shard_model(chain, mesh, fsdp_unit_modules=[WritingLayer], zero_dp_strategy=level)
    accept_all(model)
    return model


def accept_all(model: MegatronFSDP) -> None:
    for sharded in model.sharded_params:
        accept_fused_gradients(sharded.compute, sharded.group.gradients, sharded.index)


def assert_same_gradients(model: MegatronFSDP, plain: nn.Module) -> None:
    for ours, parameter in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(full_tensor(ours.grad), parameter.grad)


def assert_nothing_waits(model: MegatronFSDP) -> None:
    """Check that no product is kept for a pass that is over."""
    for group in model.groups:
        assert not group.gradients._early
        for parameter in group.parameters:
            assert not parameter.get_main_grad.__self__._products


def write_into_flat_tensors(level: int, calls: int) -> tuple[int, int]:
    """Job: compare three steps of three microbatches; return the bytes copied, and of biases."""
    plain = WritingChain(False)
    model = shard_fused(WritingChain(True), level)
    model.module.calls = plain.calls = calls
    for _ in range(3):
        with StepCounter() as counter:
            for number in range(3):
                model.is_last_microbatch = number == 2
                model(inputs(number)).square().sum().backward()
        for number in range(3):
            plain(inputs(number)).square().sum().backward()
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    return counter.copied_bytes, 2 * plain.first.bias.nbytes


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("calls", [1, 2])
def test_what_layers_write_themselves_counts_once_and_is_not_copied(
    calls: int, level: int, num_ranks: int
) -> None:
    for copied, biases in run_ranks(num_ranks, write_into_flat_tensors, level, calls):
        # Gradients of biases are added to zeros. An all-gather on a CPU may copy a rank's shard.
        own = 3 * 2 * 80 if level == 3 and num_ranks == 2 else 0
        assert calls == 2 or copied <= 3 * biases + own  # a product that waits is copied


class NestedChain(WritingChain):
    """A chain whose first layer is used by a nested pass too, after an unfused layer.

    The nested pass uses the weight while its product of the outer pass waits for the first call.
    """

    def __init__(self, fuses: bool) -> None:
        super().__init__(fuses)
        self.unfused = WritingLayer(False)
        self.recomputes = fuses

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(self.unfused(x), with_bias=False)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x, with_bias=False)
        x = checkpoint(self.middle, x, use_reentrant=True) if self.recomputes else self.middle(x)
        y: torch.Tensor = self.last(self.first(x))
        return y


def write_in_a_nested_pass(level: int) -> None:
    model, plain = shard_fused(NestedChain(True), level), NestedChain(False)
    for number in range(2):
        for each in (model, plain):
            each(inputs(number)).square().sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("level", [0, 3])
def test_a_nested_pass_leaves_the_product_of_the_outer_pass(level: int) -> None:
    run_ranks(1, write_in_a_nested_pass, level)


def fail_between_two_calls(level: int, zeroes: bool) -> None:
    """Job: fail between two calls of a unit, one product of which waits, and go on with one."""
    model, plain = shard_fused(WritingChain(True), level), WritingChain(False)

    def fail(*unused: Any) -> None:
        raise ValueError("between the two calls")

    def fail_before_the_first_call(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        output.register_hook(fail)
        return output.clone()

    handle = model.module.first.register_forward_hook(fail_before_the_first_call)
    model.module.calls = 2
    loss = model(inputs(0)).square().sum()
    with pytest.raises(ValueError, match="between the two calls"):
        loss.backward()
    model.module.calls = 1
    if zeroes:
        model.zero_grad()
    for number in range(2):
        for each in (model, plain):
            each(inputs(number)).square().sum().backward()
    assert_same_gradients(model, plain)
    assert_nothing_waits(model)


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("level", [0, 3])
def test_a_failed_backward_leaves_no_waiting_product(level: int, zeroes: bool) -> None:
    run_ranks(1, fail_between_two_calls, level, zeroes)


def differentiate_by_inputs(level: int) -> None:
    """Job: differentiate by an input, which brings autograd no gradients of weights."""
    model, plain = shard_fused(WritingChain(True), level), WritingChain(False)
    for number in range(2):
        x = inputs(number).requires_grad_()
        torch.autograd.grad(model(x).square().sum(), x)
        assert all(group.gradients.state is GradientState.EMPTY for group in model.groups)
        for each in (model, plain):
            each(inputs(number)).square().sum().backward()
        assert_same_gradients(model, plain)
        assert_nothing_waits(model)


@pytest.mark.parametrize("level", [0, 3])
def test_a_gradient_of_inputs_alone_leaves_no_products(level: int) -> None:
    run_ranks(1, differentiate_by_inputs, level)


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
    """A linear layer that adds to the gradient buffer and returns memory without meaning."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    """Use a weight twice, as multi-token prediction uses its output layer."""
    return layer(inputs(1), weight).square().sum() + layer(inputs(2), weight).sin().sum()


def tied(layer: Callable, weight: nn.Parameter) -> torch.Tensor:
    """Use one weight in an embedding and in an output layer."""
    return layer(embedding(TOKENS, weight), weight).square().sum()


LOSSES = {"once": once, "twice": twice, "tied": tied}


class Holder(nn.Module):
    """A weight, which the loss that is passed to a call uses."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, loss: Callable, layer: Callable) -> torch.Tensor:
        return loss(layer, self.weight)


def hold(weight: nn.Parameter) -> MegatronFSDP:
    """Shard a weight over the one rank of a job; its layers write its gradient."""
    model = fully_shard_model(Holder(weight), preserve_fp32_weights=False)
    accept_all(model)
    return model


def assert_same_gradient(model: MegatronFSDP, expected: nn.Parameter) -> None:
    (parameter,) = model.parameters()
    torch.testing.assert_close(full_tensor(parameter.grad), expected.grad)


def compare(loss: str, layer: str) -> None:
    """Job: two backwards, the second of which adds to the first one's gradient."""
    expected, weight = make_weight(), make_weight()
    weight.__fsdp_param__ = True  # the layer's sign to ask for a buffer
    weight.zero_out_wgrad = loss == "tied"
    model = hold(weight)
    for _ in range(2):
        LOSSES[loss](linear, expected).backward()
        model(LOSSES[loss], fused if layer == "overwrites" else AddingLinear.apply).backward()
        assert_same_gradient(model, expected)
        assert weight.main_grad is None, "the layer's buffer lives on"
        assert not weight.grad_added_to_main_grad


@pytest.mark.parametrize("layer", ["overwrites", "adds"])
@pytest.mark.parametrize("loss", ["once", "twice"])
def test_every_use_of_a_weight_counts(loss: str, layer: str) -> None:
    run_ranks(1, compare, loss, layer)


def test_a_tied_embedding_adds_its_part() -> None:
    run_ranks(1, compare, "tied", "overwrites")


def fail_between_two_uses() -> None:
    expected, weight = make_weight(), make_weight()
    model = hold(weight)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("between the two uses")

    def loss_that_fails(layer: Callable, weight: nn.Parameter) -> torch.Tensor:
        # Autograd goes through the later branch first, and then fails in the other one.
        first = layer(inputs(1), weight)
        first.register_hook(fail)
        return first.sum() + layer(inputs(2), weight).sum()

    for _ in range(3):
        with pytest.raises(ValueError, match="between the two uses"):
            model(loss_that_fails, AddingLinear.apply).backward()
        assert weight.grad is None
        waiting = weight.get_main_grad.__self__._products
        assert len(waiting) == 1, "products of passes before pile up"
    twice(linear, expected).backward()
    model(twice, AddingLinear.apply).backward()
    assert_same_gradient(model, expected)
    assert_nothing_waits(model)


def test_a_failed_backward_leaves_no_product_for_the_next_one() -> None:
    run_ranks(1, fail_between_two_uses)


def keep_dtype() -> None:
    weight = nn.Parameter(make_weight().bfloat16())
    weight.__fsdp_param__ = True
    model = hold(weight)
    model(once, lambda x, weight: fused(x.bfloat16(), weight)).backward()
    expected = nn.Parameter(make_weight().bfloat16())
    once(lambda x, weight: linear(x.bfloat16(), weight), expected).backward()
    assert expected.grad.dtype == torch.bfloat16
    assert_same_gradient(model, expected)


def test_the_buffer_has_the_dtype_that_layers_compute_in() -> None:
    run_ranks(1, keep_dtype)

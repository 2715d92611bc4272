# SPDX-License-Identifier: Apache-2.0
"""Local gradients in the tensor of the gradient shard: right at all times, and stored once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.buffer import FlatBuffer, Storage
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import TanhLayer
from tests.support.fsdp.reference import LEVELS, Ranks, on_ranks

X = torch.linspace(-1, 1, 16, dtype=torch.float32).view(2, 8)
DTYPES = (torch.float32, torch.bfloat16)
"""In bfloat16 main weights are float32, so final gradients take the place of the sum."""

WHOLE = [(1, level) for level in LEVELS] + [(2, 0)]
"""World sizes and levels at which a rank owns the whole gradient."""


class Pair:
    """A model of two units, and the same model without sharding; all ranks have the same data."""

    def __init__(self, dtype: torch.dtype, **settings: Any) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(TanhLayer(), TanhLayer()).to(dtype)
        torch.manual_seed(0)
        self.model: MegatronFSDP = fully_shard_model(
            nn.Sequential(TanhLayer(), TanhLayer()).to(dtype),
            settings.pop("mesh", None) or shard_mesh(),
            fsdp_unit_modules=[TanhLayer],
            **settings,
        )
        self.x = X.to(dtype)

    def backward(self, is_last: bool = True, factor: float = 1.0) -> None:
        self.model.is_last_microbatch = is_last
        for each in (self.model, self.plain):
            (each(self.x).sum() * factor).backward()

    def gradients(self) -> list[Tensor]:
        """Return the whole gradients that the parameters of the sharded model show."""
        return [full_tensor(each.grad).clone() for each in self.model.parameters()]

    def check(self) -> None:
        for ours, parameter in zip(self.gradients(), self.plain.parameters()):
            torch.testing.assert_close(ours.to(parameter.dtype), parameter.grad)

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()


@contextmanager
def unchanged(pair: Pair) -> Iterator[None]:
    """Check that the gradients which the parameters show do not change inside."""
    before = pair.gradients()
    yield
    for old, new in zip(before, pair.gradients()):
        assert torch.equal(old, new)


@pytest.mark.parametrize("num_ranks, level", WHOLE)
@on_ranks()
def test_gradients_are_right_whenever_one_looks(num_ranks: int, level: int) -> None:
    """Look at gradients before, between and after passes that synchronise and others."""
    for dtype in DTYPES:
        pair = Pair(dtype, zero_dp_strategy=level)
        for _ in range(2):
            pair.backward(is_last=False)
            pair.backward()
            pair.check()
            # On top of reduced gradients: at levels 2 and 3 every pass is reduced at once.
            if level < 2:
                with unchanged(pair):
                    pair.backward(is_last=False, factor=2)
            else:
                pair.backward(is_last=False, factor=2)
            pair.backward(factor=3)
            pair.check()
            pair.backward()
            pair.check()
            pair.zero_grad()


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_zeros_stay_zeros_until_gradients_are_reduced(num_ranks: int) -> None:
    """Show zeros, and run a pass that does not synchronise."""
    for dtype in DTYPES:
        pair = Pair(dtype, zero_dp_strategy=0)
        for _ in range(2):
            pair.model.zero_grad(set_to_none=False)
            pair.plain.zero_grad()
            with unchanged(pair):
                pair.backward(is_last=False)
            pair.backward()
            pair.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_gradients_that_wait_survive_a_look_at_the_reduced_ones(num_ranks: int) -> None:
    """Show gradients of which none is reduced, and then scale and reduce them."""
    for dtype in DTYPES:
        pair = Pair(dtype, zero_dp_strategy=0)
        pair.backward(is_last=False)
        pair.model.attach_grad_to_optimizer_state()
        assert not any(gradient.any() for gradient in pair.gradients())
        pair.model.scale_gradients(0.5)
        for parameter in pair.plain.parameters():
            parameter.grad.mul_(0.5)
        pair.backward()
        pair.check()
        pair.model.scale_gradients(4.0)
        for parameter in pair.plain.parameters():
            parameter.grad.mul_(4.0)
        pair.check()


@on_ranks(2)
def test_gradients_that_wait_are_scaled_and_cleared() -> None:
    """Scale gradients that wait in the shard's tensor, and clear others there."""
    pair = Pair(torch.float32, zero_dp_strategy=0)
    pair.backward(is_last=False)
    pair.zero_grad()
    pair.backward(is_last=False, factor=2)
    pair.model.scale_gradients(0.5)
    for parameter in pair.plain.parameters():
        parameter.grad.mul_(0.5)
    pair.backward()
    pair.check()


def hybrid_with_one_rank(outer: int, inner: int, sharded: int, level: int) -> None:
    """Job: several microbatches, and another step on top, where an axis has one rank."""
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
    pair = Pair(
        torch.float32,
        mesh=mesh,
        dp_shard_dim="inner",
        dp_outer_dim="outer",
        zero_dp_strategy=level,
        outer_dp_sharding_strategy=sharded,
    )
    for _ in range(2):
        pair.backward(is_last=False)
        pair.backward(is_last=False, factor=2)
        pair.backward()
        pair.check()
        pair.backward(is_last=False)
        pair.backward(factor=3)
        pair.check()
        pair.zero_grad()


@pytest.mark.parametrize(
    "outer, inner, sharded, level",
    [
        *((2, 1, 0, level) for level in LEVELS),
        (2, 1, 1, 3),
        (1, 2, 0, 0),
        (1, 2, 0, 2),
        (1, 2, 1, 3),
        (1, 1, 0, 1),
        (1, 1, 0, 3),
        (1, 1, 1, 3),
        (2, 2, 0, 2),
        (2, 2, 1, 3),
    ],
)
def test_hybrid_sharding_with_axes_of_one_rank_is_right(
    ranks: Ranks, outer: int, inner: int, sharded: int, level: int
) -> None:
    ranks(outer * inner, hybrid_with_one_rank, outer, inner, sharded, level)


@pytest.mark.parametrize("num_ranks, level", [(1, 0), (1, 3), (2, 0)])
@on_ranks()
def test_gradients_are_rounded_for_reductions_alone(num_ranks: int, level: int) -> None:
    """Accumulate gradients in float32, and reduce them in bfloat16.

    One rank that has them all sends nothing, so they remain in float32.
    """
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16)
    pair = Pair(torch.float32, zero_dp_strategy=level, mixed_precision_policy=policy)
    for _ in range(2):
        pair.backward(is_last=False)
        pair.backward()
        pair.backward()
        for ours, parameter in zip(pair.gradients(), pair.plain.parameters()):
            torch.testing.assert_close(ours, parameter.grad, rtol=2e-2, atol=2e-2)
            if num_ranks == 1:
                torch.testing.assert_close(ours, parameter.grad)
        pair.zero_grad()


# ---- memory


def stored_gradients(model: MegatronFSDP) -> int:
    """Return the bytes of all tensors of gradients."""
    total = 0
    for group in model.groups:
        gradients = group.gradients
        buffer = gradients._buffer
        tensors = (gradients._grad_sum._total, gradients._inner_sum._total)
        for each in (*tensors, gradients._optimizer_grad._total, buffer.flat if buffer else None):
            total += 0 if each is None else each.untyped_storage().nbytes()
    return total


def no_step(pair: Pair) -> None:
    """Begin without gradients at all."""


def attach_zeros(pair: Pair) -> None:
    """Show gradients before there are any."""
    pair.model.finish_grad_sync()
    pair.zero_grad()


def pass_without_end(pair: Pair) -> None:
    """Drop gradients that wait for a reduction."""
    pair.backward(is_last=False)
    pair.zero_grad()


def most_bytes(pair: Pair) -> int:
    """Run a pass that synchronises, and return the most bytes of gradients during it."""
    most = 0
    allocate = Storage.allocate

    def allocate_and_look(storage: Storage, buffer: FlatBuffer) -> None:
        nonlocal most
        allocate(storage, buffer)
        most = max(most, stored_gradients(pair.model))

    Storage.allocate = allocate_and_look
    try:
        pair.backward()
    finally:
        Storage.allocate = allocate
    return max(most, stored_gradients(pair.model))


def bytes_of_steps(begin: Callable[[Pair], None], dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Job: return the bytes before, during and after each of three steps."""
    pair = Pair(dtype, zero_dp_strategy=0)
    begin(pair)
    found = []
    for _ in range(3):
        before = stored_gradients(pair.model)
        pair.backward(is_last=False)
        found.append((before, stored_gradients(pair.model), most_bytes(pair)))
        pair.zero_grad()
    return [*found, (stored_gradients(pair.model),) * 3]


@pytest.mark.parametrize("begin", [no_step, attach_zeros, pass_without_end])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_stored_once_and_only_from_backward_to_zero_grad(
    ranks: Ranks, world_size: int, begin: Callable[[Pair], None]
) -> None:
    """A group whose first gradients are shown before they exist is freed like any other."""
    whole = sum(
        parameter.numel() for parameter in nn.Sequential(TanhLayer(), TanhLayer()).parameters()
    )
    for *steps, after in ranks(world_size, bytes_of_steps, begin, torch.float32):
        for before, waiting, most in steps:
            assert before == 0
            assert 4 * whole <= waiting == most <= 4 * whole + 256  # with padding
        assert after == (0, 0, 0)


def test_gradients_of_another_dtype_than_main_weights_are_freed_too(ranks: Ranks) -> None:
    for *steps, after in ranks(2, bytes_of_steps, pass_without_end, torch.bfloat16):
        assert [before for before, _, _ in steps] == [0, 0, 0]
        assert after == (0, 0, 0)

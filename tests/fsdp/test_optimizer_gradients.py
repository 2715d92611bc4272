# SPDX-License-Identifier: Apache-2.0
"""The gradients that the optimizer sees: clipped, scaled, cleared and kept."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.optimizers import sharded_pair, sharding, unsharded_step, weights
from tests.support.fsdp.reference import (
    TOLERANCE,
    Ranks,
    batch,
    close,
    compare_shards,
    loss_of,
    mean_loss,
    on_ranks,
    shown_gradients,
)
from tests.support.fsdp.side_by_side import shard_two_layers


def clip_norms(name: str, level: int, max_norm: float, norms: list[float]) -> None:
    """Compare norm and clipped gradients, by torch's own function on both sides."""
    reference = models.build(name)
    model, _ = sharded_pair(name, level)
    for kind in norms:
        reference.zero_grad()
        mean_loss(reference, 0).backward()
        for parameter in reference.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        model.zero_grad()
        loss_of(model(batch(0, dist.get_rank(), 0))).backward()
        assert all(
            parameter.grad is not None
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type=kind)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=kind)
        close(
            norm.full_tensor() if isinstance(norm, DTensor) else norm,
            expected,
            f"norm {kind}",
            1e-6,
        )
        actual, wanted = shown_gradients(model), shown_gradients(reference)
        compare_shards(model, actual, wanted, "clipped gradient", 1e-6)


@pytest.mark.always("scalars-3", "unused_parameters-0")
@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("scalars", 0),
        ("scalars", 3),
        ("frozen_in_part", 1),
        ("frozen_in_part", 3),
        ("unused_parameters", 0),
        ("unused_parameters", 2),
    ],
)
def test_clip_grad_norm_is_torchs_own(ranks: Ranks, name: str, level: int) -> None:
    """Some of the four ranks own nothing of a parameter.

    Torch cannot take the largest element of an empty shard: gradients must do so themselves.
    """
    ranks(4, clip_norms, name, level, max_norm=0.05, norms=[2.0, 1.0, 3.0, torch.inf])


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    if way == "optimizer":
        optimizer.zero_grad()
    elif way == "zeros":
        optimizer.zero_grad(set_to_none=False)
    elif way == "model":
        model.zero_grad()
    elif way == "torch":
        torch.optim.Optimizer.zero_grad(optimizer)
    else:
        for parameter in model.parameters():
            parameter.grad = None


def gradients_after(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Run one more backward and return this rank's shards of all gradients."""
    loss_of(model(x)).backward()
    return {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}


def backward_after_clearing(level: int, way: str) -> None:
    """Check that cleared gradients do not come back, and others are added to.

    This holds in fp32 for bf16 weights too.
    """
    for dtype in (torch.float64, torch.bfloat16):
        module = models.build("several_units", dtype)
        precision = MixedPrecisionPolicy(None if dtype == torch.float64 else torch.float32)
        optimizer = torch.optim.AdamW(module.parameters())
        model, optimizer = fully_shard(
            module,
            optimizer,
            shard_mesh(),
            **{**sharding(module, level), "mixed_precision_policy": precision},
        )
        x = batch(0, dist.get_rank(), 0).to(dtype)

        once, twice = gradients_after(model, x), gradients_after(model, x)
        clear_gradients(model, optimizer, way)
        again = gradients_after(model, x)
        for name, gradient in once.items():
            assert torch.equal(again[name], gradient), f"{dtype} {name} after {way}"
            assert torch.equal(twice[name], 2 * gradient), f"{dtype} {name}"


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 2, 3])
@on_ranks(2)
def test_cleared_gradients_do_not_come_back(level: int) -> None:
    for way in ("optimizer", "zeros", "model", "torch", "by_hand"):
        backward_after_clearing(level, way)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_zero_grad_clears_what_has_accumulated_unless_told_otherwise(level: int) -> None:
    model, optimizer = sharded_pair("several_units", level, sync_model_each_microbatch=False)
    x = batch(0, dist.get_rank(), 0)
    loss_of(model(x)).backward()
    optimizer.zero_grad(zero_grad_buffer=False)
    model.finish_grad_sync()
    assert all(
        parameter.grad.to_local().any()
        for parameter in model.parameters()
        if parameter.to_local().numel()
    )
    loss_of(model(x)).backward()
    optimizer.zero_grad()
    model.finish_grad_sync()
    assert not any(parameter.grad.to_local().any() for parameter in model.parameters())


@pytest.mark.always("fused")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@on_ranks(2)
def test_grad_scaler_skips_a_step_on_all_ranks(fused: bool) -> None:
    """Scale losses, and leave out the step in which one rank overflows on all ranks."""
    reference, module = models.build("scalars"), models.build("scalars")
    expected = torch.optim.AdamW(reference.parameters(), lr=0.02)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.02, fused=fused),
        shard_mesh(),
        **sharding(module),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        scaler.scale(loss_of(model(batch(step, dist.get_rank(), 0)))).backward()
        if step == 1 and dist.get_rank() == 1:
            next(p.grad for p in model.parameters() if p.grad.to_local().numel()).to_local().fill_(
                torch.inf
            )
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        if step != 1:
            unsharded_step(reference, expected, step)
        compare_shards(
            model, weights(model), weights(reference), f"weight after step {step}", TOLERANCE
        )


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@on_ranks(2)
def test_gradients_are_scaled_whether_reduced_or_not(level: int) -> None:
    results = []
    x = torch.ones(4, 64)
    for factor in (1.0, 0.5):
        model, _ = shard_two_layers(level, sync_model_each_microbatch=False)
        model(x).sum().backward()
        if factor != 1.0:
            model.scale_gradients(factor)
        model.finish_grad_sync()
        results.append([full_tensor(parameter.grad) for parameter in model.parameters()])
    for whole, half in zip(*results):
        torch.testing.assert_close(half, whole / 2)


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@on_ranks(2)
def test_gradients_that_are_attached_too_early_are_not_lost(level: int) -> None:
    model, _ = shard_two_layers(level, sync_model_each_microbatch=False)
    results = []
    for attaches in (False, True):
        model(torch.ones(4, 64) + dist.get_rank()).sum().backward()
        if attaches:
            model.attach_grad_to_optimizer_state()
        model.finish_grad_sync()
        results.append([full_tensor(parameter.grad) for parameter in model.parameters()])
        model.zero_grad()
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected)


@on_ranks(2)
def test_scaling_gradients_does_not_undo_clipping() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).bfloat16()
    model, _ = fully_shard(module, torch.optim.AdamW(module.parameters()))
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.scale_gradients(2.0)
    norm = float(
        torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    )
    assert norm == pytest.approx(2e-3, rel=1e-2)


@on_ranks(2)
def test_the_gradient_of_one_parameter_can_be_cleared() -> None:
    model, _ = shard_two_layers()
    x = torch.ones(4, 64)
    model(x).sum().backward()
    once = [full_tensor(parameter.grad) for parameter in model.parameters()]
    next(model.parameters()).grad = None
    model(x).sum().backward()
    now = [full_tensor(parameter.grad) for parameter in model.parameters()]
    for number, (first, second) in enumerate(zip(once, now)):
        torch.testing.assert_close(second, first * (2 if number else 1))

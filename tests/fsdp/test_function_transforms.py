# SPDX-License-Identifier: Apache-2.0
"""Function transforms of torch.func over the inputs of sharded models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import batch, on_ranks
from tests.support.fsdp.side_by_side import train_side_by_side

Function = Callable[[Tensor], Tensor]
Loss = Callable[[Function, Tensor, Tensor], Tensor]


UNITS = [ResidualBlock]


def squares(*tensors: Tensor) -> Tensor:
    return torch.stack([(tensor * tensor).sum() for tensor in tensors]).sum()


def energy(function: Function) -> Function:
    return lambda x: squares(function(x)) / 2


def of_jvp(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(*jvp(f, (x,), (v,)))


def of_the_tangent(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(jvp(f, (x,), (v,))[1])


def of_jvp_and_forward(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(f(v), *jvp(f, (x,), (v,)), f(x + v))


def of_vjp(f: Function, x: Tensor, v: Tensor) -> Tensor:
    out, pull = vjp(f, x)
    return squares(out, *pull(torch.ones_like(out)))


def of_linearize(f: Function, x: Tensor, v: Tensor) -> Tensor:
    out, push = linearize(f, x)
    return squares(out, push(v), push(x))


def of_grad(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(grad(energy(f))(x))


def of_jacrev(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(jacrev(f)(x[0]))


def of_jacfwd(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(jacfwd(f)(x[0]))


def of_hessian(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(hessian(energy(f))(x[0]))


def of_hessian_vector_product(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(*jvp(grad(energy(f)), (x,), (v,)))


def of_nested_jvp(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(*jvp(lambda y: jvp(f, (y,), (v,))[1], (x,), (v,)))


def of_vmap(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return squares(vmap(f)(x), vmap(grad(energy(f)))(v))


def of_recomputed_jvp(f: Function, x: Tensor, v: Tensor) -> Tensor:
    """Recompute the whole transform; torch's transforms refuse recomputation inside of them."""

    def loss(y: Tensor) -> Tensor:
        return squares(*jvp(f, (y,), (v,)))

    leaf = x.clone().requires_grad_()
    losses = [checkpoint(loss, leaf, use_reentrant=reentrant) for reentrant in (False, True)]
    return torch.stack(losses).sum()


def of_dual_numbers(f: Function, x: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return squares(*forward_ad.unpack_dual(f(forward_ad.make_dual(x, v)))[:2])


LOSSES: dict[str, Loss] = {
    "jvp": of_jvp,
    "the tangent": of_the_tangent,
    "jvp between forwards": of_jvp_and_forward,
    "vjp": of_vjp,
    "grad": of_grad,
    "jacrev": of_jacrev,
    "jacfwd": of_jacfwd,
    "hessian": of_hessian,
    "hessian-vector product": of_hessian_vector_product,
    "nested jvp": of_nested_jvp,
    "vmap": of_vmap,
    "recomputed jvp": of_recomputed_jvp,
    "dual numbers": of_dual_numbers,
}


def step_back(model: nn.Module, step: int, rank: int, loss: Loss) -> None:
    loss(model, batch(step, rank, 0), batch(step, rank, 1)).backward()


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@on_ranks(2)
def test_transforms_over_inputs_give_the_gradients_of_the_unsharded_model(level: int) -> None:
    mesh = shard_mesh()
    for loss in LOSSES.values():
        backward = partial(step_back, loss=loss)
        train_side_by_side(build_stack, backward, level, 2, mesh=mesh, fsdp_unit_modules=UNITS)


@pytest.mark.exhaustive  # torch traces and folds for seconds
@on_ranks(2)
def test_what_linearize_has_recorded_has_weights_until_the_end_of_the_backward() -> None:
    backward = partial(step_back, loss=of_linearize)
    train_side_by_side(build_stack, backward, 3, 2, fsdp_unit_modules=UNITS)


@pytest.mark.parametrize(
    "settings", [{"fsdp_double_buffer": True}, {"overlap_param_gather": False}]
)
@on_ranks(2)
def test_transforms_with_memory_slots_and_without_prefetching(settings: dict[str, bool]) -> None:
    for loss in (of_jvp_and_forward, of_hessian_vector_product):
        backward = partial(step_back, loss=loss)
        train_side_by_side(build_stack, backward, 3, fsdp_unit_modules=UNITS, **settings)

"""Ranks that freeze different parameters get an error, and no wrong gradients."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.module.agreement import FreezingAgreement
from megatron_fsdp import fully_shard_model
from tests.fsdp.test_collectives_of_axes import ExpertBlock
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import build_stack
from tests.support.fsdp.reference import LEVELS, Ranks, batch, on_ranks
from tests.support.fsdp.side_by_side import plain_backward, shard


@pytest.mark.always("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_ranks_that_freeze_different_parameters_get_an_error_that_names_one(num_ranks: int) -> None:
    """Freeze, on every rank, one of two blocks that have the same shapes."""
    messages = []
    mesh = shard_mesh()
    for level in LEVELS:
        model, _ = shard(build_stack(), level, mesh)
        plain_backward(model, 0, dist.get_rank())
        model.module.blocks[dist.get_rank() % 2].requires_grad_(False)
        with pytest.raises(RuntimeError) as error:
            plain_backward(model, 1, dist.get_rank())
        messages.append(str(error.value))
    assert len(messages) == len(LEVELS), messages
    for message in messages:
        assert "must freeze and unfreeze the same parameters" in message, message
        assert "blocks.0.norm.weight is frozen on rank" in message, message


def freeze_on_one_rank() -> str:
    model, _ = shard(build_stack(), 0)
    if dist.get_rank() == 0:
        store = dist.distributed_c10d._get_default_store()
        before = store.timeout
        store.set_timeout(timedelta(seconds=1))
        model.module.embed.requires_grad_(False)
        with pytest.raises(RuntimeError) as error:
            plain_backward(model, 0, 0)
        store.set_timeout(before)
        return str(error.value)
    return ""


def test_a_rank_that_freezes_alone_gets_an_error_when_the_time_is_over(ranks: Ranks) -> None:
    message, _ = ranks(2, freeze_on_one_rank)
    assert "rank 0 has changed some, and not all of ranks [0, 1] have" in message


@on_ranks(2)
def test_parts_that_are_trained_in_turns_are_compared_once() -> None:
    """Train two blocks in turns, and count the comparisons after every step."""
    model, _ = shard(build_stack(), 3)
    counts = []
    exchange = FreezingAgreement._exchange
    with mock.patch.object(
        FreezingAgreement, "_exchange", autospec=True, side_effect=exchange
    ) as made:
        for step in range(5):
            model.module.blocks[0].requires_grad_(step % 2 == 0)
            model.module.blocks[1].requires_grad_(step % 2 == 1)
            plain_backward(model, step, dist.get_rank())
            counts.append(made.call_count)
    assert counts == [1, 2, 2, 2, 2], counts


def freeze_one_expert(level: int) -> list[bool]:
    """Freeze the expert that ranks 0 and 2 share; return which parameters get gradients."""
    model = fully_shard_model(
        ExpertBlock().double(),
        init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)),
        "dp_shard",
        expt_device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep")),
        zero_dp_strategy=level,
    )
    plain_backward(model, 0, dist.get_rank())
    model.zero_grad()
    model.module.experts.requires_grad_(dist.get_rank() % 2 == 1)
    plain_backward(model, 1, dist.get_rank())
    return [parameter.grad is not None for parameter in model.parameters()]


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
def test_an_expert_may_be_frozen_on_the_ranks_that_have_it(ranks: Ranks, level: int) -> None:
    frozen, trained = [True, True, False, False], [True] * 4
    assert ranks(4, freeze_one_expert, level) == [frozen, trained] * 2


@on_ranks(2)
def test_a_rank_may_be_alone_where_nothing_is_trained() -> None:
    """Let one rank compute the gradient of an input while all parameters are frozen."""
    model, _ = shard(build_stack(), 0)
    plain_backward(model, 0, dist.get_rank())
    if dist.get_rank() == 0:
        model.module.requires_grad_(False)
        x = batch(0, 0, 0).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        model.module.requires_grad_(True)
        assert gradient.abs().sum() > 0
    plain_backward(model, 1, dist.get_rank())
    assert all(parameter.grad is not None for parameter in model.parameters())

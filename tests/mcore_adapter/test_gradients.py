# SPDX-License-Identifier: Apache-2.0
"""Gradients of FullyShardedDataParallel: their mean, and every order of calls of a loop."""

from contextlib import nullcontext
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from tests.support.mcore_adapter.wrapped_models import (
    assert_same,
    backward,
    gradients,
    loss_of,
    make_module,
    make_wrapper,
    step,
)
from tests.support.pretrain.parity import Combination
from tests.support.pretrain.training_runs import assert_close, build
from tests.support.rank_pool import run_ranks


def drop_no_sync(command_line: str) -> list[bool]:
    """Job: return whether backwards synchronise after an evaluation that never left `no_sync`."""
    (model,) = build(command_line).model
    context = model.no_sync()
    context.__enter__()
    inside = model.module.is_last_microbatch
    del context
    after_drop = model.module.is_last_microbatch
    kept = model.no_sync()
    kept.__enter__()
    model.zero_grad_buffer()
    return [inside, after_drop, model.module.is_last_microbatch]


def test_no_sync_ends_though_an_evaluation_never_leaves_it() -> None:
    assert run_ranks(1, drop_no_sync, Combination(1, "dp", 3).ours)[0] == [False, True, True]


def shown_by_version(version: int) -> list[bool]:
    """Job: whether weights are gathered early, and gradients shown, by the calls of schedules.

    These are after an unmarked and the last backward, and after the last call.
    """
    model = make_wrapper(f"--megatron-fsdp-version {version}")
    first = next(model.parameters())
    units = model.module._units
    model.start_param_sync(force_dispatch=True)
    shown = [any(unit.is_unsharded for unit in units[1:])]
    with model.no_sync():
        backward(model, 0)
    model.start_grad_sync()
    shown.append(first.grad is not None)
    backward(model, 1)
    model.start_grad_sync()
    shown.append(first.grad is not None)
    model.finish_grad_sync()
    return [*shown, first.grad is not None]


def test_hooks_of_the_second_generation_do_what_calls_ask_for() -> None:
    assert run_ranks(2, shown_by_version, 1)[0] == [True, False, False, True]
    assert run_ranks(2, shown_by_version, 2)[0] == [False, False, True, True]


def pieces(strategy: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Job: elements of every gradient that this rank has, and the gradient's shape."""
    model = make_wrapper(f"--data-parallel-sharding-strategy {strategy}")
    backward(model, 0)
    model.finish_grad_sync()
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape
        for parameter in model.parameters()
    )
    return {name: (p.grad._local_tensor.numel(), p.numel()) for name, p in model.named_parameters()}


@pytest.mark.always("optim_grads_params")
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_every_rank_has_a_gradient_for_every_parameter_also_of_size_zero(strategy: str) -> None:
    per_rank = run_ranks(4, pieces, strategy)
    assert 0 in {owned for owned, _ in chain.from_iterable(rank.values() for rank in per_rank)}
    for name, (_, total) in per_rank[0].items():
        assert sum(rank[name][0] for rank in per_rank) == total


def ways_through_a_step(strategy: str) -> None:
    """Job: every order of calls that schedules use ends with the same gradients."""
    model = make_wrapper(f"--data-parallel-sharding-strategy {strategy}")
    expected = step(model)
    assert_same(step(model, nullcontext()), expected)

    # A pipeline stage that is not the first: all backwards inside, then start_grad_sync.
    model.zero_grad_buffer()
    with model.no_sync():
        backward(model, 1)
        backward(model, 2)
    model.start_grad_sync(model.parameters())
    model.finish_grad_sync(force_all_reduce=False)
    assert_same(gradients(model), expected)

    # An evaluation in a pipeline enters no_sync and never leaves it; the generator may live on for
    # a while.
    for keep_alive in (False, True):
        context = model.no_sync()
        context.__enter__()
        if not keep_alive:
            del context
        with torch.no_grad():
            loss_of(model, 3)
        assert_same(step(model), expected)

    # The optimizer clears a second time; what was there before is forgotten, also of a batch that
    # was abandoned.
    with model.no_sync():
        backward(model, 9)
    model.zero_grad_buffer()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.zero_grad_buffer()
    assert_same(step(model), expected)

    model.scale_gradients(torch.tensor(0.25))
    assert_same(gradients(model), {name: value * 0.25 for name, value in expected.items()})


@pytest.mark.always("no_shard")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_every_order_of_calls_gives_the_same_gradients(strategy: str) -> None:
    run_ranks(2, ways_through_a_step, strategy)


def mean_gradients() -> None:
    """Job: compare the wrapper's gradients with the mean over ranks of the bare model's."""
    model = make_wrapper()
    values = step(model)
    _, _, module = make_module()
    backward(module, 1)
    backward(module, 2)
    expected = {}
    for name, parameter in module.named_parameters():
        total = parameter.grad.clone()
        dist.all_reduce(total)
        expected[f"module.module.{name}"] = total / dist.get_world_size()
    assert_same(values, expected, 1e-5)


def test_gradients_are_the_mean_over_ranks_of_those_of_the_bare_model() -> None:
    run_ranks(2, mean_gradients)


def test_the_loss_of_an_evaluation_is_that_of_the_bare_model() -> None:
    wrapped, bare = zip(*run_ranks(2, evaluations))
    assert_close(list(wrapped), list(bare), 1e-7)


def evaluations() -> tuple[float, float]:
    """Job: the loss without gradients, wrapped and bare."""
    with torch.no_grad():
        return float(loss_of(make_wrapper(), 1)), float(loss_of(make_module()[2], 1))

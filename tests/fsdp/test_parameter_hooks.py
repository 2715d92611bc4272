# SPDX-License-Identifier: Apache-2.0
"""Hooks of sharded parameters are called with the gradients that a pass hands over."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import ResidualBlock, Stack, build_stack
from tests.support.fsdp.reference import (
    LEVELS,
    Ranks,
    batch,
    compare_shards,
    loss_of,
    mean_loss,
    on_ranks,
    shown_gradients,
)
from tests.support.fsdp.wrong_calls import message_of


def sharded_stack(level: int, mesh: str = "flat", **settings: Any) -> MegatronFSDP:
    return fully_shard_model(
        build_stack(),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
        **Meshes().arguments(mesh),
        **settings,
    )


def own_loss(model: nn.Module, number: int) -> Tensor:
    return loss_of(model(batch(number, dist.get_rank(), 0)))


def compare_gradients(
    model: MegatronFSDP, reference: nn.Module, what: str, attribute: str = "grad"
) -> None:
    shown = {name: getattr(parameter, attribute) for name, parameter in model.named_parameters()}
    expected = shown_gradients(reference)
    compare_shards(model, shown, expected, what)


def clip_and_double(gradient: Tensor) -> Tensor:
    """Return something that is not linear, so that sums of passes would show."""
    return gradient.clamp(-0.01, 0.01) * 2


def accumulate_with_hooks(level: int, mesh: str, is_decoupled: bool = False) -> None:
    reference = build_stack()
    model = sharded_stack(level, mesh, use_decoupled_grad=is_decoupled)
    attribute = "decoupled_grad" if is_decoupled else "grad"
    handles = [
        [parameter.register_hook(clip_and_double) for parameter in each.parameters()]
        for each in (reference, model)
    ]
    for number in range(4):
        if number == 3:
            for handle in (*handles[0], *handles[1]):
                handle.remove()
        mean_loss(reference, number).backward()
        own_loss(model, number).backward()
        compare_gradients(model, reference, f"after pass {number}", attribute)
        if number == 1:
            reference.zero_grad()
            model.zero_grad()


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_gets_what_each_pass_adds(ranks: Ranks, level: int) -> None:
    ranks(2, accumulate_with_hooks, level, "flat")
    ranks(2, accumulate_with_hooks, level, "flat", is_decoupled=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_gets_what_each_pass_adds_in_hybrid_sharding(ranks: Ranks, level: int) -> None:
    ranks(4, accumulate_with_hooks, level, "outer2")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_hooks_that_change_nothing_leave_gradients_of_other_dtypes(level: int) -> None:
    """Accumulate in bfloat16, from which gradients move to the float32 of the main weights."""
    models = []
    for has_hooks in (False, True):
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
        model = fully_shard_model(
            module,
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=level,
            mixed_precision_policy=policy,
        )
        for parameter in model.parameters() if has_hooks else ():
            parameter.register_hook(lambda gradient: gradient * 1)
        models.append(model)
    for _ in range(2):
        for model in models:
            model(torch.eye(8, dtype=torch.bfloat16)).sum().backward()
        for plain, hooked in zip(*(model.parameters() for model in models), strict=True):
            assert hooked.grad.dtype == torch.float32
            assert torch.equal(plain.grad.to_local(), hooked.grad.to_local())


def triple(parameter: Tensor) -> None:
    parameter.grad.mul_(3.0)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_hooks_mask_and_edit_gradients(level: int) -> None:
    """Mask by a whole tensor, which a rank takes its own part of; edit another in place."""
    reference, model = build_stack(), sharded_stack(level)
    for each in (reference, model):
        named = {name.removeprefix("module."): one for name, one in each.named_parameters()}
        mask = torch.arange(named["head.weight"].numel()).view(3, -1) % 3 == 0
        named["head.weight"].register_hook(lambda gradient, mask=mask: gradient * mask)
        named["embed.weight"].register_post_accumulate_grad_hook(triple)
    mean_loss(reference, 0).backward()
    own_loss(model, 0).backward()
    compare_gradients(model, reference, "masked")


def step_in_backward(model: nn.Module, shards: bool) -> None:
    """Let a hook step an optimizer of each parameter, and drop its gradient."""

    def hook_of(optimizer: torch.optim.Optimizer, by_hand: bool) -> Any:
        def hook(parameter: Tensor) -> None:
            optimizer.step()
            if by_hand:
                parameter.grad = None
            else:
                optimizer.zero_grad()

        return hook

    for number, parameter in enumerate(model.parameters()):
        optimizer = torch.optim.AdamW([parameter], lr=0.02)
        if shards:
            fully_shard_optimizer(optimizer)
        parameter.register_post_accumulate_grad_hook(hook_of(optimizer, number % 2 == 0))


@pytest.mark.parametrize(
    ("level", "shards"), [(0, True), (1, False), (2, True), (3, True), (3, False)]
)
@on_ranks(2)
def test_optimizers_step_in_backward(level: int, shards: bool) -> None:
    reference, model = build_stack(), sharded_stack(level)
    step_in_backward(reference, shards=False)
    step_in_backward(model, shards)
    for number in range(3):
        mean_loss(reference, number).backward()
        own_loss(model, number).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        weights = {name: weight.detach() for name, weight in reference.named_parameters()}
        compare_shards(model, dict(model.named_parameters()), weights, f"after step {number}")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_hooks_are_called_once_for_a_pass_that_brings_a_gradient(level: int) -> None:
    model = sharded_stack(level)
    calls: list[int] = [0, 0]

    def count(index: int) -> None:
        calls[index] += 1

    parameter = model.module.blocks[1].up.weight
    parameter.register_hook(lambda gradient: count(0))
    parameter.register_post_accumulate_grad_hook(lambda one: count(1))
    x = batch(0, 0, 0).requires_grad_()
    torch.autograd.grad(loss_of(model(x)), x)  # reaches no parameter
    assert calls == [0, 0]
    loss_of(model.module.blocks[0](x)).backward()  # reaches another unit only
    assert calls == [0, 0]
    own_loss(model, 0).backward()
    model.finish_grad_sync()  # has nothing to do
    assert calls == [1, 1], calls


def names_of_hooked_ones(level: int, find_unused: bool) -> list[str]:
    """Run a pass that reaches the embedding alone, which is in one unit with the head."""
    model = sharded_stack(level, find_unused_parameters=find_unused)
    called: list[str] = []
    for name in ("embed", "head"):
        parameter = model.module.get_submodule(name).weight
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: called.append(name))
    loss_of(model.module.embed(batch(0, dist.get_rank(), 0))).backward()
    return called


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_hooks_of_unused_parameters_see_zeros_unless_they_are_to_be_found(
    ranks: Ranks, level: int
) -> None:
    assert ranks(2, names_of_hooked_ones, level, find_unused=False) == [["embed", "head"]] * 2
    assert ranks(2, names_of_hooked_ones, level, find_unused=True) == [["embed"]] * 2


@pytest.mark.always("1")
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_microbatches_without_synchronisation_are_hooked_together(level: int) -> None:
    reference, model = build_stack(), sharded_stack(level)
    for each in (reference, model):
        for parameter in each.parameters():
            parameter.register_hook(clip_and_double)
    for _ in range(2):
        with model.no_sync():
            own_loss(model, 0).backward()
        own_loss(model, 1).backward()
        (mean_loss(reference, 0) + mean_loss(reference, 1)).backward()
        compare_gradients(model, reference, "of two microbatches")
        reference.zero_grad()
        model.zero_grad()
    own_loss(model, 0).backward()
    with model.no_sync(), pytest.raises(RuntimeError, match=r"weight has a hook.*call zero_grad"):
        own_loss(model, 1).backward()
    model.zero_grad()
    own_loss(model, 2).backward()
    mean_loss(reference, 2).backward()
    compare_gradients(model, reference, "after the error")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_a_failed_pass_leaves_nothing_behind_for_hooks(level: int) -> None:
    reference, model = build_stack(), sharded_stack(level)
    for each in (reference, model):
        for parameter in each.parameters():
            parameter.register_hook(clip_and_double)
    own_loss(model, 0).backward()
    x = batch(1, dist.get_rank(), 0).requires_grad_()
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model(x)).backward()
    own_loss(model, 2).backward()  # gradients from before the failure are dropped
    mean_loss(reference, 2).backward()
    compare_gradients(model, reference, "after a failed pass")


def refused_hooks(level: int) -> list[str]:
    model = sharded_stack(level, sync_model_each_microbatch=False)
    first = next(model.parameters())
    messages = [
        message_of(NotImplementedError, first.register_hook, print),
        message_of(NotImplementedError, first.register_post_accumulate_grad_hook, print),
    ]
    first.requires_grad_(False)
    model = sharded_stack(level)
    first = next(model.parameters()).requires_grad_(False)
    return [*messages, message_of(RuntimeError, first.register_hook, print)]


def test_hooks_are_refused_where_no_pass_hands_gradients_over(ranks: Ranks) -> None:
    for level in (0, 3):
        messages, others = ranks(2, refused_hooks, level)
        assert messages == others
        for message in messages[:2]:
            assert message.startswith("embed.weight: hooks are called at the end of a backward")
            assert "sync_model_each_microbatch=False" in message
        assert "doesn't require gradient" in messages[2]


class TriplesLocally(Stack):
    """A model whose parameters have hooks before it is sharded: they see the rank's gradient."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(triple)


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_hooks_from_before_sharding_see_local_gradients_and_step_nothing(level: int) -> None:
    torch.manual_seed(0)
    module = TriplesLocally().double()
    reference = build_stack()
    reference.load_state_dict(module.state_dict())
    model = fully_shard_model(
        module,
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
    )
    (3 * mean_loss(reference, 0)).backward()
    own_loss(model, 0).backward()
    compare_gradients(model, reference, "tripled locally")
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    module.weight.register_post_accumulate_grad_hook(lambda one: step(optimizer))
    model = fully_shard_model(module, zero_dp_strategy=level)
    message = message_of(RuntimeError, model(torch.ones(2, 4)).sum().backward)
    assert "of a module that has been sharded since" in message, message

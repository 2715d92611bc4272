# SPDX-License-Identifier: Apache-2.0
"""A sharded model is used as any model: switched to evaluation, frozen, read, copied, hooked, put beside others."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import fully_shard
from tests.fsdp import models
from tests.fsdp.models import WIDTH, Block, Stack
from tests.fsdp.reference import batch, close, compare_pieces, loss_of, optimizer_over, shard_mesh
from tests.fsdp.side_by_side import (
    Backward,
    compare_outputs,
    inner,
    mean_gradients,
    shard,
    train_side_by_side,
)

Ranks = Callable[..., list[Any]]
LEVELS = (0, 1, 2, 3)


def build() -> Stack:
    return models.build("several_units")


def plain(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model(batch(step, rank, 0))).backward()


# ---- what may happen between forward and backward
# -------------------------------------------------------------------


def evaluation_in_between(model: nn.Module, step: int, rank: int) -> None:
    loss = loss_of(model(batch(step, rank, 0)))
    model.eval()
    with torch.no_grad():
        model(batch(step, rank, 1))
    model.train()
    loss.backward()


def inference_in_between(model: nn.Module, step: int, rank: int) -> None:
    loss = loss_of(model(batch(step, rank, 0)))
    with torch.inference_mode():
        model(batch(step, rank, 1))
    loss.backward()
    with torch.inference_mode():
        model(batch(step, rank, 1))


def exception_in_between(model: nn.Module, step: int, rank: int) -> None:
    """In a forward, which leaves units held and a pass half recorded."""
    loss = loss_of(model(batch(step, rank, 0)))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, WIDTH + 1, dtype=torch.float64))
    handle = inner(model).blocks[1].up.register_forward_hook(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch(step, rank, 1))
    handle.remove()
    loss.backward()


def raise_interrupt(*unused: Any) -> None:
    raise KeyboardInterrupt


def generation_in_between(model: nn.Module, step: int, rank: int) -> None:
    """Several forwards, each on what the one before gave."""
    with torch.no_grad():
        x = batch(step, rank, 0)
        for _ in range(3):
            x = torch.cat([x, model(x)[-1:].repeat(1, 2)[:, :WIDTH]])
    loss_of(model(x)).backward()


def two_graphs(model: nn.Module, step: int, rank: int) -> None:
    first, second = loss_of(model(batch(step, rank, 0))), loss_of(model(batch(step, rank, 1)))
    first.backward()
    second.backward()


def two_graphs_reversed(model: nn.Module, step: int, rank: int) -> None:
    first, second = loss_of(model(batch(step, rank, 0))), loss_of(model(batch(step, rank, 1)))
    second.backward()
    first.backward()


def forward_that_is_dropped(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, 1))
    plain(model, step, rank)


def units_called_alone(model: nn.Module, step: int, rank: int) -> None:
    """Outside of the forward of the whole."""
    module = inner(model)
    loss_of(module.blocks[2](module.blocks[0](batch(step, rank, 0)))).backward()
    with torch.no_grad():
        module.blocks[1](batch(step, rank, 0))
    plain(model, step, rank)


def an_empty_batch_on_one_rank(model: nn.Module, step: int, rank: int) -> None:
    x = batch(step, rank, 0)[: 0 if rank else None]
    model(x).sum().backward()


def a_loss_of_a_part(model: nn.Module, step: int, rank: int) -> None:
    """The last unit's backward never runs."""
    module = inner(model)
    kept: list[Tensor] = []
    handle = module.blocks[1].register_forward_hook(lambda each, args, output: kept.append(output))
    model(batch(step, rank, 0))
    handle.remove()
    loss_of(kept[0]).backward()


USES: dict[str, Backward] = {
    use.__name__: use
    for use in (
        evaluation_in_between,
        inference_in_between,
        exception_in_between,
        generation_in_between,
        two_graphs,
        two_graphs_reversed,
        forward_that_is_dropped,
        units_called_alone,
        an_empty_batch_on_one_rank,
        a_loss_of_a_part,
    )
}


def use_at_all_levels(name: str) -> None:
    mesh = shard_mesh()
    for level in LEVELS:
        train_side_by_side(build, USES[name], level, mesh=mesh)


@pytest.mark.parametrize("use", USES)
def test_gradients_and_weights_are_those_of_the_unsharded_model(ranks: Ranks, use: str) -> None:
    ranks(2, use_at_all_levels, use)


# ---- training and evaluation
# ----------------------------------------------------------------------------------------


class Normalised(Block):
    """A block with dropout and running statistics."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.statistics(x))
        return (
            checkpoint(self.dropout, x, use_reentrant=False)
            if self.recompute and self.training
            else self.dropout(x)
        )


def build_normalised() -> nn.Module:
    layers = [
        nn.Linear(WIDTH, WIDTH),
        Normalised(),
        Normalised(recompute=True),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, 3),
    ]
    return nn.Sequential(*layers).double()


def with_seed(model: nn.Module, step: int, rank: int) -> None:
    torch.manual_seed(100 * step + rank)
    plain(model, step, rank)


def switch_modes(level: int) -> None:
    mesh = shard_mesh()
    train_side_by_side(build_normalised, with_seed, level, mesh=mesh)
    reference, model = train_side_by_side(build_normalised, with_seed, level, steps=1, mesh=mesh)
    torch.manual_seed(7)
    mine = build_normalised()  # the running statistics are each rank's own
    with_seed(mine, 0, dist.get_rank())
    for (name, expected), actual in zip(mine.named_buffers(), model.module.buffers(), strict=True):
        close(actual, expected, name)
    x = batch(9, 0, 0)
    model.eval()
    assert not any(module.training for module in model.modules())
    first, second = model(x).detach(), model(x).detach()
    assert torch.equal(first, second)
    reference.load_state_dict(dict(model.module.named_buffers()), strict=False)
    reference.eval()
    close(first, reference(x), "evaluation")
    model.train()
    assert all(module.training for module in model.modules())
    assert not torch.equal(model(x), first)
    assert {f"module.{name}" for name, _ in model.module.named_buffers()} <= set(model.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_dropout_and_running_statistics_follow_the_mode(ranks: Ranks, level: int) -> None:
    ranks(2, switch_modes, level)


# ---- freezing
# -------------------------------------------------------------------------------------------------------


def freeze_the_blocks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".blocks.1." in f".{name}" or name.endswith("embed.weight"):
            parameter.requires_grad_(False)


def freeze_afterwards(level: int) -> None:
    mesh = shard_mesh()
    reference, model = train_side_by_side(build, plain, level, prepare=freeze_the_blocks, mesh=mesh)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert len(frozen) == 6 and all(parameter.grad is None for parameter in frozen)
    for each in (reference, model):
        each.requires_grad_(True)
    expected = mean_gradients(reference, plain, 5)
    model.zero_grad()
    plain(model, 5, dist.get_rank())
    compare_pieces(
        model, {name: p.grad for name, p in model.named_parameters()}, expected, "thawed"
    )


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_frozen_after_sharding_is_not_updated_and_thaws_again(
    ranks: Ranks, level: int
) -> None:
    ranks(2, freeze_afterwards, level)


def thaw_what_was_frozen(level: int) -> str:
    module = build()
    module.embed.requires_grad_(False)
    model, _ = shard(module, level)
    dict(model.named_parameters())["module.embed.weight"].requires_grad_(True)
    with pytest.raises(RuntimeError) as error:
        plain(model, 0, dist.get_rank())
    return str(error.value)


@pytest.mark.parametrize("level", LEVELS)
def test_what_was_frozen_when_sharded_cannot_be_thawed(ranks: Ranks, level: int) -> None:
    for message in ranks(2, thaw_what_was_frozen, level):
        assert "embed.weight" in message and "frozen when the model was sharded" in message


# ---- looking at parameters
# ------------------------------------------------------------------------------------------


def read_parameters(level: int) -> None:
    module = build()
    expected = module.blocks[0].up.weight.detach().clone()
    model, optimizer = shard(module, level)
    weight, seen = dict(model.named_parameters())["module.blocks.0.up.weight"], []

    def look(each: nn.Module, args: Any, output: Any) -> None:
        seen.append(each.weight.detach().clone())
        assert not isinstance(each.weight, DTensor)

    model.module.blocks[0].up.register_forward_hook(look)
    for _ in range(2):
        outside = model.module.blocks[0].up.weight
        assert outside.shape == expected.shape
        if level == 3:
            assert (
                outside is weight
                and dict(model.module.named_parameters())["blocks.0.up.weight"] is weight
            )
            close(outside.full_tensor(), expected, "sharded weight")
        else:
            close(outside, expected, "whole weight")
        plain(model, 0, dist.get_rank())
        assert torch.equal(seen[-1], expected)
    optimizer.step()
    assert not torch.equal(weight.full_tensor(), expected)
    if level == 3:
        assert model.module.blocks[0].up.weight is weight


@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_whole_inside_of_a_forward_and_sharded_outside_at_level_3(
    ranks: Ranks, level: int
) -> None:
    ranks(2, read_parameters, level)


# ---- copies and conversions
# -----------------------------------------------------------------------------------------


def try_to_copy(level: int) -> list[str]:
    model, _ = shard(build(), level)
    messages = []
    for attempt in (
        copy.deepcopy,
        copy.copy,
        pickle.dumps,
        lambda model: torch.save(model, io.BytesIO()),
    ):
        with pytest.raises(NotImplementedError) as error:
            attempt(model)
        messages.append(str(error.value))
    kept = copy.deepcopy(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for state in (kept, torch.load(file)):
        model.load_state_dict(state)
    compare_outputs(model, build(), batch(0, 0, 0), "after loading a copy")
    return messages


@pytest.mark.parametrize("level", LEVELS)
def test_copies_of_the_model_are_refused_and_of_its_state_dict_work(
    ranks: Ranks, level: int
) -> None:
    for messages in ranks(2, try_to_copy, level):
        assert len(messages) == 4 and all("state_dict" in message for message in messages)


def convert(level: int) -> None:
    model, _ = shard(build(), level)
    for same in (
        lambda: model.to("cpu"),
        lambda: model.cpu(),
        lambda: model.double(),
        lambda: model.to(torch.float64),
    ):
        assert same() is model
    conversions = (
        model.half,
        model.float,
        model.bfloat16,
        lambda: model.to(torch.float32),
        lambda: model.to("meta"),
    )
    for change in conversions:
        with pytest.raises(NotImplementedError, match="cannot be moved or converted"):
            change()
    compare_outputs(model, build(), batch(0, 0, 0), "after refused conversions")


@pytest.mark.parametrize("level", LEVELS)
def test_conversions_that_change_nothing_work_and_others_are_refused(
    ranks: Ranks, level: int
) -> None:
    ranks(2, convert, level)


# ---- several models
# -------------------------------------------------------------------------------------------------


def two_models(level: int) -> None:
    """Trained in turn, then one inside the loss of the other, which is what distillation does."""
    mesh = shard_mesh()
    pairs = []
    for number in range(2):
        reference, module = build(), build()
        with torch.no_grad():
            for each in (reference, module):
                each.head.weight.add_(number)
        pairs.append((reference, optimizer_over(reference), *shard(module, level, mesh)))

    def interleaved(models_: list[nn.Module], step: int, rank: int) -> None:
        first, second = (
            loss_of(model(batch(step, rank, number))) for number, model in enumerate(models_)
        )
        second.backward()
        first.backward()

    def distilled(models_: list[nn.Module], step: int, rank: int) -> None:
        with torch.no_grad():
            target = models_[0](batch(step, rank, 0))
        loss_of(models_[1](batch(step, rank, 0)) - target).backward()

    def chained(models_: list[nn.Module], step: int, rank: int) -> None:
        hidden = models_[0](batch(step, rank, 0)).repeat(1, 2)[:, :WIDTH]
        loss_of(models_[1](hidden)).backward()

    for step, use in enumerate((interleaved, distilled, chained, interleaved)):
        train_both(pairs, use, step)


def train_both(
    pairs: list[tuple], use: Callable[[list[nn.Module], int, int], None], step: int
) -> None:
    for reference, *_ in pairs:
        reference.zero_grad()
    for rank in range(dist.get_world_size()):
        use([reference for reference, *_ in pairs], step, rank)
    use([model for _, _, model, _ in pairs], step, dist.get_rank())
    for number, (reference, expected_optimizer, model, optimizer) in enumerate(pairs):
        if all(parameter.grad is None for parameter in reference.parameters()):
            continue
        for parameter in reference.parameters():
            parameter.grad /= dist.get_world_size()
        expected_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        compare_pieces(
            model, dict(model.named_parameters()), weights, f"{use.__name__}: model {number}"
        )


@pytest.mark.parametrize("level", LEVELS)
def test_models_are_trained_in_turn_and_through_one_another(ranks: Ranks, level: int) -> None:
    ranks(2, two_models, level)


class Around(nn.Module):
    """An unsharded module around a sharded one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH).double()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.before(x))


def inside_of_another(level: int) -> None:
    mesh = shard_mesh()
    torch.manual_seed(3)
    reference = Around(build())
    module = build()
    model, _optimizer = shard(module, level, mesh)
    around = Around(model)
    around.before.load_state_dict(reference.before.state_dict())
    expected = mean_gradients(reference, plain, 0)
    plain(around, 0, dist.get_rank())
    inside = {
        name.removeprefix("body."): value
        for name, value in expected.items()
        if name.startswith("body.")
    }
    compare_pieces(model, {name: p.grad for name, p in model.named_parameters()}, inside, "inside")
    local = around.before.weight.grad  # plain: nobody reduces it
    dist.all_reduce(local)
    close(local / dist.get_world_size(), expected["before.weight"], "outside")
    assert sum(
        1 for name, _ in around.named_parameters() if name.startswith("body.module.")
    ) == len(inside)
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(around, optimizer_over(around), mesh)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sharded_model_works_inside_an_unsharded_module(ranks: Ranks, level: int) -> None:
    ranks(2, inside_of_another, level)


# ---- hooks of users
# -------------------------------------------------------------------------------------------------


class Hooked(Stack):
    """Hooks that change what passes by, registered before the model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        block = self.blocks[1]
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda module, args, output: output + args[0].sin())
        block.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
        block.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2.0,))
        self.blocks[2].up.weight.register_hook(lambda gradient: gradient * 3.0)


def build_hooked() -> nn.Module:
    return Hooked().double()


def hook_afterwards(model: nn.Module) -> None:
    block = inner(model).blocks[0]
    block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    block.register_forward_hook(lambda module, args, output: output + args[0].sin())
    block.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2.0,))
    model.register_forward_hook(lambda module, args, output: output * 2)


def with_hooks() -> None:
    mesh = shard_mesh()
    for level in LEVELS:
        train_side_by_side(build_hooked, plain, level, prepare=hook_afterwards, mesh=mesh)


def test_hooks_of_users_change_the_same_numbers(ranks: Ranks) -> None:
    ranks(2, with_hooks)


def raise_value_error(*unused: Any) -> None:
    raise ValueError("told so")


def states_after_an_exception(interrupt: bool) -> set[str]:
    """What is gathered at level 3 after a forward that failed in the middle, and one that did not."""
    model, _ = shard(build(), 3)
    handle = model.module.blocks[1].up.register_forward_hook(
        raise_interrupt if interrupt else raise_value_error
    )
    for context in (torch.no_grad(), torch.enable_grad()):
        with pytest.raises((KeyboardInterrupt, ValueError)), context:
            model(batch(0, 0, 0))
    handle.remove()
    with torch.no_grad():
        model(batch(0, 0, 0))
    assert isinstance(model.module.blocks[1].up.weight, DTensor)
    return {group.state.name for group in model.groups}


@pytest.mark.parametrize("interrupt", [False, True], ids=["exception", "interrupt"])
def test_a_failed_forward_leaves_nothing_gathered_for_good(ranks: Ranks, interrupt: bool) -> None:
    """Torch calls no hooks after an interrupt, which is no Exception: the wrapper clears up."""
    assert ranks(2, states_after_an_exception, interrupt) == [{"SHARDED"}] * 2

# SPDX-License-Identifier: Apache-2.0
"""Parameters may be frozen before and after sharding."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.fsdp.meshes import Meshes, shard_mesh
from tests.support.fsdp.models import WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import (
    LEVELS,
    batch,
    compare_shards,
    loss_of,
    on_ranks,
    optimizer_over,
    shown_gradients,
)
from tests.support.fsdp.side_by_side import (
    Backward,
    compare_plain_gradients,
    inner,
    mean_gradients,
    plain_backward,
    shard,
    shard_two_layers,
    train_side_by_side,
    whole_weights,
)
from tests.support.fsdp.watched_communication import watching_reductions


def freeze_the_blocks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".blocks.1." in f".{name}" or name.endswith("embed.weight"):
            parameter.requires_grad_(False)


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_parameters_frozen_after_sharding_are_not_updated_and_thaw_again(level: int) -> None:
    mesh = shard_mesh()
    reference, model = train_side_by_side(
        build_stack, plain_backward, level, prepare=freeze_the_blocks, mesh=mesh
    )
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert len(frozen) == 6 and all(parameter.grad is None for parameter in frozen)
    for each in (reference, model):
        each.requires_grad_(True)
    compare_plain_gradients(model, reference, 5, "thawed")


def freeze_the_ways_in(model: nn.Module) -> None:
    """Freeze what each block computes with first, and so needs last in its backward."""
    for name, parameter in model.named_parameters():
        if ".norm." in name or ".up." in name:
            parameter.requires_grad_(False)


def pass_twice(model: nn.Module, step: int, rank: int) -> None:
    loss = loss_of(model(batch(step, rank, 0)))
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_partly_frozen_units_stay_unsharded_in_a_second_backward_over_one_graph(level: int) -> None:
    mesh = shard_mesh()
    train_side_by_side(build_stack, pass_twice, level, prepare=freeze_the_ways_in, mesh=mesh)

    def build_frozen() -> nn.Module:
        model = build_stack()
        freeze_the_ways_in(model)
        return model

    train_side_by_side(build_frozen, pass_twice, level, mesh=mesh)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_parameters_frozen_when_sharded_cannot_be_thawed(level: int) -> None:
    module = build_stack()
    module.embed.requires_grad_(False)
    model, _ = shard(module, level)
    dict(model.named_parameters())["module.embed.weight"].requires_grad_(True)
    with pytest.raises(RuntimeError) as error:
        plain_backward(model, 0, dist.get_rank())
    message = str(error.value)
    assert "embed.weight" in message and "frozen when the model was sharded" in message, message


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_freezing_the_modules_own_parameters_counts(level: int) -> None:
    model, optimizer = shard_two_layers(level)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.module[0].requires_grad_(False)
    before = whole_weights(model)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    assert [bool(torch.equal(old, new)) for old, new in zip(before, whole_weights(model))] == [
        True,
        True,
        False,
        False,
    ]


def second_block(model: nn.Module, way: str) -> Iterator[nn.Parameter]:
    """Yield the parameters of a block as a wrapper or a module lists them, or read by name."""
    if way == "wrapper" and isinstance(model, MegatronFSDP):
        yield from (each for name, each in model.named_parameters() if ".blocks.1." in name)
        return
    block = (model.module if isinstance(model, MegatronFSDP) else model).blocks[1]
    if way != "name":
        yield from block.parameters()
        return
    for module in (block.norm, block.up, block.down):
        yield module.weight
        if module.bias is not None:
            yield module.bias


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_freezing_in_one_way_and_thawing_in_another_ends_and_begins_reductions(level: int) -> None:
    torch.manual_seed(7)
    reference = build_stack()
    torch.manual_seed(7)
    model, _ = shard(build_stack(), level)
    plain_backward(model, 0, dist.get_rank())
    with watching_reductions() as with_all:
        plain_backward(model, 0, dist.get_rank())
    ways = ("module", "name", "wrapper")
    for freezes, thaws in zip(ways, ways[1:] + ways[:1]):
        for way, flag in ((freezes, False), (thaws, True)):
            for each in (model, reference):
                for parameter in second_block(each, way):
                    parameter.requires_grad_(flag)
            expected = mean_gradients(reference, plain_backward, 1)
            model.zero_grad()
            with watching_reductions() as found:
                plain_backward(model, 1, dist.get_rank())
            what = f"frozen by {freezes}, trained: {flag} by {way}"
            assert len(found) == len(with_all) - (not flag), what
            compare_shards(model, shown_gradients(model), expected, what)
            frozen = [p for p in model.parameters() if not p.requires_grad]
            assert len(frozen) == 0 if flag else len(frozen) == 5, what
            assert all(parameter.grad is None for parameter in frozen), what


def thaw_one(module: nn.Module, flag: bool) -> None:
    """Set all flags of a module, and then one the other way by name."""
    module.requires_grad_(not flag)
    module.head.weight.requires_grad_(flag)


def thaw_some_in_a_loop(module: nn.Module, flag: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(not flag)
    block = module.blocks[1]
    block.up.weight.requires_grad_(flag)
    block.requires_grad_(flag)
    block.down.weight.requires_grad_(not flag)


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_the_last_of_several_flags_counts_however_the_parameter_was_read(level: int) -> None:
    mesh = shard_mesh()
    for set_flags in (thaw_one, thaw_some_in_a_loop):
        torch.manual_seed(7)
        reference = build_stack()
        torch.manual_seed(7)
        model, _ = shard(build_stack(), level, mesh)
        for step, flag in enumerate((True, False, True)):
            set_flags(reference, flag)
            set_flags(model.module, flag)
            compare_plain_gradients(model, reference, step, f"{set_flags.__name__} in step {step}")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [2, 3])
@on_ranks(2)
def test_what_is_frozen_only_between_forward_and_backward_is_trained(level: int) -> None:
    """Evaluate with frozen parameters in between, as for the reference of a preference loss."""
    torch.manual_seed(7)
    reference = build_stack()
    torch.manual_seed(7)
    model, _ = shard(build_stack(), level)
    expected = mean_gradients(reference, plain_backward, 0)
    loss = loss_of(model(batch(0, dist.get_rank(), 0)))
    model.module.blocks[1].requires_grad_(False)
    with torch.no_grad():
        model(batch(1, 0, 0))
    model.module.blocks[1].requires_grad_(True)
    loss.backward()
    compare_shards(model, shown_gradients(model), expected, "gradient")


@on_ranks(2)
def test_thawing_a_model_that_was_wholly_frozen_is_refused_at_its_backward() -> None:
    module = build_stack().requires_grad_(False)
    model, _ = shard(module, 3)
    model.module.requires_grad_(True)
    output = model(batch(0, 0, 0))
    with pytest.raises(RuntimeError) as error:
        output.sum().backward()
    message = str(error.value)
    assert "frozen when the model was sharded" in message, message


# ---- frozen weights that a backward needs after the last gradient of a parameter


class FrozenFirst(nn.Module):
    """A trained layer after a frozen one, with a second input between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) + prompt)


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(FrozenFirst() for _ in range(2))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, prompt)
        return x


class FrozenLayers(Prompted):
    """Trains what comes before frozen units, and the prompt: their gradients come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)


class Lender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(WIDTH))


class Borrower(nn.Module):
    """Reads a frozen weight of another unit first, and a trained one last."""

    def __init__(self, lender: Lender) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.lender = [lender]

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        (lender,) = self.lender
        return self.own(torch.tanh(x @ lender.table) + prompt) * lender.scale


class Lending(Prompted):
    def __init__(self) -> None:
        super().__init__()
        self.lender = Lender()
        self.layers = nn.ModuleList(Borrower(self.lender) for _ in range(2))


def backward_once(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model(batch(step, rank, 0), batch(step, rank, 1))).backward()


def backward_to_a_trained_prompt(model: nn.Module, step: int, rank: int) -> None:
    prompt = batch(step, rank, 1).requires_grad_()
    loss_of(model(batch(step, rank, 0), prompt)).backward()


def backward_three_times(model: nn.Module, step: int, rank: int) -> None:
    loss = loss_of(model(batch(step, rank, 0), batch(step, rank, 1)))
    for _ in range(2):
        loss.backward(retain_graph=True)
    (2 * loss).backward()


def backward_to_the_prompt_first(model: nn.Module, step: int, rank: int) -> None:
    prompt = batch(step, rank, 1).requires_grad_()
    loss = loss_of(model(batch(step, rank, 0), prompt))
    (gradient,) = torch.autograd.grad(loss, prompt, retain_graph=True)
    (loss * gradient.sum().detach()).backward()


@pytest.mark.always("Prompted-*", "FrozenLayers-*", "Lending-backward_to_the_prompt_first")
@pytest.mark.parametrize(
    ("kind", "backward"),
    [
        (Prompted, backward_once),
        (FrozenLayers, backward_to_a_trained_prompt),
        (Lending, backward_three_times),
        (Lending, backward_to_the_prompt_first),
    ],
)
@on_ranks(2)
def test_frozen_weights_stay_until_the_gradients_that_pass_through_them_are_there(
    kind: type[nn.Module], backward: Backward
) -> None:
    mesh = shard_mesh()
    for level in (2, 3):
        units = [FrozenFirst, Lender, Borrower] if kind is Lending else [FrozenFirst]
        train_side_by_side(
            lambda: kind().double(), backward, level, mesh=mesh, fsdp_unit_modules=units
        )


# ---- gradients that come before a parameter is frozen


def freeze_between_microbatches(model: nn.Module, step: int, rank: int, when: str) -> None:
    """Freeze a block between microbatches, or other parameters after the last one."""
    no_sync = getattr(model, "no_sync", nullcontext)
    module = inner(model)
    module.requires_grad_(True)
    module.embed.bias.requires_grad_(False)
    module.embed.weight.requires_grad_(step == 0)
    with no_sync():
        loss_of(model(batch(step, rank, 0))).backward()
        module.embed.bias.requires_grad_(True)
        if when == "between":
            module.blocks[1].requires_grad_(False)
            module.head.bias.requires_grad_(False)
        loss_of(model(batch(step, rank, 1))).backward()
    module.blocks[2].up.requires_grad_(step == 1)
    loss_of(model(batch(step, rank, 2))).backward()
    if when == "after":
        module.blocks[0].requires_grad_(False)
    if isinstance(model, MegatronFSDP):
        model.finish_grad_sync()


@pytest.mark.always("2-*")
@pytest.mark.parametrize(
    ("num_ranks", "mesh", "when"), [(2, "flat", "between"), (4, "outer2", "after")]
)
@on_ranks()
def test_gradients_from_before_a_parameter_was_frozen_count(
    num_ranks: int, when: str, mesh: str
) -> None:
    meshes = Meshes()
    for level, sync in ((0, False), (1, True), (1, False), (2, False), (3, True)):
        torch.manual_seed(7)
        reference = build_stack()
        torch.manual_seed(7)
        module = build_stack()
        model, optimizer = fully_shard(
            module,
            optimizer_over(module),
            **meshes.arguments(mesh),
            zero_dp_strategy=level,
            fsdp_unit_modules=[ResidualBlock],
            preserve_fp32_weights=False,
            sync_model_each_microbatch=sync,
        )
        for step in range(3):
            reference.zero_grad()
            for rank in range(dist.get_world_size()):
                freeze_between_microbatches(reference, step, rank, when)
            freeze_between_microbatches(model, step, dist.get_rank(), when)
            expected = {
                name: each.grad / dist.get_world_size()
                for name, each in reference.named_parameters()
                if each.grad is not None
            }
            assert len(expected) == len(list(reference.parameters())) - (step > 0)
            shown = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            what = f"level {level}, synchronised: {sync}, step {step}"
            compare_shards(model, shown, expected, what)
            if step == 0:
                optimizer.zero_grad()
            else:  # as torch's zero_grad, which the next backward notices
                for parameter in model.parameters():
                    parameter.grad = None

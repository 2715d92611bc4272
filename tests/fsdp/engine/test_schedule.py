# SPDX-License-Identifier: Apache-2.0
"""Units are gathered, freed and reduced in any order of forwards and backwards."""

import collections
import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp import trace
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.gradients import GroupGradients
from megatron.fsdp.engine.observe import GATHER
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Schedule
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import WIDTH, Stack, TanhLayer, build_stack
from tests.support.fsdp.reference import (
    Ranks,
    batch,
    loss_of,
    on_ranks,
    optimizer_over,
    shard_with_sgd,
)
from tests.support.fsdp.side_by_side import (
    Backward,
    inner,
    plain_backward,
    shard,
    train_side_by_side,
)


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
    """Raise in a forward, which leaves units unsharded and a pass half recorded."""
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
    """Run several forwards, each on the output of the one before."""
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
    plain_backward(model, step, rank)


def units_called_alone(model: nn.Module, step: int, rank: int) -> None:
    """Call units outside of the forward of the whole model."""
    module = inner(model)
    loss_of(module.blocks[2](module.blocks[0](batch(step, rank, 0)))).backward()
    with torch.no_grad():
        module.blocks[1](batch(step, rank, 0))
    plain_backward(model, step, rank)


def an_empty_batch_on_one_rank(model: nn.Module, step: int, rank: int) -> None:
    x = batch(step, rank, 0)[: 0 if rank else None]
    model(x).sum().backward()


def a_loss_of_a_part(model: nn.Module, step: int, rank: int) -> None:
    """Train on a hidden state: the last unit's backward never runs."""
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


@pytest.mark.always("evaluation_in_between", "units_called_alone")
@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_gradients_and_weights_are_those_of_the_unsharded_model(use: str) -> None:
    mesh = shard_mesh()
    for level in (3, list(USES).index(use) % 3):
        train_side_by_side(build_stack, USES[use], level, mesh=mesh)


def raise_value_error(*unused: Any) -> None:
    raise ValueError("told so")


@pytest.mark.parametrize("interrupt", [False, True], ids=["exception", "interrupt"])
@on_ranks(2)
def test_a_failed_forward_leaves_no_unit_unsharded(interrupt: bool) -> None:
    """Look at groups after a forward that failed and one that did not.

    Torch calls no hooks after an interrupt, which is no Exception: the wrapper clears up.
    """
    model, _ = shard(build_stack(), 3)
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
    found = {group.state.name for group in model.groups}
    assert found == {"SHARDED"}, found


def order_of_communication(name: str) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    unshard, start = ParamGroup.begin_unshard, Schedule._start_reduction

    def watched_unshard(self: ParamGroup, all_gather: Pending) -> None:
        calls.append(("gather", self.names[0]))
        unshard(self, all_gather)

    def watched_start(self: Schedule, gradients: GroupGradients, **arguments: bool) -> None:
        calls.append(("reduce", str(gradients)))
        start(self, gradients, **arguments)

    module = models.build(name)
    with (
        patch.object(ParamGroup, "begin_unshard", watched_unshard),
        patch.object(Schedule, "_start_reduction", watched_start),
    ):
        model, optimizer = fully_shard(
            module, optimizer_over(module), shard_mesh(), fsdp_unit_modules=type(module).units
        )
        for step in range(3):
            loss_of(model(batch(step, dist.get_rank(), 0), step=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return calls


@pytest.mark.always("parallel_branches")
@pytest.mark.parametrize("name", ["parallel_branches", "tied_across_units", "unused_parameters"])
def test_collectives_have_one_order_on_all_ranks(ranks: Ranks, name: str) -> None:
    orders = ranks(4, order_of_communication, name)
    assert len(orders[0]) > 20
    assert all(order == orders[0] for order in orders)


class GivenWeight(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()


class TiedEmbedding(nn.Module):
    """A model whose output layer takes the embedding's weight as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.Sequential(*[TanhLayer() for _ in range(3)])
        self.output = GivenWeight()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(self.embedding(tokens)), weight=self.embedding.weight)


@on_ranks(2)
def test_a_unit_whose_weight_another_unit_uses_costs_no_extra_gathers() -> None:
    """Two gathers of every layer; the embedding is needed at both ends of both passes."""
    counts: collections.Counter = collections.Counter()
    original = ParamGroup.begin_unshard

    def counting(self: ParamGroup, all_gather: Pending) -> None:
        counts[self.names[0]] += 1
        original(self, all_gather)

    net = TiedEmbedding()
    model, optimizer = shard_with_sgd(net, fsdp_unit_modules=[TanhLayer, nn.Embedding, GivenWeight])
    tokens = torch.randint(16, (2, 4))
    for step in range(3):
        if step == 2:
            ParamGroup.begin_unshard = counting
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ParamGroup.begin_unshard = original
    assert {name: count for name, count in counts.items() if "layers" in name} == {
        f"layers.{number}.linear.weight": 2 for number in range(3)
    }, counts
    assert counts["embedding.weight"] <= 4, counts


def states_after_a_step(overlap: bool) -> list[str]:
    """Return the state of the weights after a step, and when they have been asked for."""
    model, optimizer = shard_with_sgd(
        nn.Linear(8, 8), zero_dp_strategy=2, overlap_param_gather=overlap
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    (group,) = model.groups
    states = [group.state.name]
    model.start_param_sync()
    return [*states, group.state.name]


def test_gathers_after_a_step_overlap_only_if_asked_to(ranks: Ranks) -> None:
    assert ranks(2, states_after_a_step, False) == [["STALE", "UNSHARDED"]] * 2
    assert ranks(2, states_after_a_step, True) == [["STALE", "UNSHARDING"]] * 2


@on_ranks(2)
def test_the_last_of_several_optimizers_starts_the_gathers_of_the_next_forward() -> None:
    module = models.Stack()
    model = fully_shard_model(module, fsdp_unit_modules=[models.ResidualBlock], zero_dp_strategy=3)
    parameters = list(model.parameters())
    first, second = (
        fully_shard_optimizer(torch.optim.SGD(half, lr=0.1))
        for half in (parameters[::2], parameters[1::2])
    )

    def step() -> None:
        for is_last in (False, True):
            with nullcontext() if is_last else model.no_sync():
                loss_of(model(torch.randn(models.BATCH, WIDTH))).backward()
        for optimizer in (first, second):
            optimizer.step()
            model.start_param_sync()  # as Megatron-Core's optimizers do

    for _ in range(2):
        step()
    with trace.record() as recorder:
        step()
    gathers = [entry for entry in recorder.entries if entry.track == GATHER and entry.is_collective]
    units = [entry.unit for entry in gathers if entry.phase == "step"]
    assert units == ["root", "blocks.0"], units


class Tree(nn.Module):
    """A model that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth == 0:
            return self.linear(x) * self.scale
        return self(x, depth - 1) + self.linear(self(x * 2, depth - 1)) * self.scale


@on_ranks(2)
def test_a_model_may_call_itself() -> None:
    torch.manual_seed(0)
    module = Tree().double()
    reference = copy.deepcopy(module)
    model = fully_shard_model(module, preserve_fp32_weights=False)
    for step in range(2):
        x = torch.full((2, 4), step + 1.0, dtype=torch.float64)
        for each in (model, reference):
            each.zero_grad()
            each(x).pow(2).mean().backward()
        for sharded, parameter in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(full_tensor(sharded.grad), parameter.grad)


class ReadsWeightsOfItsLayers(Stack):
    """Computes with a layer's weight before it calls the layer, whose backward thus ends first."""

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        weight = self.blocks[0].up.weight
        early = torch.tanh(x @ weight.t()) @ weight
        return self.head(self.body(self.embed(x) + early, step))

    def method(self, x: Tensor) -> Tensor:
        weight = self.blocks[1].up.weight
        return torch.tanh(x @ weight.t()) @ weight + self.body(self.embed(x), 0)


def read_in_a_method(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model.method(batch(step, rank, 0))).backward()


@on_ranks(2)
def test_weights_that_were_read_before_their_layer_was_called_stay_for_that_backward() -> None:
    mesh = shard_mesh()
    for level, backward in itertools.product((2, 3), (plain_backward, read_in_a_method)):
        train_side_by_side(lambda: ReadsWeightsOfItsLayers().double(), backward, level, mesh=mesh)


class TwoHeads(nn.Module):
    """Blocks over a raw input, and two heads in the root, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.ResidualBlock() for _ in range(3))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.first(x) + (self.second(x) if both else 0)


def build_two_heads() -> nn.Module:
    torch.manual_seed(3)
    return TwoHeads().double()


def use_both_heads_on_one_rank(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model(batch(step, rank, 0), both=rank == 0)).backward()


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", [1, 2, 3])
@on_ranks(2)
def test_ranks_may_use_different_parameters_of_a_unit_whose_inputs_need_no_gradients(
    level: int,
) -> None:
    """Units were reduced when all of their parameters had gradients, in another order each."""
    train_side_by_side(
        build_two_heads, use_both_heads_on_one_rank, level, find_unused_parameters=True
    )


@on_ranks(2)
def test_a_reduction_that_fails_is_told_once() -> None:
    """Run a backward, `zero_grad`, and another forward and backward."""
    model, optimizer = shard(build_stack(), 3)
    reduce_scatter = Communicator.reduce_scatter
    reductions: list[Pending] = []

    def fail() -> None:
        raise RuntimeError("connection reset")

    def fail_once(self: Communicator, full: Tensor, shard: Tensor) -> Pending:
        reductions.append(reduce_scatter(self, full, shard))
        if len(reductions) > 1:
            return reductions[-1]
        reductions[0].wait()
        return Pending(fail)

    def error_of(what: Callable[[], object]) -> str:
        try:
            what()
        except RuntimeError as error:
            return str(error)
        return ""

    with patch.object(Communicator, "reduce_scatter", fail_once):
        backward = partial(plain_backward, model, 0, dist.get_rank())
        errors = [error_of(each) for each in (backward, optimizer.zero_grad, backward)]
    assert errors == ["connection reset", "", ""], errors

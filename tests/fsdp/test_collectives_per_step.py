# SPDX-License-Identifier: Apache-2.0
"""The number of collectives of a step, beside FSDP2's with the same units, and when none is due."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fully_shard_by_torch
from torch.profiler import ProfilerActivity, profile

from megatron.fsdp import trace
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.observe import GATHER, REDUCE
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import TanhLayer
from tests.support.fsdp.reference import Ranks, on_ranks, shard_with_sgd

NUM_LAYERS = 5


class LanguageModel(nn.Module):
    """A model with small modules before its layers, and after them if it has a head."""

    def __init__(self, has_head: bool = True) -> None:
        super().__init__()
        self.has_head = has_head
        self.embedding = nn.Embedding(3, 8)
        self.positions = nn.Embedding(2, 8)
        self.layers = nn.ModuleList(TanhLayer() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x)) if self.has_head else x
        return result


class LayersCalledTwice(LanguageModel):
    """Layers that are each called twice, one after the other or all of them again."""

    def __init__(self, in_a_row: bool) -> None:
        super().__init__()
        self.in_a_row = in_a_row

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for number in range(2 * NUM_LAYERS):
            x = self.layers[number // 2 if self.in_a_row else number % NUM_LAYERS](x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


TOKENS = torch.tensor([[0, 2], [1, 1]])


def num_collectives_of_torch(step: Callable[[], object]) -> int:
    """Return how many operations gloo runs in one step, after two others."""
    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    return sum(event.name.startswith("gloo:") for event in profiled.events())


def num_collectives_of_ours(step: Callable[[], object]) -> int:
    """Return how many collectives the engine launches in one step, after two others.

    On CPU ranks some of them are sends and receives.
    """
    for _ in range(2):
        step()
    with trace.record() as recorder:
        step()
    return len(recorder.collectives)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_microbatches: int
) -> Callable[[], object]:
    def step() -> None:
        for _ in range(num_microbatches):
            model(TOKENS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def both_counts(
    num_microbatches: int, build: Callable[..., LanguageModel], *arguments: object
) -> tuple[int, int]:
    """Return the collectives of one step of this engine and of FSDP2, both at level 3."""
    module = build(*arguments)
    ours = shard_with_sgd(module, shard_mesh(), fsdp_unit_modules=[type(module.layers[0])])
    by_torch = build(*arguments)
    for layer in by_torch.layers:
        fully_shard_by_torch(layer)
    fully_shard_by_torch(by_torch)
    theirs = by_torch, torch.optim.SGD(by_torch.parameters(), lr=0.1)
    return (
        num_collectives_of_ours(step_of(*ours, num_microbatches)),
        num_collectives_of_torch(step_of(*theirs, num_microbatches)),
    )


@pytest.mark.always("2-True")
@pytest.mark.parametrize(("num_microbatches", "has_head"), [(1, False), (2, True)])
def test_a_step_has_fewer_collectives_than_fsdp2(
    ranks: Ranks, num_microbatches: int, has_head: bool
) -> None:
    """Per microbatch: the root once and layers twice, but the last one once; a reduction each.

    Without a head, the last layer computes the output of the model too.
    """
    (ours, theirs), _ = ranks(2, both_counts, num_microbatches, LanguageModel, has_head)
    gathers = 1 + 2 * NUM_LAYERS - 1
    assert ours == num_microbatches * (gathers + 1 + NUM_LAYERS)
    assert ours < theirs


@pytest.mark.always("True")
@pytest.mark.parametrize("in_a_row", [True, False])
def test_layers_called_twice_have_fewer_collectives_than_in_fsdp2(
    ranks: Ranks, in_a_row: bool
) -> None:
    """Between two calls in a row, and their backwards, a layer stays unsharded."""
    (ours, theirs), _ = ranks(2, both_counts, 1, LayersCalledTwice, in_a_row)
    gathers = 2 * NUM_LAYERS if in_a_row else 4 * NUM_LAYERS
    assert ours == 1 + gathers - 1 + 1 + NUM_LAYERS
    assert ours < theirs


@pytest.mark.always("2")
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@on_ranks(2)
def test_all_layers_in_the_window_stay_unsharded_for_backward(num_layers: int) -> None:
    """Next to the one that computes, so many are unsharded at most."""
    module = LanguageModel()
    layer_bytes = sum(parameter.nbytes for parameter in module.layers[0].parameters())
    model, optimizer = fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        shard_mesh(),
        fsdp_unit_modules=[TanhLayer],
        suggested_communication_unit_size=int((num_layers + 0.5) * layer_bytes),  # with padding
    )
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, sum(group.compute.is_allocated for group in model.groups[1:]))

    for layer in module.layers:
        layer.register_forward_pre_hook(count)
        layer.register_full_backward_pre_hook(count)
    step = step_of(model, optimizer, 1)
    for _ in range(2):
        step()
    with trace.record() as recorder:
        step()
    gathers = sum(entry.track == GATHER for entry in recorder.collectives)
    assert gathers == 1 + 2 * NUM_LAYERS - num_layers, gathers
    assert most == 1 + num_layers, most


class CrossLayer(nn.Module):
    """A layer that reads the same memory as its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + self.cross(memory))


class Decoder(nn.Module):
    """Layers over a memory that is computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.layers = nn.ModuleList(CrossLayer() for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor, is_trained: bool) -> torch.Tensor:
        memory = self.encoder(x)
        for layer in self.layers:
            x = layer(x, memory=memory if is_trained else memory.detach())
        return x


def order_over_a_memory(is_trained: bool) -> list[str]:
    """Return the collectives of the layers in a step, whose gradients are those without shards."""
    torch.manual_seed(0)
    module = Decoder().double()
    plain = copy.deepcopy(module)
    policy = MixedPrecisionPolicy(torch.float64, torch.float64, torch.float64)
    model = fully_shard_model(
        module, shard_mesh(), fsdp_unit_modules=[CrossLayer], mixed_precision_policy=policy
    )
    x = torch.randn(3, 8, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        with trace.record() as recorder:
            model(x, is_trained).square().sum().backward()
    plain(x, is_trained).square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
        if other.grad is not None:
            torch.testing.assert_close(full_tensor(parameter.grad), other.grad, msg=name)
    entries = [entry for entry in recorder.collectives if entry.unit.startswith("layers")]
    return [f"{entry.name} {entry.unit}" for entry in entries]


def test_layers_that_share_an_input_end_their_backward_one_by_one(ranks: Ranks) -> None:
    # The gradient of the memory is complete after the last of them.
    shared, alone = (ranks(2, order_over_a_memory, is_trained)[0] for is_trained in (True, False))
    assert shared == alone and shared.index("reduce_scatter layers.4") < len(shared) - NUM_LAYERS


class SideBySide(nn.Module):
    """Layers over one input, whose results are added."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.layers = nn.ModuleList(TanhLayer() for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        results = [layer(x) for layer in self.layers]
        return torch.stack(results).sum(0)


@on_ranks(2)
def test_layers_side_by_side_end_their_backward_one_by_one() -> None:
    model = fully_shard_model(SideBySide(), shard_mesh(), fsdp_unit_modules=[TanhLayer])
    x = torch.randn(3, 8)
    model(x).sum().backward()
    output = model(x)
    with trace.record() as recorder:
        output.sum().backward()
    entries = [entry for entry in recorder.collectives if entry.unit.startswith("layers")]
    order = [f"{entry.name} {entry.unit}" for entry in entries]
    assert order.index("reduce_scatter layers.4") < order.index("all_gather layers.1")


@on_ranks(2)
def test_a_frozen_root_is_gathered_once_in_a_step() -> None:
    """Train a root that has frozen modules before and after layers."""
    module = LanguageModel()
    for name, child in module.named_children():
        child.requires_grad_(name == "layers")
    model = fully_shard_model(module, shard_mesh(), fsdp_unit_modules=[TanhLayer])
    for _ in range(2):
        with trace.record() as recorder:
            model(TOKENS).sum().backward()
    units = [entry.unit for entry in recorder.collectives]
    assert units.count("root") == 1, units


def check_gradients(model: MegatronFSDP) -> None:
    for _, parameter in model.named_parameters():
        assert full_tensor(parameter.grad).abs().sum() > 0


@pytest.mark.always("0-no_sync", "1-*")
@pytest.mark.parametrize(
    ("level", "way"), [(0, "no_sync"), (0, "argument"), (1, "auto_sync"), (1, "argument")]
)
@on_ranks(2)
def test_nothing_is_reduced_before_the_end_of_a_step(level: int, way: str) -> None:
    """Count the reductions that two backward passes start, and then the end of the step."""
    model = fully_shard_model(
        LanguageModel(),
        shard_mesh(),
        zero_dp_strategy=level,
        fsdp_unit_modules=[TanhLayer],
        sync_model_each_microbatch=way != "argument",
    )
    if way == "auto_sync":
        model.set_model_auto_sync(False)

    def two_passes() -> None:
        for _ in range(2):
            with model.no_sync() if way == "no_sync" else nullcontext():
                model(TOKENS).sum().backward()

    def reductions(part: Callable[[], object]) -> int:
        with trace.record() as recorder:
            part()
        return sum(entry.track == REDUCE for entry in recorder.entries)

    counts = [reductions(two_passes), reductions(model.finish_grad_sync)]
    check_gradients(model)
    assert counts == [0, 1 + NUM_LAYERS], counts


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [0, 1])
@on_ranks(2)
def test_no_sync_counts_for_one_step(level: int) -> None:
    """Count the reductions of each pass, of which the first is in `no_sync`."""
    model = fully_shard_model(
        LanguageModel(),
        shard_mesh(),
        zero_dp_strategy=level,
        fsdp_unit_modules=[TanhLayer],
        sync_model_each_microbatch=False,
    )
    counts = []
    for context in (model.no_sync(), nullcontext(), nullcontext(), nullcontext()):
        with context, trace.record() as recorder:
            model(TOKENS).sum().backward()
        counts.append(sum(entry.track == REDUCE for entry in recorder.entries))
    assert counts == [0, 1 + NUM_LAYERS, 0, 0], counts

# SPDX-License-Identifier: Apache-2.0
"""Small odd models: each has one property that sharding gets wrong easily.

Every model maps `(x [batch, WIDTH], step)` to tensors in some nest; `units` are its unit classes.
Widths are odd, so that no number of ranks divides them.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.fsdp.returned_weights import AddsTheBias, BiasApart

WIDTH, HIDDEN, BATCH = 5, 7, 3

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class UnitOutput:
    hidden: Tensor
    extra: dict[str, Tensor]


class ResidualBlock(nn.Module):
    """A feed-forward layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Parameters of its own around three units; base of most models here."""

    units: tuple[type, ...] = (ResidualBlock,)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, step: int = 0) -> object:
        return self.head(self.body(self.embed(x), step))

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class WithoutUnits(Stack):
    units = ()


class EverythingIsAUnit(Stack):
    """Nothing is left for the root."""

    units = (ResidualBlock, nn.Linear)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mix = (
            ResidualBlock(),
            ResidualBlock(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.mix(self.first(x))) + self.mix(x)


class Nested(Stack):
    units = (ResidualBlock, Outer)

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList([Outer(), Outer()])

    def body(self, x: Tensor, step: int) -> Tensor:
        return super().body(self.outer[1](self.outer[0](x)), step)


class CalledTwice(Stack):
    def body(self, x: Tensor, step: int) -> Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[0](x))) + self.blocks[2](x)


class ParallelBranches(Stack):
    def body(self, x: Tensor, step: int) -> Tensor:
        return self.blocks[2](self.blocks[0](x) * self.blocks[1](x))


class TiedAcrossUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class TiedHead(nn.Module):
    """A head that projects with a weight it receives, and adds a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t() + self.bias


class WeightAsArgument(nn.Module):
    """The output layer uses the weight of another unit (a tied embedding in Megatron-Core)."""

    units = (ResidualBlock, Table, TiedHead)

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = Table(), ResidualBlock(), TiedHead()

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.head(self.block(self.table(x)), weight=self.table.weight)


class Unused(Stack):
    """A parameter inside a unit, one of the root and a whole unit that no forward touches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].unused = nn.Parameter(torch.randn(3, 2))
        self.unused = nn.Parameter(torch.randn(4))
        self.unused_block = ResidualBlock()


class UnusedInSomeSteps(Stack):
    def body(self, x: Tensor, step: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            if (number + step) % 3:
                x = block(x)
        return x


class FrozenInPart(Stack):
    """A whole unit, the root's first layer and some parameters of a unit are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (
            *self.embed.parameters(),
            *self.blocks[1].parameters(),
            self.blocks[2].up.weight,
        ):
            parameter.requires_grad_(False)


class FrozenAtTheBottom(Stack):
    """The first unit's output needs no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Scalars(Stack):
    """0-d parameters in a unit and in the root."""

    units = (ResidualBlock, Scaled)

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def body(self, x: Tensor, step: int) -> Tensor:
        return super().body(self.scaled(x), step) * self.temperature


class Splitting(nn.Module):
    """A unit that returns a dataclass or a nest of named tuples, dicts and lists."""

    def __init__(self, nest: bool) -> None:
        super().__init__()
        self.nest, self.block, self.side = nest, ResidualBlock(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> object:
        hidden, side = self.block(x), self.side(x)
        if self.nest:
            return Pair({"hidden": hidden, "none": None}, [side, (side.sum(), "text", 3)])
        return UnitOutput(hidden=hidden, extra={"side": side})


class OddOutputs(Stack):
    units = (ResidualBlock, Splitting)

    def __init__(self) -> None:
        super().__init__()
        self.as_nest, self.as_dataclass = Splitting(nest=True), Splitting(nest=False)

    def forward(self, x: Tensor, step: int = 0) -> object:
        nest = self.as_nest(self.embed(x))
        output = self.as_dataclass(nest.left["hidden"])
        body = self.body(output.hidden, step)
        return {
            "out": UnitOutput(self.head(body), output.extra),
            "sides": (nest.right[0], nest.right[1][0]),
        }


class EditsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        return self.linear(torch.relu_(x)) + x


class InPlace(Stack):
    """Inputs of units are edited by the unit, outputs by the caller."""

    units = (ResidualBlock, EditsItsInput)

    def __init__(self) -> None:
        super().__init__()
        self.editing = EditsItsInput()

    def body(self, x: Tensor, step: int) -> Tensor:
        hidden = self.editing(x)
        hidden.add_(1.0)
        hidden = super().body(hidden, step)
        return hidden.mul_(0.5)


class ReturnsAView(nn.Module):
    """A linear layer returns a view of an input with three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.unsqueeze(0))


class ViewEditedInPlace(Stack):
    """The output of a unit is a view, which the caller edits."""

    units = (ResidualBlock, ReturnsAView)

    def __init__(self) -> None:
        super().__init__()
        self.returns_view = ReturnsAView()

    def body(self, x: Tensor, step: int) -> Tensor:
        hidden = self.returns_view(super().body(x, step))
        hidden += 1.0
        return hidden[0].mul_(0.5)


class CheckpointsInside(nn.Module):
    """A unit that checkpoints a part of itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.block, self.last = reentrant, ResidualBlock(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant))


class Checkpointed(Stack):
    """Activation checkpointing around units, around several at once, and inside units."""

    units = (ResidualBlock, CheckpointsInside)

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inside = nn.ModuleList([CheckpointsInside(reentrant), CheckpointsInside(reentrant)])

    def body(self, x: Tensor, step: int) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=self.reentrant)
        for inside in self.inside:
            x = inside(x)
        return checkpoint(self.inside[0], x, use_reentrant=self.reentrant)


class CheckpointsInsideOnly(Checkpointed):
    """The part inside a unit that is recomputed is no unit itself."""

    units = (CheckpointsInside,)


class WithPositions(nn.Module):
    """A unit in which the gradients of learned positions come after that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(BATCH, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(torch.tanh(self.positions))))


class LeafInput(Stack):
    """A unit is called on a leaf that wants a gradient itself."""

    units = (ResidualBlock, WithPositions)

    def __init__(self) -> None:
        super().__init__()
        self.start = WithPositions()

    def forward(self, x: Tensor, step: int = 0) -> object:
        return self.head(self.body(self.start(x.detach().requires_grad_()), step))


class CalledUnderNoGrad(Stack):
    """A unit serves as a fixed target first, and is trained in the same forward."""

    def body(self, x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            target = self.blocks[0](x)
        return super().body(x, step) + target


class WithKeywords(Stack):
    """Units get nothing by position, and are reached from a list that shares them."""

    def body(self, x: Tensor, step: int) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x=x)
        return x


class ReturnsWeights(Stack):
    """Weights leave their units in results, and the callers read them after that."""

    units = (ResidualBlock, BiasApart)

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList(AddsTheBias(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, step: int = 0) -> object:
        x = self.inside[0](self.embed(x))
        x = checkpoint(self.inside[1], x, use_reentrant=True)
        x = checkpoint(self.inside[2], x, use_reentrant=False)
        return self.head(self.body(x, step))


class NestedReturnsWeights(ReturnsWeights):
    units = (ResidualBlock, AddsTheBias, BiasApart)


class TanhLayer(nn.Module):
    """A layer of width 8, which ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "several_units": Stack,
    "no_units": WithoutUnits,
    "everything_is_a_unit": EverythingIsAUnit,
    "nested_units": Nested,
    "unit_called_twice": CalledTwice,
    "parallel_branches": ParallelBranches,
    "tied_across_units": TiedAcrossUnits,
    "tied_weight_as_argument": WeightAsArgument,
    "unused_parameters": Unused,
    "unit_unused_in_some_steps": UnusedInSomeSteps,
    "frozen_in_part": FrozenInPart,
    "frozen_at_the_bottom": FrozenAtTheBottom,
    "scalars": Scalars,
    "odd_outputs": OddOutputs,
    "edits_in_place": InPlace,
    "view_edited_in_place": ViewEditedInPlace,
    "checkpoint_reentrant": partial(Checkpointed, True),
    "checkpoint_non_reentrant": partial(Checkpointed, False),
    "checkpoint_inside_reentrant": partial(CheckpointsInsideOnly, True),
    "checkpoint_inside_non_reentrant": partial(CheckpointsInsideOnly, False),
    "leaf_input": LeafInput,
    "called_under_no_grad": CalledUnderNoGrad,
    "keyword_inputs": WithKeywords,
    "returned_weights": ReturnsWeights,
    "returned_weights_in_nested_units": NestedReturnsWeights,
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build the model `name` on the CPU, with the same weights at every call."""
    torch.default_generator.manual_seed(7)
    return MODELS[name]().to(dtype)


def build_stack() -> Stack:
    """Build the model of most tests: its own parameters around three units, in float64."""
    return build("several_units")

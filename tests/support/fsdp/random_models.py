# SPDX-License-Identifier: Apache-2.0
"""Models drawn at random: sizes, ties, frozen parts, recomputation, repeated calls, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.fsdp.models import WIDTH


@dataclass(frozen=True)
class DrawnLayer:
    """One block of a drawn model."""

    hidden: int
    bias: bool = True
    norm: bool = False
    scale: str = ""  # a parameter of the block itself: "vector" or "scalar"
    recompute: str = ""  # "reentrant" or "non_reentrant"
    calls: int = 1
    unused: bool = False  # one of its parameters never adds to the output
    frozen: tuple[str, ...] = ()  # parameters that are not trained
    num_experts: int = 0


@dataclass(frozen=True)
class Drawn:
    """A drawn model. It is built by `DrawnModel`, with the same weights at every call."""

    layers: tuple[DrawnLayer, ...]
    seed: int = 0
    tied_layers: tuple[int, int] | None = None  # their up projections are one parameter
    # "linear", "tied" with the embedding, "functional": the code reads the embedding's weight
    head: str = "linear"
    frozen_embedding: bool = False
    marks_embeddings: bool = False  # as Megatron-Core does, the output layer too
    skip: int | None = None  # a layer that odd steps leave out
    is_output_a_dict: bool = False


class Up(nn.Module):
    """A linear map into one or several heads; odd shapes with three dims."""

    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, WIDTH, 1) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(hidden)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.squeeze(-1), self.bias)


class Experts(nn.Module):
    """Some of the experts of a layer: every token goes to all, weighted by its first feature.

    With expert parallelism ranks own different ones: the tokens of the group are gathered, and its
    outputs added up.
    """

    def __init__(self, num_experts: int, hidden: int, places: ExpertPlaces) -> None:
        super().__init__()
        everything = [
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH, bias=False))
            for _ in range(num_experts)
        ]
        each = num_experts // places.size
        self.first = places.rank * each
        self.num_experts = num_experts
        self.local = nn.ModuleList(everything[self.first : self.first + each])
        self.group = places.group

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.group is None else GatherTokens.apply(x, self.group)
        weights = torch.softmax(
            tokens[:, :1] * torch.arange(1, self.num_experts + 1).to(tokens), dim=-1
        )
        result = sum(
            expert(tokens) * weights[:, self.first + number, None]
            for number, expert in enumerate(self.local)
        )
        return result if self.group is None else ScatterSums.apply(result, self.group)


@dataclass
class ExpertPlaces:
    """The experts of a rank: number `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1
    group: Any = None


class GatherTokens(torch.autograd.Function):
    """The tokens of all ranks of a group; gradients go back to whose token it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return scatter_sum(gradient, ctx.group), None


class ScatterSums(torch.autograd.Function):
    """The sum over the ranks of a group of what they computed for this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return gather(gradient, ctx.group), None


def gather(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def scatter_sum(x: Tensor, group: Any) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class DrawnBlock(nn.Module):
    def __init__(self, layer: DrawnLayer, places: ExpertPlaces) -> None:
        super().__init__()
        self.layer = layer
        self.norm = nn.LayerNorm(WIDTH) if layer.norm else nn.Identity()
        self.up = Up(layer.hidden, layer.bias)
        self.down = nn.Linear(layer.hidden, WIDTH, bias=layer.bias)
        self.scale = (
            nn.Parameter(torch.randn(() if layer.scale == "scalar" else WIDTH))
            if layer.scale
            else None
        )
        self.spare = nn.Parameter(torch.randn(3, 2)) if layer.unused else None
        self.experts = (
            Experts(layer.num_experts, layer.hidden, places) if layer.num_experts else None
        )
        for name in layer.frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        if self.scale is not None:
            y = y * self.scale
        if self.experts is not None:
            y = y + self.experts(x)
        return x + y / 2


class DrawnModel(nn.Module):
    units = (DrawnBlock,)

    def __init__(self, drawn: Drawn, places: ExpertPlaces | None = None) -> None:
        super().__init__()
        places = places or ExpertPlaces()
        torch.manual_seed(drawn.seed)
        self.drawn = drawn
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(DrawnBlock(layer, places) for layer in drawn.layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = (
            None
            if drawn.head == "functional"
            else nn.Linear(WIDTH, WIDTH, bias=drawn.head != "tied")
        )
        if drawn.head == "tied":
            self.head.weight = self.embed.weight
        if drawn.tied_layers:
            first, second = (self.layers[number].up for number in drawn.tied_layers)
            second.weight = first.weight
        self.embed.requires_grad_(not drawn.frozen_embedding)
        if drawn.marks_embeddings:
            for module in (self.embed, self.head):
                for parameter in module.parameters():
                    parameter.is_embedding_or_output_parameter = True

    def forward(self, x: Tensor, step: int = 0) -> object:
        x = self.embed(x)
        for number, block in enumerate(self.layers):
            if number == self.drawn.skip and step % 2:
                continue
            for _ in range(block.layer.calls):
                x = self.call(block, x)
        x = self.norm(x)
        y = nn.functional.linear(x, self.embed.weight) if self.head is None else self.head(x)
        return {"y": y, "x": [x]} if self.drawn.is_output_a_dict else y

    @staticmethod
    def call(block: DrawnBlock, x: Tensor) -> Tensor:
        kind = block.layer.recompute
        if kind == "reentrant" and not x.requires_grad:
            kind = ""  # torch would leave the block without gradients, and warn
        return (
            checkpoint(block, x, use_reentrant=kind == "reentrant")
            if kind and torch.is_grad_enabled()
            else block(x)
        )

    def global_name(self, name: str) -> str:
        """Return the name that a parameter has in the model with all experts."""
        parts = name.split(".")
        if "experts" in parts:
            place = parts.index("local") + 1
            first = self.get_submodule(".".join(parts[: place - 1])).first
            parts[place] = str(int(parts[place]) + first)
        return ".".join(parts)

# SPDX-License-Identifier: Apache-2.0
"""Adapters of which one is trained at a time are switched by a method of the model."""

import pytest
from torch import Tensor, nn

from tests.support.fsdp.models import WIDTH, ResidualBlock
from tests.support.fsdp.reference import batch, on_ranks
from tests.support.fsdp.side_by_side import plain_backward, train_side_by_side


class TwoAdapters(nn.Module):
    """A frozen layer and two adapters, of which one is trained at a time, as PEFT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = ResidualBlock().requires_grad_(False)
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.double()

    def set_adapter(self, names: str) -> None:
        """Use the first of the named adapters, and train all of them."""
        self.active = names[0]
        for name, adapter in self.adapters.items():
            adapter.requires_grad_(name in names)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.adapters[self.active](x)


@pytest.mark.parametrize(
    ("level", "frozen_first"), [(0, True), (1, False), (2, True), (3, True), (3, False)]
)
@on_ranks(2)
def test_adapters_are_switched_through_the_wrapper(level: int, frozen_first: bool) -> None:
    """Use the second adapter between two steps of the first; train it too if it may be."""
    trained = "a" if frozen_first else "ab"

    def switch(model: nn.Module, step: int, rank: int) -> None:
        model.set_adapter("b")
        assert sum(parameter.requires_grad for parameter in model.parameters()) == 2
        if frozen_first:
            model(batch(step, rank, 1))  # evaluated, with a graph that nobody needs
        else:
            plain_backward(model, step, rank)
        model.set_adapter("a")
        plain_backward(model, step, rank)
        model.set_adapter(trained)

    def build() -> nn.Module:
        model = TwoAdapters()
        model.set_adapter(trained)
        return model

    _, model = train_side_by_side(build, switch, level)
    if frozen_first:
        model.set_adapter("b")
        with pytest.raises(RuntimeError, match=r"adapters\.b\.weight.*frozen when"):
            plain_backward(model, 0, 0)
        model.set_adapter("a")
        plain_backward(model, 0, 0)

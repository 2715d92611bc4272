# SPDX-License-Identifier: Apache-2.0
"""Layers that return their weights, for their callers to use."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class WithExtra:
    hidden: Tensor
    extra: dict[str, Tensor]


class BiasApart(nn.Linear):
    """Returns its bias, as Megatron-Core's layers do, and a view of its weight."""

    def __init__(self, form: str, width: int) -> None:
        super().__init__(width, width)
        self.form = form

    def forward(self, x: Tensor) -> object:
        hidden = nn.functional.linear(x, self.weight)
        if self.form == "tuple":
            return hidden, (self.bias, self.weight[1:2])
        if self.form == "dict":
            return {"hidden": hidden, "extra": [self.bias, self.weight.t()[:1]]}
        return WithExtra(hidden, {"bias": self.bias, "row": self.weight.view(-1)[: len(self.bias)]})


class AddsTheBias(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        forms = ("tuple", "dict", "dataclass")
        self.layers = nn.ModuleList(BiasApart(form, width) for form in forms)

    def forward(self, x: Tensor) -> Tensor:
        hidden, (bias, row) = self.layers[0](x)
        x = torch.tanh(hidden + bias) * row
        output = self.layers[1](x)
        x = torch.tanh(output["hidden"]) * output["extra"][0] + output["extra"][1]
        output = self.layers[2](x)
        return output.hidden * output.extra["row"] + output.extra["bias"]

# SPDX-License-Identifier: Apache-2.0
"""Names for the last program of docs/coming_from_megatron_fsdp.md, and its check."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.fsdp.in_place import whole_weights


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def loss_of(model: nn.Module, step: int, number: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))
    return model(x).pow(2).mean()


def before_second_generation() -> dict[str, Any]:
    return {"model": build(), "loss": loss_of, "init_device_mesh": init_device_mesh}


def the_model_is_that_of_one_process(names: dict[str, Any]) -> None:
    reference = build()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=3e-4)
    for step in range(3):
        for number in range(2):
            sum(loss_of(reference, step, number, rank) / 2 for rank in range(2)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in whole_weights(names["model"]).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), msg=name)
    assert type(names["model"].layers[0]).__name__ == "FSDPSequential"

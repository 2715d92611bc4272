# SPDX-License-Identifier: Apache-2.0
"""Trainings on the model whose units, or whole iterations, are captured as graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.cuda_model.machine import cuda_model
from tests.support.examples.blocks import python_of
from tests.support.fsdp.meshes import Meshes

PAGE = "docs/gpus.md"

STEPS, WIDTH = 5, 6


class Body(nn.Sequential):
    """Two linear layers, which a layer of the page computes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))


def layer_of_the_page() -> Any:
    """Return the class of the page, a unit whose compute is captured."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "Body": Body}
    exec(python_of(PAGE)[0].code, names)
    return names["Layer"]


def values_of(number: int) -> Tensor:
    """Return the batch of a step on this rank."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def trained(captures: str, mesh: str, dtype: torch.dtype, **settings: Any) -> Any:
    """Train; return losses, weights, the number of replays, and what was reported."""
    # `captures` is "units", "iteration", or "" for a training without graphs.
    with cuda_model() as model_of_cuda:
        torch.manual_seed(1)
        layer_class = layer_of_the_page()
        module = nn.Sequential(*[layer_class() for _ in range(3)], nn.Linear(WIDTH, 2)).to(dtype)
        model, optimizer = fully_shard(
            module,
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
            fsdp_unit_modules=[layer_class],
            mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
            **Meshes().arguments(mesh),
            **settings,
        )
        losses: list[Tensor] = []
        names: dict[str, Any] = {"model": model, "optimizer": optimizer, "torch": torch}
        names |= {"static_input": values_of(0).to(dtype), "graph": torch.cuda.CUDAGraph()}
        _, capture, replay = python_of(PAGE)
        for number in range(STEPS):
            names["batch"] = values_of(number)
            if number == 2 and captures == "units":
                for layer in list(module)[:3]:
                    layer.captures = True
            if number == 2 and captures == "iteration":
                exec(capture.code, names)
            if number >= 2 and captures == "iteration":
                exec(replay.code, names)
                losses.append(names["loss"].detach().clone())
                continue
            loss = model(names["batch"].to(dtype)).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=captures != "iteration")
        torch.cuda.synchronize()
        weights = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    replays = model_of_cuda.detector.graphs.num_replays
    return losses, weights, replays, [str(report) for report in model_of_cuda.reports]

# SPDX-License-Identifier: Apache-2.0
"""Trainings on the model whose units, or whole iterations, are captured as graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.cuda_model.machine import cuda_model
from tests.support.fsdp.meshes import Meshes

STEPS, WIDTH = 5, 6


class GraphedLayer(nn.Module):
    """A unit whose compute is a module of its own, which has no hooks: that one is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
        self.captures = False

    def forward(self, x: Tensor) -> Tensor:
        """Capture when asked to: the weights are gathered here, and the hooks are around it."""
        if self.captures:
            self.captures = False
            sample = torch.zeros_like(x).requires_grad_()
            torch.cuda.make_graphed_callables(self.body, (sample,))
        return x + self.body(x)


def values_of(number: int) -> Tensor:
    """Return the batch of a step on this rank."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def trained(captures: str, mesh: str, dtype: torch.dtype, **settings: Any) -> Any:
    """Train; return losses, weights, the number of replays, and what was reported."""
    # `captures` is "units", "iteration", or "" for a training without graphs.
    with cuda_model() as model_of_cuda:
        torch.manual_seed(1)
        module = nn.Sequential(*[GraphedLayer() for _ in range(3)], nn.Linear(WIDTH, 2)).to(dtype)
        model, optimizer = fully_shard(
            module,
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
            fsdp_unit_modules=[GraphedLayer],
            mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
            **Meshes().arguments(mesh),
            **settings,
        )
        static, graph, losses = values_of(0).to(dtype), torch.cuda.CUDAGraph(), []

        def forward_backward() -> Tensor:
            loss = model(static).float().square().sum()
            loss.backward()
            return loss.detach()

        result: Tensor | None = None
        for number in range(STEPS):
            static.copy_(values_of(number))
            if number == 2 and captures == "units":
                for layer in list(module)[:3]:
                    layer.captures = True
            if number < 2 or captures != "iteration":
                losses.append(forward_backward().clone())
            else:
                if result is None:
                    with torch.cuda.graph(graph):
                        result = forward_backward()
                graph.replay()
                losses.append(result.clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=captures != "iteration")
        torch.cuda.synchronize()
        weights = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    replays = model_of_cuda.detector.graphs.num_replays
    return losses, weights, replays, [str(report) for report in model_of_cuda.reports]

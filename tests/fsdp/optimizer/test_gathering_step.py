# SPDX-License-Identifier: Apache-2.0
"""Optimizers for DTensors that gather whole matrices themselves step as without sharding."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from megatron.fsdp.dtensor.uneven import full_tensor
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import Ranks, batch, close, loss_of
from tests.support.fsdp.wrong_calls import message_of


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of a matrix close to 1 by Newton and Schulz's iteration."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


class GatheringMuon(torch.optim.Optimizer):
    """Muon as users write it for DTensors: gather the momentum, and divide the update again."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9, how: str = "tensor"):
        super().__init__(params, {"lr": lr, "momentum": momentum, "how": how})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            updates = [self.update(parameter, group) for parameter in group["params"]]
            for parameter, update in zip(group["params"], updates):
                update.add_(other=parameter, alpha=0.1)  # weight decay
            if group["how"] == "foreach":
                torch._foreach_add_(group["params"], updates, alpha=-group["lr"])
                continue
            for parameter, update in zip(group["params"], updates):
                target = parameter.data if group["how"] == "data" else parameter
                target.add_(update, alpha=-group["lr"])
        return loss

    def update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
        if not isinstance(buffer, DTensor):
            return self.of_whole(buffer)
        if group["how"] == "redistribute":
            everywhere = [Replicate()] * buffer.device_mesh.ndim
            whole = buffer.redistribute(placements=everywhere).to_local()
            update = DTensor.from_local(self.of_whole(whole), buffer.device_mesh, everywhere)
            return update.redistribute(placements=buffer.placements)
        update = self.of_whole(buffer.full_tensor())
        return distribute_tensor(update, buffer.device_mesh, buffer.placements)

    def of_whole(self, matrix: Tensor) -> Tensor:
        return orthogonal(matrix) if matrix.ndim == 2 else matrix.clone()


def train(level: int, how: str) -> None:
    reference, module = build_stack(), build_stack()
    expected_optimizer = GatheringMuon(reference.parameters(), how=how)
    model, optimizer = fully_shard(
        module,
        GatheringMuon(module.parameters(), how=how),
        shard_mesh(),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
        optimizer_gathers_matrices=True,
    )
    size = dist.get_world_size()
    for step in range(3):
        expected_optimizer.zero_grad()
        for rank in range(size):
            (loss_of(reference(batch(step, rank, 0))) / size).backward()
        expected_optimizer.step()
        optimizer.zero_grad()
        loss_of(model(batch(step, dist.get_rank(), 0))).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(name.removeprefix("module.")).detach()
            close(full_tensor(parameter), expected, f"{name} after step {step}", 1e-9)


@pytest.mark.always("0-tensor", "1-redistribute", "3-data", "3-foreach")
@pytest.mark.parametrize("how", ["tensor", "data", "foreach", "redistribute"])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_muon_for_dtensors_steps_as_on_one_rank(ranks: Ranks, level: int, how: str) -> None:
    ranks(3, train, level, how)


def refuse() -> list[str]:
    model = fully_shard_model(build_stack())
    messages = [
        message_of(NotImplementedError, fully_shard_optimizer, GatheringMuon(model.parameters()))
    ]
    matrices = [each for each in model.parameters() if each.ndim == 2]
    plain = torch.optim.LBFGS(matrices)
    messages.append(
        message_of(
            NotImplementedError, fully_shard_optimizer, plain, optimizer_gathers_matrices=True
        )
    )
    optimizer = GatheringMuon(matrices)
    fully_shard_optimizer(optimizer, optimizer_gathers_matrices=True)
    optimizer.add_param_group({"params": [each for each in model.parameters() if each.ndim != 2]})
    loss_of(model(batch(0, 0, 0))).backward()
    optimizer.step()
    return messages


def test_it_is_the_users_word_that_counts_and_not_for_torchs_own(ranks: Ranks) -> None:
    for by_default, of_torch in ranks(2, refuse):
        assert "optimizer_gathers_matrices=True" in by_default and "GatheringMuon" in by_default
        assert "LBFGS" in of_torch


def say_it_of_adamw() -> None:
    module = nn.Linear(4, 4)
    fully_shard(module, torch.optim.AdamW(module.parameters()), optimizer_gathers_matrices=True)


def test_an_element_wise_optimizer_does_not_mind(ranks: Ranks) -> None:
    ranks(1, say_it_of_adamw)

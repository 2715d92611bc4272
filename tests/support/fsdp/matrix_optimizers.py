# SPDX-License-Identifier: Apache-2.0
"""Optimizers that look at more than single elements, as users write them for whole tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


class Simple(torch.optim.Optimizer):
    """Base of the optimizers here: `direction` of each parameter, times the learning rate."""

    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = closure() if closure else None
        for group, parameter in self.with_gradients():
            direction = self.direction(parameter, parameter.grad, group)
            parameter.add_(direction, alpha=-group["lr"])
        return loss

    def with_gradients(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad


class TakesNoClosure(Simple):
    def step(self) -> None:
        super().step()


class OwnAdam(torch.optim.AdamW):
    """Changes the step of an element-wise optimizer of torch."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.abs().max() + 1)
        return super().step(closure)


class TrustRatio(Simple):
    """LARS, LAMB and their kin."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad * (parameter.norm() / (grad.norm() + 1e-3))


class RowMeans(Simple):
    """State for rows, made from the sharded gradient; the update is written in place."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if grad.dim() < 2:
            return grad
        if not state:
            state["rows"] = grad.new_zeros(grad.shape[0])
            state["average"] = torch.zeros_like(grad)
        state["average"].lerp_(grad, 0.3)
        state["rows"].lerp_(grad.square().flatten(1).mean(1), 0.5)
        update = state["average"].clone()
        scale = state["rows"].add(1e-3).rsqrt().view(-1, *[1] * (grad.dim() - 1))
        update.mul_(scale)
        update[0].mul_(0.5)  # a view of a tensor of its own
        return update


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of a matrix close to 1 by Newton and Schulz's iteration."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


class NewtonSchulz(Simple):
    """Muon as it is written without a thought of sharding."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(grad))
        buffer.mul_(0.9).add_(grad)
        if grad.dim() != 2:
            return buffer
        x = buffer.clone()
        if x.shape[0] > x.shape[1]:
            x = x.T
        x.div_(x.norm() + 1e-7)
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x.T if parameter.shape[0] > parameter.shape[1] else x


class Shampoo(Simple):
    """Preconditions matrices from both sides, by plain matrices that all ranks compute alike."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        if grad.dim() != 2:
            return grad
        state = self.state[parameter]
        if not state:
            state["left"] = 0.1 * torch.eye(grad.shape[0], dtype=grad.dtype)
            state["right"] = 0.1 * torch.eye(grad.shape[1], dtype=grad.dtype)
        state["left"] += grad @ grad.T
        state["right"] += grad.T @ grad
        return self.root(state["left"]) @ grad @ self.root(state["right"])

    def root(self, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.pow(-0.25)) @ vectors.T


class LooksTwice(Simple):
    """Sharpness-aware: goes uphill by a step of fixed length first; the norm is the model's."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        parameters = [parameter for _, parameter in self.with_gradients()]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        uphill = [0.01 * parameter.grad / norm for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, uphill)
            torch._foreach_sub_(parameters, uphill)
        super().step()


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

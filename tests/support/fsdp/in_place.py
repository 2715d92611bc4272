# SPDX-License-Identifier: Apache-2.0
"""Models sharded in place by the second generation of the published interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.experimental import (
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.random_models import Experts
from tests.support.fsdp.reference import (
    TOLERANCE,
    Case,
    build,
    clip,
    close,
    close_by_size,
    compare_norm,
    evaluate,
    loss_on,
    optimizer_over,
    unsharded_training,
)

SAME_DTYPE = MixedPrecisionPolicy(None)
LEVELS = {0: "RRR", 1: "RRS", 2: "RSS", 3: "SSS"}
"""Of an axis the placements of parameter, gradient and optimizer, R for Replicate()."""


@dataclass(frozen=True)
class PlacedAxes:
    """PlacedAxes of a mesh, each with its placements."""

    mesh: DeviceMesh
    placed: dict[Any, str]

    @property
    def placements(self) -> Placements:
        kinds = {"R": Replicate(), "S": Shard(0)}
        columns = [[kinds[letter] for letter in column] for column in zip(*self.placed.values())]
        return Placements(list(self.placed), *columns)


def on_one_axis(mesh: DeviceMesh, level: int, axis: str | int = 0) -> PlacedAxes:
    return PlacedAxes(mesh, {axis: LEVELS[level]})


def shard_in_place(
    model: nn.Module,
    axes: PlacedAxes,
    experts: tuple[PlacedAxes, int] | None = None,
    policy: Any = SAME_DTYPE,
) -> Any:
    """Shard units of a model, those inside of others first, then the model; return the context.

    `experts` are the axes and the divisor of modules of the class Experts.
    """
    with fully_shard_context() as context:
        for module in reversed(list(model.modules())):
            if experts is not None and isinstance(module, Experts):
                own, divisor = experts
                fully_shard(module, own.mesh, own.placements, policy, divisor)
            elif isinstance(module, tuple(type(model).units)):
                fully_shard(module, axes.mesh, axes.placements, policy)
        fully_shard(model, axes.mesh, axes.placements, policy)
    return context


def compare_with_unsharded(
    case: Case, axes: PlacedAxes, meshes: Meshes, experts: tuple[PlacedAxes, int] | None = None
) -> None:
    """Compare gradients, norms, weights and outputs with those of the unsharded model."""
    trace = unsharded_training(case)
    places = meshes.expert_places(case.mesh)
    model = build(case.model, places).to(case.dtype)
    context = shard_in_place(model, axes, experts)
    optimizer = fully_shard_optimizer(optimizer_over(model, case.optimizer))
    for number, step in enumerate(trace):
        for index in range(case.microbatches):
            with microbatch(context, is_last=index == case.microbatches - 1):
                loss_on(model, case, number, dist.get_rank(), index).backward()
        compare_norm(case, clip(model, case.clip), step.norm, number)
        trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
        gradients = {name: one.grad for name, one in trainable.items()}
        compare_parts(model, gradients, step.gradients, f"gradient in step {number}")
        optimizer.step()
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        compare_parts(model, weights, step.weights, f"weight after step {number}")
        outputs = evaluate(model, number, case.dtype)
        for left, right in zip(outputs, step.outputs, strict=True):
            close_by_size(left, right, f"output after step {number}", case.dtype)


def compare_parts(
    model: nn.Module,
    actual: dict[str, Any],
    expected: dict[str, torch.Tensor],
    what: str,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare this rank's shards with the same ranges of whole tensors."""
    global_name = getattr(model, "global_name", str)
    parameters = dict(model.named_parameters())
    assert actual
    for name, value in actual.items():
        run = sharded_param_of(parameters[name]).flat_range
        wanted = expected[global_name(name)].reshape(-1)[run.start : run.stop]
        close(value.to_local().detach().reshape(-1), wanted, f"{what}: {name}", tolerance)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().full_tensor() for name, one in model.named_parameters()}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Sequence[torch.Tensor]
) -> None:
    for x in inputs:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

# SPDX-License-Identifier: Apache-2.0
"""Training with and without sharding, side by side: the central assertion of the engine's tests.

The unsharded side is plain PyTorch: every rank has the whole model, and an all-reduce adds up the
gradients of all ranks' data. Gradients are compared before every step (losses would not do: Adam
hides a constant factor), weights after every step and, through a forward in evaluation, as the next
forward sees them.
"""

import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron.fsdp.engine.hooks import tensors_in
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes, device_type
from tests.support.fsdp.random_models import Drawn, DrawnModel, ExpertPlaces

Ranks = Callable[..., list[Any]]
"""The fixture `ranks`: calls a function on so many ranks and returns their results."""

Test = Callable[..., None]


def on_ranks(num_ranks: int | None = None) -> Callable[[Test], Test]:
    """Run the body of a test on so many ranks; None: as many as its argument `num_ranks` says."""

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(ranks: Ranks, **arguments: Any) -> None:
            place = test.__module__, test.__name__
            ranks(num_ranks or arguments["num_ranks"], run_body, *place, **arguments)

        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([fixture, *own])
        return run

    return decorate


def run_body(module: str, name: str, /, **arguments: Any) -> None:
    """Job: the body of a test, which is found by the name that :func:`on_ranks` has taken."""
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


LEVELS = (0, 1, 2, 3)

TOLERANCE = 1e-11
"""For float64: a few hundred roundings of 1e-16 with sums over at most four ranks."""

TOLERANCES = {
    torch.float64: TOLERANCE,
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}
"""By the dtype that a model computes in, relative to the largest sum of sizes.

A wrong factor shows as at least 0.25."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison.

    `sync`: "auto" (each backward), "no_sync" (the last one), "manual" (finish_grad_sync), "step".
    `loss_scale` multiplies losses, and divides gradients before they are used.
    """

    model: str | Drawn
    mesh: str = "flat"
    sync: str = "auto"
    microbatches: int = 1
    steps: int = 2
    forwards: int = 1  # of the root before one backward
    evaluate: bool = True
    clip: float | None = None  # order of the norm that gradients are clipped by
    optimizer: str = "fused_adamw"
    dtype: torch.dtype = torch.float64
    loss_scale: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)


def batch(step: int, rank: int, microbatch: int, forward: int = 0) -> Tensor:
    """Return data of its own for every rank and microbatch, float64 [BATCH, WIDTH]."""
    generator = torch.Generator().manual_seed(((step * 8 + rank) * 8 + microbatch) * 8 + forward)
    data = torch.randn(models.BATCH, models.WIDTH, generator=generator, dtype=torch.float64)
    return data.to(device_type())


def loss_of(output: object) -> Tensor:
    """Return a number that every tensor of `output` adds to, each in its own way."""
    return sum(
        (number + 1) * (tensor.pow(2).mean() + tensor.mean())
        for number, tensor in enumerate(tensors_in(output))
    )


def mean_loss(model: nn.Module, step: int) -> Tensor:
    """Return the mean of an unsharded model's losses on the data of all ranks."""
    ranks = range(dist.get_world_size())
    return torch.stack([loss_of(model(batch(step, rank, 0))) for rank in ranks]).mean()


def loss_on(model: nn.Module, case: Case, step: int, rank: int, microbatch: int) -> Tensor:
    inputs = [
        batch(step, rank, microbatch, forward).to(case.dtype) for forward in range(case.forwards)
    ]
    return sum(loss_of(model(x, step=step)) for x in inputs) * case.loss_scale


def build(model: str | Drawn, places: ExpertPlaces | None = None) -> nn.Module:
    if isinstance(model, Drawn):
        return DrawnModel(model, places).double().to(device_type())
    return models.build(model).to(device_type())


def optimizer_over(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    """Return "sgd", "adamw", or "fused_adamw", which costs a test a tenth of the time."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    fused = name == "fused_adamw"
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, fused=fused)


def shard_with_sgd(
    module: nn.Module, *mesh: DeviceMesh, **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a module and plain SGD over its parameters."""
    return fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1), *mesh, **settings)


def clip(model: nn.Module, order: float | None) -> float:
    """Scale all gradients to a norm of one half and return their norm."""
    return (
        0.0
        if order is None
        else float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=order))
    )


@dataclass(frozen=True)
class TrainedStep:
    """The results of one step: the norm of gradients, and by name gradients, weights and outputs.

    `sizes` are those of the numbers that a gradient is the sum of.
    """

    norm: float
    gradients: dict[str, Tensor]
    sizes: dict[str, float]
    weights: dict[str, Tensor]
    outputs: list[Tensor]


def unsharded_training(case: Case) -> list[TrainedStep]:
    """Train in plain PyTorch over the data of all ranks.

    Gradients are summed over microbatches and averaged (or summed) over ranks. The model computes
    in the case's dtype; weights, gradients and the optimizer are float64.
    """
    mean = not case.settings.get("calculate_per_token_loss", False)
    return _unsharded_training(
        case.model,
        case.steps,
        case.microbatches,
        case.forwards,
        mean,
        case.clip,
        case.optimizer,
        case.dtype,
        case.loss_scale,
    )


@lru_cache(maxsize=64)
def _unsharded_training(
    name: str | Drawn,
    steps: int,
    microbatches: int,
    forwards: int,
    mean: bool,
    order: float | None,
    optimizer_name: str,
    dtype: torch.dtype,
    loss_scale: float,
) -> list[TrainedStep]:
    case = Case(model=name, forwards=forwards, dtype=dtype, loss_scale=loss_scale)
    model = build(name).to(dtype)
    main = build(name).to(dtype).double()
    optimizer = optimizer_over(main, optimizer_name)
    trainable = {
        key: parameter for key, parameter in main.named_parameters() if parameter.requires_grad
    }
    trace = []
    for step in range(steps):
        model.load_state_dict(main.state_dict())
        sums = {key: torch.zeros_like(parameter) for key, parameter in trainable.items()}
        sizes = dict.fromkeys(sums, 0.0)
        for microbatch in range(microbatches):
            model.zero_grad()
            loss_on(model, case, step, dist.get_rank(), microbatch).backward()
            for key, parameter in model.named_parameters():
                # Sharding gives a gradient of zero to what was not used.
                if parameter.grad is not None:
                    sums[key] += parameter.grad
                    sizes[key] += float(parameter.grad.abs().max()) if parameter.numel() else 0.0
        add_over_ranks(sums, sizes)
        divisor = (dist.get_world_size() if mean else 1) * loss_scale
        for key, parameter in trainable.items():
            parameter.grad = sums[key] / divisor
        norm = clip(main, order)
        factor = 1.0 if order is None else min(1.0, 0.5 / (norm + 1e-6))
        optimizer.step()
        gradients = {key: parameter.grad.clone() for key, parameter in trainable.items()}
        weights = {key: parameter.detach().clone() for key, parameter in main.named_parameters()}
        model.load_state_dict(main.state_dict())
        outputs = evaluate(model, step, dtype)
        trace.append(
            TrainedStep(
                norm,
                gradients,
                {key: size * factor / divisor for key, size in sizes.items()},
                weights,
                outputs,
            )
        )
    return trace


def add_over_ranks(sums: dict[str, Tensor], sizes: dict[str, float]) -> None:
    """Replace both by their sums over all ranks, with one all-reduce."""
    parts = [tensor.flatten() for tensor in sums.values()]
    flat = torch.cat([*parts, torch.tensor([*sizes.values()], device=device_type()).double()])
    dist.all_reduce(flat)
    *totals, total_sizes = flat.split([*map(len, parts), len(sizes)])
    for tensor, total in zip(sums.values(), totals):
        tensor.copy_(total.view_as(tensor))
    sizes.update(zip(sizes, total_sizes.tolist()))


@torch.no_grad()
def evaluate(model: nn.Module, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return list(tensors_in(model(batch(99, 0, 0).to(dtype), step=step)))


def shown_gradients(model: nn.Module) -> dict[str, Any]:
    """Return what trainable parameters, of a sharded model or another, show as their gradients."""
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def sharded_backward(case: Case, model: nn.Module, step: int) -> None:
    for microbatch in range(case.microbatches):
        last = microbatch == case.microbatches - 1
        with model.no_sync() if case.sync == "no_sync" and not last else nullcontext():
            loss_on(model, case, step, dist.get_rank(), microbatch).backward()
    if case.sync == "manual":
        model.finish_grad_sync()
    if case.loss_scale != 1.0:
        model.scale_gradients(1 / case.loss_scale)


def compare(case: Case, meshes: Meshes) -> None:
    """Compare gradients, their norm, weights and outputs with those of the unsharded model."""
    trace = unsharded_training(case)
    module = build(case.model, meshes.expert_places(case.mesh)).to(case.dtype)
    main = None if case.dtype == torch.float64 else torch.float32
    settings = {"mixed_precision_policy": MixedPrecisionPolicy(main, main), **case.settings}
    settings = {"fsdp_unit_modules": type(module).units, **settings}
    model, optimizer = fully_shard(
        module,
        optimizer_over(module, case.optimizer),
        **meshes.arguments(case.mesh),
        sync_model_each_microbatch=case.sync in ("auto", "no_sync"),
        **settings,
    )
    for number, step in enumerate(trace):
        sharded_backward(case, model, number)
        if case.sync == "step":
            optimizer.step()
        else:
            compare_norm(case, clip(model, case.clip), step.norm, number)
        gradients, what = shown_gradients(model), f"gradient in step {number}"
        compare_by_global_name(case, model, gradients, step.gradients, what, step.sizes)
        if case.sync != "step":
            optimizer.step()
        optimizer.zero_grad()
        weights, what = dict(model.named_parameters()), f"weight after step {number}"
        compare_by_global_name(case, model, weights, step.weights, what, {})
        if case.evaluate:
            outputs = evaluate(model, number, case.dtype)
            for index, (left, right) in enumerate(zip(outputs, step.outputs, strict=True)):
                close_by_size(left, right, f"output {index} after step {number}", case.dtype)


def compare_norm(case: Case, actual: float, expected: float, step: int) -> None:
    tolerance = max(TOLERANCES[case.dtype], 1e-6)
    close(torch.tensor(actual), torch.tensor(expected), f"norm in step {step}", tolerance)


def compare_by_global_name(
    case: Case,
    model: MegatronFSDP,
    actual: dict[str, DTensor],
    expected: dict[str, Tensor],
    what: str,
    sizes: dict[str, float],
) -> None:
    """Compare shards with whole tensors that have the names of the model with all experts."""
    global_name: Callable[[str], str] = getattr(model.module, "global_name", str)
    names = [key.removeprefix("module.") for key in actual]
    wanted = {name: expected[global_name(name)] for name in names}
    sizes = {name: sizes.get(global_name(name), 0.0) for name in names}
    compare_shards(model, actual, wanted, what, None, case.dtype, sizes)


def compare_all(cases: list[Case]) -> None:
    """Compare every case on meshes that they share."""
    meshes = Meshes()
    for case in cases:
        try:
            compare(case, meshes)
        except Exception as error:
            error.add_note(f"in {case}")
            raise


def compare_shards(
    model: nn.Module,
    actual: dict[str, DTensor],
    expected: dict[str, Tensor],
    what: str,
    tolerance: float | None = None,
    dtype: torch.dtype = torch.float64,
    sizes: dict[str, float] | None = None,
) -> None:
    """Compare this rank's shards with the same ranges of whole tensors.

    That the shards of all ranks make up the whole is for the tests of layouts and state dicts.
    """
    parameters = dict(model.named_parameters())
    assert list(actual) == ["module." + key for key in expected]
    for key, whole in expected.items():
        run = sharded_param_of(parameters["module." + key]).flat_range
        shard = actual["module." + key].to_local().detach().reshape(-1)
        wanted = whole.reshape(-1)[run.start : run.stop]
        if tolerance is not None or dtype == torch.float64:
            close(shard, wanted, f"{what}: {key}", TOLERANCE if tolerance is None else tolerance)
        else:
            close_by_size(
                shard,
                wanted,
                f"{what}: {key}",
                dtype,
                max((sizes or {}).get(key, 0.0), float(whole.abs().max())),
            )


def close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Compare as `torch.testing.assert_close`, which explains a difference but is slow."""
    if (actual.shape, actual.dtype, actual.device) == (
        expected.shape,
        expected.dtype,
        expected.device,
    ) and torch.allclose(actual, expected, rtol=tolerance, atol=tolerance):
        return
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def close_by_size(
    actual: Tensor, expected: Tensor, what: str, dtype: torch.dtype, size: float | None = None
) -> None:
    """Compare relative to the largest number, which rounding in a low precision keeps small."""
    if dtype == torch.float64:
        return close(actual, expected, what)
    size = size if size is not None else float(expected.abs().max())
    tolerance = TOLERANCES[dtype] * max(size, 1e-3)
    worst = float((actual.double() - expected).abs().max()) if actual.numel() else 0.0
    assert actual.isfinite().all() and worst <= tolerance, (
        f"{what}: differs by {worst:.3g} of {size:.3g}"
    )

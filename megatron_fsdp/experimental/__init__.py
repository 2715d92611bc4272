# SPDX-License-Identifier: Apache-2.0
"""The second generation of the published interface: modules are sharded in place, one by one.

with fully_shard_context() as context:
    for layer in model.layers:
        fully_shard(layer, mesh, placements)
    fully_shard(model, mesh, placements)
optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

It is the engine of the first generation: :class:`Placements` are its strategies, axis by axis.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

from megatron.fsdp.config.meta_initialisation import MetaInitialisation
from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import Gradients, Settings, Strategy, parse_precision
from megatron.fsdp.engine.policy import MixedPrecisionPolicy
from megatron.fsdp.in_place import MODEL, Context, InPlaceModel, model_of, models_inside
from megatron.fsdp.optimizer.sharded_optimizer import ShardedOptimizer, shard_optimizer
from megatron_fsdp.experimental.dbuffer import DBuffer
from megatron_fsdp.experimental.placements import Placements, sharded_axes
from megatron_fsdp.translation import published_names

__all__ = [
    "DBuffer",
    "Placements",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "load_checkpoint",
    "microbatch",
    "save_checkpoint",
]


NAMES = {
    "device_mesh": "mesh",
    "dp_shard_dim": "placements.dp_axes",
    "dp_outer_dim": "placements.dp_axes",
    "zero_dp_strategy": "placements",
    "Gradients.divisor": "grad_divisor",
    "fully_shard_model": "fully_shard",
    # "pass ..., the mesh of the ranks that hold the same experts"
    "expt_device_mesh": "to a fully_shard of their own, with grad_divisor",
}
"""The names of arguments here, by those of the first generation, in messages."""


_open: list[Context] = []
"""The context that is open, if any."""


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
) -> Iterator[Context]:
    """Share streams and the order of prefetching between all calls of :func:`fully_shard` inside.

    Modules that no later call contains are roots. While one computes, the weights with which the
    next one begins are gathered, in the order of the calls for roots. The context ends before any
    forward.

    Args:
        device: the device of the streams. None: that of the mesh.
        use_symmetric_memory: not built; ``nccl_ub`` of the first generation registers memory.
        unify_communication_stream: run all-gathers and reductions on one stream, which need less
            memory at the same time, and overlap less. On a CPU there are no streams.
    """
    if use_symmetric_memory:
        raise NotImplementedError(
            "use_symmetric_memory: not built for modules that are sharded one by one; use nccl_ub"
            " of megatron_fsdp.fully_shard"
        )
    if _open:
        raise RuntimeError("fully_shard_context inside of another one: leave that one first")
    context = Context(device, unify_communication_stream)
    context.is_open = True
    _open.append(context)
    try:
        yield context
    finally:
        _open.remove(context)
        context.is_open = False


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy | TorchPrecision | None = None,
    grad_divisor: int = 1,
) -> nn.Module:
    """Shard those parameters of a module that no earlier call inside of it has, in place.

    They become one unit, which is gathered and freed together: call it on layers first, and then on
    the module around them. The module stays the same object, and its class gets the methods of
    :class:`FSDPModule`. ``parameters()`` yields main weights as DTensors.

    Args:
        module: the module, initialised, or on the meta device with ``reset_parameters``.
        mesh: a mesh with the axes of ``placements``, and others, as of tensor parallelism.
        placements: what each axis shards.
        mixed_precision_policy: dtypes. None: main weights are fp32, and gradients have the dtype of
            their parameters.
        grad_divisor: a number that averaged gradients are divided by: for experts, which are
            averaged over the ranks that have the same ones, the size of expert parallelism.

    Returns:
        The module.

    Raises:
        ValueError: lists every problem, the same on every rank.
        NotImplementedError: names what is not built.
        RuntimeError: after a forward, and after :func:`fully_shard_optimizer`.
    """
    context = _open[-1] if _open else Context()
    inside = list(models_inside(module))
    if context.has_run or any(model.context.has_run for model in inside):
        raise RuntimeError("fully_shard after a forward: shard all modules before the first one")
    if any(model._has_optimizer for model in inside):
        raise RuntimeError(
            "fully_shard after fully_shard_optimizer: shard the module around those with an"
            " optimizer first. The optimizer itself may be made before"
        )
    problems = Problems()
    if isinstance(mesh, DeviceMesh):
        problems = Problems(mesh.get_all_groups())
    with published_names(NAMES):
        engine_mesh = None
        strategy = Strategy()
        axes = problems.check(sharded_axes, module, mesh, placements, grad_divisor != 1)
        if axes is not None:
            engine_mesh, strategy = axes
        precision = mixed_precision_policy or MixedPrecisionPolicy()
        settings = Settings(
            mesh=engine_mesh,
            strategy=strategy,
            precision=problems.check(parse_precision, precision) or MixedPrecisionPolicy(),
            gradients=problems.check(Gradients, divisor=grad_divisor) or Gradients(),
            initialisation=MetaInitialisation() if _is_on_meta(module) else None,
        )
        if engine_mesh is not None and not context.is_on(settings.device):
            problems.add(f"the context is on {context.device}, the mesh on {settings.device}")
        InPlaceModel(module, settings, problems, context)
    return module


def _is_on_meta(module: object) -> bool:
    return isinstance(module, nn.Module) and any(
        parameter.is_meta for parameter in module.parameters()
    )


@contextmanager
def microbatch(context: Context, is_last: bool) -> Iterator[None]:
    """Mark the backward passes inside as those of the last microbatch of a step, or not.

    Where an axis replicates gradients (levels 0 and 1, HSDP and HFSDP), they are reduced over it
    by the last one only, and are final on ``param.grad`` after that. With ``Shard(0)`` alone every
    backward makes them final, and this changes nothing. Without it every backward reduces.
    """
    if not isinstance(context, Context) or context.is_open:
        raise RuntimeError("microbatch expects the context that fully_shard_context gave, closed")
    marked = [root for root in context.roots if root.accumulates_locally]
    before = [root.is_last_microbatch for root in marked]
    for root in marked:
        root.is_last_microbatch = is_last
    try:
        yield
    finally:
        for root, value in zip(marked, before):
            root.is_last_microbatch = value


def fully_shard_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Shard an optimizer over ``module.parameters()``, in place, and return it.

    Before a step gradients are final, in the dtype of main weights; after it compute weights follow
    these. It steps on the memory of shards at once, and ``state_dict()`` is ready for checkpoints.

    Raises:
        ValueError: if a parameter belongs to no sharded module, or the optimizer is sharded.
        NotImplementedError: for sparse gradients and differentiable updates.
    """
    with published_names(NAMES):
        return shard_optimizer(optimizer)


# ---- checkpoints


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike[str],
) -> None:
    """Save a model and its optimizer as a directory of torch.distributed.checkpoint."""
    save(_state(model, optimizer), checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike[str],
    *,
    sync_model_weights: bool = True,
) -> None:
    """Load what :func:`save_checkpoint` has saved, on any number of ranks and at any placements.

    Args:
        model: the model.
        optimizer: of :func:`fully_shard_optimizer`, over its parameters.
        checkpoint_dir: the directory.
        sync_model_weights: False: where main weights have another dtype, forwards use the compute
            weights from before until the next step.
    """
    state = _state(model, optimizer)
    if not sync_model_weights:
        sharded = [module for module in model.modules() if MODEL in vars(module)]
        for in_place in dict.fromkeys(map(model_of, sharded)):
            for group in in_place.groups:
                group.keep_compute_weights()
    load(state, checkpoint_id=checkpoint_dir)
    if sync_model_weights:
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if not isinstance(optimizer, ShardedOptimizer):
        raise ValueError("optimizer expects one that fully_shard_optimizer has returned")
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

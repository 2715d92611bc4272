# SPDX-License-Identifier: Apache-2.0
"""The public function :func:`fully_shard`, with typed settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

from megatron.fsdp.backends.rendezvous import default_mesh
from megatron.fsdp.config.memory import Memory
from megatron.fsdp.config.meta_initialisation import MetaInitialisation
from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import Gradients, Settings, Strategy, Units, parse_precision
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, Overlap
from megatron.fsdp.module.sharded_module import ShardedModule
from megatron.fsdp.optimizer.quantized_state import with_fitting_boundaries
from megatron.fsdp.optimizer.sharded_optimizer import (
    check_optimizer,
    list_of_optimizers,
    shard_optimizer,
    swap_parameters,
)

Wrapper = TypeVar("Wrapper", bound=ShardedModule)
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])


@overload
def fully_shard(
    model: nn.Module,
    optimizer: None = None,
    *,
    mesh: Mesh | None = None,
    units: Units = (),
    strategy: Strategy = ...,
    precision: MixedPrecisionPolicy | TorchPrecision = ...,
    gradients: Gradients = ...,
    overlap: Overlap = ...,
    memory: Memory = ...,
    initialisation: MetaInitialisation | None = None,
) -> ShardedModule: ...


@overload
def fully_shard(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    mesh: Mesh | None = None,
    units: Units = (),
    strategy: Strategy = ...,
    precision: MixedPrecisionPolicy | TorchPrecision = ...,
    gradients: Gradients = ...,
    overlap: Overlap = ...,
    memory: Memory = ...,
    initialisation: MetaInitialisation | None = None,
) -> tuple[ShardedModule, Optimizers]: ...


def fully_shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    mesh: Mesh | None = None,
    units: Units = (),
    strategy: Strategy = Strategy(),
    precision: MixedPrecisionPolicy | TorchPrecision = MixedPrecisionPolicy(),
    gradients: Gradients = Gradients(),
    overlap: Overlap = Overlap(),
    memory: Memory = Memory(),
    initialisation: MetaInitialisation | None = None,
) -> Any:
    """Shard a model, and its optimizer, over data ranks, by typed settings.

    At level 3 each rank keeps its shard of every parameter. A pre-forward hook all-gathers the
    weights of a unit, a post-forward hook frees them. Backward gathers them again, reduce-scatters
    the unit's gradients and frees both. The optimizer steps on the shards. docs/how_it_works.md
    shows this for one step.

    ``model.parameters()`` yields the *main weights*, which the optimizer updates: DTensors of the
    full logical shape over this rank's shard. Their gradients are on ``param.grad`` after backward,
    when hooks that were registered on them are called. ``megatron_fsdp`` has the published
    functions, with keywords.

    Args:
        model: any initialised module. Ranks take the weights and buffers of the first data rank.
            Its parameters stay the same objects and become views of flat buffers.
        optimizer: over ``model.parameters()``, or a list, as of Muon over matrices and AdamW over
            the rest. None: create it over those of the result, for :func:`shard_optimizer`.
        mesh: the ranks. None: one axis over all ranks, on the accelerator if there is one,
            otherwise on the CPU.
        units: classes, instances or import paths of units. The parameters of a unit must be used
            inside its forward only, or passed on as arguments. Outside the named units, each module
            that owns parameters is a unit by itself, except for small ones.
        strategy: what is sharded.
        precision: dtypes of main weights and gradients, or FSDP2's policy with FSDP2's meaning.
        gradients: how they are reduced, and when they are final.
        overlap: what is communicated while units compute.
        memory: where buffers are.
        initialisation: first values of parameters on the meta device. None: there are no such
            parameters.

    Returns:
        The wrapper, a :class:`ShardedModule`; the user's module is its ``module``. With an
        optimizer, both, or with the list. After an error, the model and these are unchanged.

    Raises:
        ValueError: lists every problem, the same on every rank.
        NotImplementedError: names what is not built yet.
        RuntimeError: if the program was not started for torch.distributed.
    """
    # Sources: ZeRO, Rajbhandari et al., arXiv:1910.02054; FSDP, Zhao et al., arXiv:2304.11277.
    if mesh is None:
        mesh = Mesh(device_mesh=default_mesh())
    settings = Settings(
        mesh=mesh,
        units=units,
        strategy=strategy,
        precision=parse_precision(precision),
        gradients=gradients,
        overlap=overlap,
        memory=memory,
        initialisation=initialisation,
    )
    if optimizer is None:
        return ShardedModule(model, settings)
    problems = Problems(settings.checked_mesh.all_groups())
    return shard_both(model, optimizer, settings, problems, ShardedModule)


def shard_both(
    model: nn.Module,
    optimizer: Optimizers,
    settings: Settings,
    problems: Problems,
    wrapper: Callable[[nn.Module, Settings, Problems], Wrapper],
) -> tuple[Wrapper, Optimizers]:
    """Shard a model, and its optimizer or several of them.

    Args:
        model: the module.
        optimizer: one over its parameters, or a list of them.
        settings: the settings of the model.
        problems: problems that the caller has found.
        wrapper: makes the wrapper of the model; called when the optimizers were checked.

    Returns:
        The wrapper and ``optimizer``, whose parameters are then those of the wrapper.
    """
    optimizers = list_of_optimizers(problems, optimizer)
    for number, entry in enumerate(optimizers):
        which = "the optimizer"
        if len(optimizers) > 1:
            which = f"optimizer {number}"
        check_optimizer(problems, entry, which, model, settings)
    sharded = wrapper(model, with_fitting_boundaries(settings, optimizers), problems)
    for entry in optimizers:
        swap_parameters(entry, sharded)
        shard_optimizer(entry, sharded.checkpoint_ready)
    return sharded, optimizer

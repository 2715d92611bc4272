# SPDX-License-Identifier: Apache-2.0
"""Statistics over all parameters of a model: their number, their norm, zeros in their gradients.

Every element counts once, whichever ranks have it or copies of it. The functions that count or sum
are collectives.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron.mcore_adapter.checkpoints.torch_dist_format import gathered_weights
from megatron.mcore_adapter.precision_aware import gradient_of


def number_of_parameters(model: list[MegatronModule]) -> int:
    """Return the number of elements over all pipeline stages and tensor-parallel ranks."""
    return int(_sum_over_ranks([float(shard.numel()) for _, shard in owned_shards(model)]))


@torch.no_grad()
def params_norm(model: list[MegatronModule]) -> float:
    """Return the L2 norm of the weights that the optimizer updates.

    These are the fp32 main weights if there are any.
    """
    with gathered_weights(model):
        return _sum_over_ranks([_square(shard) for _, shard in owned_shards(model)]) ** 0.5


@torch.no_grad()
def count_zeros(model: list[MegatronModule]) -> int:
    """Return the number of zeros in the reduced gradients of a model with --use-megatron-fsdp."""
    zeros = []
    for parameter, _ in owned_shards(model):
        gradient = gradient_of(parameter)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
            zeros.append(float(gradient.numel() - gradient.count_nonzero()))
    return int(_sum_over_ranks(zeros))


def owned_shards(model: list[MegatronModule]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield parameters, each with the elements that this rank adds to a sum over all ranks."""
    for chunk in model:
        for parameter in chunk.parameters():
            if getattr(parameter, "shared", False) or _is_replicated_over_tensor_ranks(parameter):
                continue
            shard = _owned_shard(parameter)
            if shard is not None:
                yield parameter, shard


def _owned_shard(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the elements of a parameter that this rank counts, None if others count them."""
    instances = parallel_state.get_inter_distributed_optimizer_instance_group(False)
    is_first_instance = instances is None or instances.rank() == 0
    if isinstance(parameter, DTensor):
        # Replicas within an instance are marked as shared.
        if is_first_instance or sharded_param_of(parameter).group.partition.num_outer > 1:
            return parameter.to_local()
        return None
    main_param = getattr(parameter, "main_param", parameter)  # set by Megatron-Core's optimizer
    if getattr(parameter, "main_param_sharded", False):
        is_counted_here = is_first_instance
    elif _is_of_expert(parameter):
        is_counted_here = parallel_state.get_expert_data_parallel_rank() == 0
    else:
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        is_counted_here = data_rank == 0
    return main_param if is_counted_here else None


def _is_of_expert(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _is_replicated_over_tensor_ranks(parameter: nn.Parameter) -> bool:
    """Return True if a lower tensor-parallel rank has the same parameter and counts it."""
    if getattr(parameter, "tensor_model_parallel", False):
        return False
    if _is_of_expert(parameter):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return group.rank() > 0


def _square(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return torch.linalg.vector_norm(tensor.detach().float()).square().item()


def _sum_over_ranks(numbers: list[float]) -> float:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    total = torch.tensor(sum(numbers), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()

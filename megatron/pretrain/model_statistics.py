# SPDX-License-Identifier: Apache-2.0
"""Sums over the parameters of the whole model, every element once, whichever ranks hold it or copies of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.pretrain.torch_dist_checkpoint import whole_weights


def number_of_parameters(model: list[MegatronModule]) -> int:
    """Elements of all pipeline stages and tensor-parallel slices together."""
    return int(_sum_over_ranks([float(piece.numel()) for _, piece in own_pieces(model)]))


@torch.no_grad()
def params_norm(model: list[MegatronModule]) -> float:
    """The L2 norm of the weights that the optimizer updates: fp32 main weights where there are any."""
    with whole_weights(model):
        return _sum_over_ranks([_square(piece) for _, piece in own_pieces(model)]) ** 0.5


@torch.no_grad()
def count_zeros(model: list[MegatronModule]) -> int:
    """Zeros in the final gradients of a model with --use-megatron-fsdp."""
    gradients = [
        parameter.grad.to_local()
        for parameter, _ in own_pieces(model)
        if parameter.grad is not None
    ]
    return int(
        _sum_over_ranks(
            [float(gradient.numel() - gradient.count_nonzero()) for gradient in gradients]
        )
    )


def own_pieces(model: list[MegatronModule]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Parameters, and what this rank has of them to add to a sum over all ranks."""
    for chunk in model:
        for parameter in chunk.parameters():
            piece = _piece(parameter)
            if (
                piece is not None
                and not getattr(parameter, "shared", False)
                and not _is_copy_of_tensor_rank(parameter)
            ):
                yield parameter, piece


def _piece(parameter: nn.Parameter) -> torch.Tensor | None:
    """None where other data ranks have all of it."""
    first_instance = (
        not _is_hybrid()
        or parallel_state.get_inter_distributed_optimizer_instance_group().rank() == 0
    )
    if isinstance(parameter, DTensor):
        # Replicas within an instance are marked as shared.
        outer_is_sharded = parameter._fsdp_model.get_distributed_index().hsdp_outer_dp_shard
        return parameter.to_local() if first_instance or outer_is_sharded else None
    if getattr(parameter, "main_param_sharded", False):
        return parameter.main_param if first_instance else None
    is_first = (
        parallel_state.get_expert_data_parallel_rank() if _is_expert(parameter) else _dense_rank()
    )
    return getattr(parameter, "main_param", parameter) if is_first == 0 else None


def _is_hybrid() -> bool:
    return (
        parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
        is not None
    )


def _dense_rank() -> int:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)


def _is_expert(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _is_copy_of_tensor_rank(parameter: nn.Parameter) -> bool:
    if getattr(parameter, "tensor_model_parallel", False):
        return False
    expert = _is_expert(parameter)
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group.rank() > 0


def _square(tensor: torch.Tensor) -> float:
    return (
        torch.linalg.vector_norm(tensor.detach().float()).square().item() if tensor.numel() else 0.0
    )


def _sum_over_ranks(numbers: list[float]) -> float:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    total = torch.tensor(sum(numbers), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()

# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's precision-aware optimizer over a sharded model.

It is Transformer Engine's FusedAdam over the main weights of a sharded model, so it keeps none of
its own. Gradients are on `decoupled_grad`, in the dtype in which they accumulate. A moment in
fp16 or fp8 (uint8) has one scale, here for the rank's shard, as in Megatron-Core's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer, OptimizerConfig
from torch import nn

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron.fsdp.engine.tensor_parallel import local_tensor


class _FusedAdamOnShards(torch.optim.Optimizer):
    """Methods for a FusedAdam over sharded parameters, which come before the class's own."""

    name_to_dtype_map: dict[str, torch.dtype]
    get_unscaled_state: Callable[[torch.Tensor, str], torch.Tensor]
    set_scaled_state: Callable[[torch.Tensor, str, torch.Tensor], None]

    def initialize_state(self, param: nn.Parameter, store_param_remainders: bool = False) -> None:
        """Create the moments of a parameter; Megatron-Core passes no second argument."""
        super().initialize_state(param, False)  # type: ignore[misc]

    def _initialize_state(
        self,
        param: nn.Parameter,
        state_name: str,
        **settings: Any,
    ) -> None:
        super()._initialize_state(param, state_name, **settings)  # type: ignore[misc]
        slots = self.state[param]  # it has made a DTensor of equal shards
        moment: Any = local_tensor(slots[state_name])
        if hasattr(moment, "_quantizer"):  # without the transposed copy that GEMMs of Hopper need
            moment._quantizer.set_usage(columnwise=False)
            moment.update_usage(columnwise_usage=False)
        slots[state_name] = sharded_param_of(param).over(moment)

    def _apply_scale(
        self,
        name: str,
        unscaled: torch.Tensor,
        scaled: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        """Scale a moment of a shard, which may be empty, or zero as whole tensors rarely are.

        Args:
            name: the moment's in the state.
            unscaled: its values in fp32.
            scaled: is overwritten, in fp16 or in Transformer Engine's fp8.
            scale: fp32, one element, is overwritten.
        """
        if unscaled.numel():
            super()._apply_scale(name, unscaled, scaled, scale)  # type: ignore[misc]
            # The base class has multiplied zeros by the inverse of their scale, which is infinite.
            codes = getattr(scaled, "_data", scaled)
            codes.masked_fill_(scale[0].reciprocal().isinf(), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; FusedAdam's has DTensors of equal shards."""
        return torch.optim.Optimizer.state_dict(self)


@contextmanager
def unscaled_moments(optimizer: MegatronOptimizer | None, is_load: bool = False) -> Iterator[None]:
    """Replace moments that have a scale by copies in fp32, for a checkpoint, until the end.

    Args:
        optimizer: any of Megatron-Core's; others than the precision-aware one have no scales.
        is_load: take the values of the copies in the end, since a load has read them in place.
    """
    scaled = []
    try:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", None)
            if not isinstance(inner, _FusedAdamOnShards):
                continue
            for parameter, slots in inner.state.items():
                for name, dtype in inner.name_to_dtype_map.items():
                    if name not in slots or dtype not in (torch.float16, torch.uint8):
                        continue
                    unscaled = inner.get_unscaled_state(parameter, name)  # memory may run out
                    scaled.append((inner, parameter, slots, name, slots[name]))
                    slots[name] = sharded_param_of(parameter).over(unscaled)
        yield
    finally:
        for inner, parameter, slots, name, moment in scaled:
            unscaled = local_tensor(slots[name])
            slots[name] = moment
            if is_load:
                inner.set_scaled_state(parameter, name, unscaled)


def gradient_of(parameter: torch.Tensor) -> Any:
    """Return the gradient that the optimizer of a parameter reads, or None."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    if decoupled is not None:
        return decoupled
    return parameter.grad


def check_precision(config: OptimizerConfig, ddp_config: DistributedDataParallelConfig) -> None:
    """Refuse an optimizer that expects gradients or main weights that the model does not have."""
    is_aware = config.use_precision_aware_optimizer
    if is_aware != getattr(ddp_config, "megatron_fsdp_use_decoupled_grad", False):
        raise ValueError(
            f"use_precision_aware_optimizer={is_aware} of OptimizerConfig needs"
            f" megatron_fsdp_use_decoupled_grad={is_aware} in ddp_config: the optimizer would read"
            " gradients where none are"
        )
    if not is_aware:
        return
    dtype = config.main_params_dtype
    if dtype not in (torch.float32, getattr(ddp_config, "megatron_fsdp_main_params_dtype", None)):
        raise ValueError(
            f"main_params_dtype={dtype} of OptimizerConfig needs"
            f" megatron_fsdp_main_params_dtype={dtype} in ddp_config: main weights are those of the"
            " sharded model"
        )


def prepare_precision_aware(
    optimizer: DistributedOptimizer, parameters: list[nn.Parameter]
) -> None:
    """Let a precision-aware optimizer step the main weights of a sharded model."""
    # As for weights without fp8: FusedAdam reads `decoupled_grad`.
    optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    inner = optimizer.optimizer
    inner.__class__ = type("FusedAdamOnShards", (_FusedAdamOnShards, type(inner)), {})
    inner.master_weights = False
    inner.store_param_remainders = False
    inner.use_decoupled_grad = True

    def with_gradients() -> list[SimpleNamespace]:
        # Megatron-Core before 0.19 takes norms and zeros of sharded models from `grad`.
        copies = []
        for parameter in parameters:
            attributes = {**vars(parameter), "grad": gradient_of(parameter)}
            copies.append(SimpleNamespace(**attributes))
        return copies

    optimizer.get_parameters = with_gradients

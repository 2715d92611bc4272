# SPDX-License-Identifier: Apache-2.0
"""Initial weights for Megatron-Core's local layers that were built on the meta device.

They initialise themselves in their constructors and have no ``reset_parameters``. A constructor's
initialisation follows from the config and from the position of a layer in the model.
:class:`MegatronCoreInitialiser` repeats it, draw for draw: the weights are those of a model built
on a real device from the same seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.fsdp.config.meta_initialisation import Initialiser

InitMethod = Callable[[torch.Tensor], object]


class MegatronCoreInitialiser(Initialiser):
    """The initialiser of the layers of one model.

    Args:
        model: a model with layers on the meta device. Modules that are not in it are initialised by
            ``reset_parameters``, like Transformer Engine's.
        use_cpu_initialization: the user's choice; default: that of the model's config. Only with
            True do Megatron-Core's constructors leave the device to torch, so a model for a GPU has
            been built on meta with True in its config.
    """

    def __init__(self, model: nn.Module, use_cpu_initialization: bool | None = None):
        _refuse_shared_embedding(model)
        if use_cpu_initialization is None:
            # Not the config of each layer: some have copies, which keep the value of the time they
            # were built.
            config = getattr(model, "config", None)
            use_cpu_initialization = getattr(config, "use_cpu_initialization", None)
        self._on_cpu = use_cpu_initialization
        self._embedding_configs: dict[nn.Module, TransformerConfig] = {}
        self._replaced_widths: dict[nn.Module, int] = {}
        for module in model.modules():
            if isinstance(module, LanguageModelEmbedding):
                self._embedding_configs |= dict.fromkeys(module.children(), module.config)
            if isinstance(module, MultiLatentAttention):
                # The base class makes an output projection of other heads first, which is then
                # replaced.
                width = module.config.kv_channels * module.config.num_attention_heads
                self._replaced_widths[module.linear_proj] = width

    def knows(self, module: nn.Module) -> bool:
        """Return True if the module's own parameters can be initialised."""
        return self._method_for(module) is not None or super().knows(module)

    def initialise(self, module: nn.Module) -> None:
        """Initialise the module's own parameters, which have storage by now, in place."""
        method = self._method_for(module)
        if method is None or isinstance(module, nn.Embedding):  # torch draws before Megatron-Core
            super().initialise(module)
        if method is not None and self._config_of(module).perform_initialization:
            method(module)  # otherwise a checkpoint will

    def _method_for(self, module: nn.Module) -> Callable[[Any], None] | None:
        """Find the method that repeats the module's constructor."""
        methods: dict[type, Callable[[Any], None]] = {
            ColumnParallelLinear: self._column_parallel,
            RowParallelLinear: self._row_parallel,
            Router: self._in_float32,
            SharedExpertMLP: self._in_float32,
        }
        if module in self._embedding_configs:
            methods = {VocabParallelEmbedding: self._vocab_embedding, nn.Embedding: self._embedding}
        for module_class, method in methods.items():
            if isinstance(module, module_class):
                return method
        return None

    def _config_of(self, module: Any) -> TransformerConfig:
        """Return the config of a layer, or of the embedding around it."""
        return self._embedding_configs.get(module) or module.config

    # ---- one method for each constructor

    def _vocab_embedding(self, module: VocabParallelEmbedding) -> None:
        config = self._config_of(module)
        init_method = config.embedding_init_method
        self._parallel_weight(module, module.weight, init_method, config.params_dtype)

    def _column_parallel(self, module: ColumnParallelLinear) -> None:
        if module.weight is not None:
            # Its constructor makes the whole weight in float32 in any case.
            self._parallel_weight(module, module.weight, module.config.init_method, torch.float32)
        _zero_bias(module)

    def _row_parallel(self, module: RowParallelLinear) -> None:
        config = module.config
        init_method = config.output_layer_init_method
        weights = [module.weight]
        if module in self._replaced_widths:
            width = self._replaced_widths[module] // module.tp_group.size()
            weights.insert(0, module.weight.new_empty(module.output_size, width))
        for weight in weights:
            self._parallel_weight(module, weight, init_method, config.params_dtype)
        _zero_bias(module)

    def _embedding(self, module: nn.Embedding) -> None:
        """Initialise positions and token types, for which torch's constructor has drawn too."""
        self._config_of(module).embedding_init_method(module.weight)

    def _in_float32(self, module: Router | SharedExpertMLP) -> None:
        """Draw weight and bias of a router, or the gate, and convert them afterwards."""
        for parameter in module.parameters(recurse=False):
            drawn = torch.empty_like(parameter, dtype=torch.float32)
            module.config.init_method(drawn)
            parameter.copy_(drawn)

    def _parallel_weight(
        self,
        module: Any,
        weight: torch.Tensor,
        init_method: InitMethod,
        drawn_in: torch.dtype,
    ) -> None:
        """Initialise the slice of a weight that tensor parallelism divides.

        Args:
            module: Megatron-Core's layer.
            weight: this rank's slice of its weight, or of one that its constructor replaces.
            init_method: draws the values.
            drawn_in: dtype in which the constructor makes the whole weight on a CPU.
        """
        on_cpu = self._on_cpu
        if on_cpu is None:
            on_cpu = self._config_of(module).use_cpu_initialization
        if on_cpu:
            # Every rank draws the whole weight and keeps its own slice, so the weights do not
            # depend on the number of ranks.
            dim = module.weight.partition_dim
            whole = list(weight.shape)
            whole[dim] *= module.tp_group.size()
            _initialize_affine_weight_cpu(
                weight,
                *whole,
                weight.shape[dim],
                dim,
                init_method,
                stride=module.weight.partition_stride,
                params_dtype=drawn_in,
                rank=module.tp_group.rank(),
                world_size=module.tp_group.size(),
                skip_set_tensor_parallel_attributes=True,  # the constructor has
            )
            return
        tracker = get_cuda_rng_tracker()
        if getattr(module, "is_expert", False):
            generator = tracker.fork(get_expert_parallel_rng_tracker_name())
        else:
            generator = tracker.fork()
        with generator:
            init_method(weight)


def _refuse_shared_embedding(model: nn.Module) -> None:
    """Reject an embedding whose values constructors copy from the first stage to the last."""
    for module in model.modules():
        if not isinstance(module, LanguageModule) or not any(
            parameter.is_meta for parameter in module.parameters()
        ):
            continue
        config = module.config
        is_shared = module.share_embeddings_and_output_weights or config.mtp_num_layers
        if is_shared and config.pipeline_model_parallel_size > 1:
            raise ValueError(
                "the meta device has no values for an embedding that two pipeline stages share:"
                " build the model on a real device, or without tied embeddings and without"
                " multi-token prediction"
            )


def _zero_bias(module: ColumnParallelLinear | RowParallelLinear) -> None:
    if module.bias is not None:
        module.bias.zero_()

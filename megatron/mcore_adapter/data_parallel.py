# SPDX-License-Identifier: Apache-2.0
"""FullyShardedDataParallel: the engine with the interface of Megatron-Core's DistributedDataParallel."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp import FSDPDistributedIndex, MegatronFSDP, MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.hooks import PASSED_ON
from megatron.mcore_adapter.meta_init import MegatronCoreInitialiser

SHARD_AXIS = "dp_cp"


class CoreEngine(MegatronFSDP):
    """The engine, with Megatron-Core's own initialisation for layers on the meta device.

    Args:
        use_cpu_initialization: as :class:`MegatronCoreInitialiser` takes it.
    """

    def __init__(self, module: nn.Module, *args: Any, use_cpu_initialization: bool | None = None, **settings: Any):
        self.initialiser = MegatronCoreInitialiser(module, use_cpu_initialization)
        super().__init__(module, *args, **settings)


class FullyShardedDataParallel(_BaseDataParallel):
    """Shards a Megatron-Core model over its data-parallel ranks; the unmodified optimizer and schedules drive it.

    ``named_parameters()`` yields the main weights as DTensors; they are what Megatron-Core's optimizer steps, in its
    branch for ``ddp_config.use_megatron_fsdp``, which needs ``use_distributed_optimizer`` too.

    Args:
        config: of the model.
        ddp_config: strategy, overlap and gradient precision. ``grad_reduce_in_fp32`` accumulates and reduces in fp32,
            ``preserve_fp32_weights`` keeps fp32 main weights; the fields ``megatron_fsdp_{main_params,main_grads,
            grad_comm}_dtype`` of newer releases come first where present.
        module: the model, also inside Float16Module; on the meta device with ``config.init_model_with_meta_device``.
        fsdp_unit_modules: classes or import paths of units. None: transformer layers, the embedding, the output layer.
        disable_bucketing: one group per dtype instead of per unit.
        device: where the model goes first. None: the accelerator there is, else cpu.
        pg_collection: process groups. None: those of ``parallel_state``.

    Raises:
        ValueError: for configurations that Megatron-Core would train wrongly without a word.
        NotImplementedError: for parallelisms and options that are not built yet.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        fsdp_unit_modules: Sequence[type | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        _check_configs(config, ddp_config)
        groups = ProcessGroupCollection.setup_process_groups_for_ddp(pg_collection, config, ddp_config)
        _check_groups(groups)
        strategy = ShardingStrategy.parse(ddp_config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy")
        _mark_parameters(module, counted=strategy.shards_optimizer or groups["dp_cp_group"].rank() == 0)
        engine = CoreEngine(
            module,
            FSDPDistributedIndex(_mesh(groups["dp_cp_group"], device), dp_shard_dim=SHARD_AXIS),
            ddp_config,
            mixed_precision_policy=precision_policy(ddp_config),
            fsdp_unit_modules=default_unit_modules(module) if fsdp_unit_modules is None else fsdp_unit_modules,
            disable_bucketing=disable_bucketing,
            device=device,
            calculate_per_token_loss=config.calculate_per_token_loss,
            init_model_with_meta_device=config.init_model_with_meta_device,
            report_nan_in_param_grad=ddp_config.check_for_nan_in_grad,
        )
        super().__init__(config=config, module=engine)
        self.ddp_config = ddp_config
        self.force_all_reduce = False  # the training loop assigns it at every step
        self.param_and_grad_buffer = MainWeights(engine)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True):
        prefix = f"{prefix}.module" if prefix else "module"
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches inside are not the last one of the step.

        A generator on purpose: pipeline schedules drop it without leaving it after an evaluation.
        """
        with self.module.no_sync():
            yield

    def start_grad_sync(self, *unused: Any) -> None:
        self.module.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Final gradients on the ``.grad`` of every parameter that the optimizer steps."""
        self.module.finish_grad_sync(force_all_reduce)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        self.module.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        self.module.zero_grad_buffer()
        self.module.is_last_microbatch = True

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        self.module.start_param_sync(force_sync=force_sync, force_dispatch=force_dispatch)

    def broadcast_params(self) -> None:
        self.module.broadcast_params()

    def stop_communication(self) -> None:
        self.module.stop_communication()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The wrapped module's, with keys ``module.…``."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True):
        return self.module.load_state_dict(state_dict, strict=strict)


class MainWeights:
    """What Megatron-Core's optimizer calls ``param_and_grad_buffer``: it has the main weights installed after a step."""

    def __init__(self, engine: MegatronFSDP):
        self._engine = engine

    def copy_main_weights_to_model_weights(self) -> None:
        self._engine.install_optimized_model_weights(only_trainable=True)


def default_unit_modules(module: nn.Module) -> list[type | nn.Module]:
    """Transformer layers, the embedding, and the output layer, which is no class of its own."""
    outputs = [child for name, child in module.named_modules() if name.rpartition(".")[2] == "output_layer"]
    return [TransformerLayer, LanguageModelEmbedding, *outputs]


def precision_policy(ddp_config: DistributedDataParallelConfig) -> MixedPrecisionPolicy:
    """Main weights in fp32 unless told otherwise; gradients in fp32 where Megatron-Core's own wrapper has them so."""
    main_params = torch.float32 if ddp_config.preserve_fp32_weights else None
    grads = torch.float32 if ddp_config.grad_reduce_in_fp32 else None
    main_grads = getattr(ddp_config, "megatron_fsdp_main_grads_dtype", None) or grads
    return MixedPrecisionPolicy(
        main_params_dtype=getattr(ddp_config, "megatron_fsdp_main_params_dtype", main_params),
        main_grads_dtype=main_grads,
        grad_comm_dtype=getattr(ddp_config, "megatron_fsdp_grad_comm_dtype", None) or main_grads,
    )


def _check_configs(config: TransformerConfig, ddp_config: DistributedDataParallelConfig) -> None:
    if not (ddp_config.use_megatron_fsdp and ddp_config.use_distributed_optimizer):
        raise ValueError(
            "FullyShardedDataParallel needs ddp_config.use_megatron_fsdp and ddp_config.use_distributed_optimizer (and the"
            " latter in OptimizerConfig): Megatron-Core would build an optimizer that trains on stale weights"
        )
    if config.gradient_accumulation_fusion:
        raise NotImplementedError(
            "gradient_accumulation_fusion is not built yet: pass --no-gradient-accumulation-fusion"
        )
    if ddp_config.num_distributed_optimizer_instances > 1:
        raise NotImplementedError("num_distributed_optimizer_instances > 1 (hybrid sharding) is not built yet")


def _check_groups(groups: dict[str, Any]) -> None:
    axes = {"tensor": "tp_group", "pipeline": "pp_group", "expert": "ep_group"}
    wide = [f"{name} ({groups[key].size()})" for name, key in axes.items() if groups[key] and groups[key].size() > 1]
    if groups["dp_cp_group"].size() != groups["dp_group"].size():
        wide.append("context")
    if wide:
        raise NotImplementedError(f"parallelism beside the data axis is not built yet: {', '.join(wide)}")


def _mark_parameters(module: nn.Module, counted: bool) -> None:
    """Attributes that Megatron-Core reads; the engine carries them over to the optimizer's parameters."""
    for embedding in (child for child in module.modules() if isinstance(child, LanguageModelEmbedding)):
        for parameter in embedding.parameters():
            setattr(parameter, PASSED_ON, True)  # the model reads the weight to hand it to a tied output layer
    for parameter in module.parameters():
        parameter.__fsdp_param__ = True
        if not counted:
            # The optimizer sums squared norms over all ranks. Replicas of the first rank's gradient must not be
            # counted again; "shared" is the attribute that its filter knows.
            parameter.shared = True


def _mesh(group: torch.distributed.ProcessGroup, device: torch.device | str | None) -> DeviceMesh:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = torch.device(device).type if device is not None else (accelerator.type if accelerator else "cpu")
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(SHARD_AXIS,))

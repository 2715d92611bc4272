# SPDX-License-Identifier: Apache-2.0
"""The engine with the interface of Megatron-Core's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.fsdp import Offload, Strategy
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.engine.policy import ParameterKind
from megatron.fsdp.module.shown_parameters import PASSED_ON
from megatron.fsdp.module.unit_choice import embedding_parameters
from megatron.mcore_adapter.axes import complete, expert_tensor_group, instance_group, mesh_axes
from megatron.mcore_adapter.captured_iterations import call_with_new_weights, captures_iterations
from megatron.mcore_adapter.core_engine import CoreEngine
from megatron.mcore_adapter.core_optimizers import (
    count_over,
    follow_torch_optimizers,
    keep_main_weights,
    refuse_stale_weights,
)
from megatron.mcore_adapter.fused_gradients import accept_fused_gradients, set_attributes
from megatron.mcore_adapter.overlapped_experts import drive_combined_schedule
from megatron.mcore_adapter.precision_aware import gradient_of
from megatron.mcore_adapter.releases.precision_fields import precision_policy
from megatron_fsdp import MegatronFSDP
from megatron_fsdp.translation import strategy_of as strategy_of  # for programs too


class FullyShardedDataParallel(_BaseDataParallel):
    """A Megatron-Core model that is sharded over its data-parallel ranks.

    Megatron-Core's DistributedOptimizer and schedules drive it unmodified. ``named_parameters()``
    yields the main weights as DTensors. Without ``ddp_config.use_distributed_optimizer`` an
    optimizer of torch may step them too; gradients are final after every backward outside
    ``no_sync``, and its new weights are those of the next forward. Megatron-Core's other optimizers
    raise a ValueError for them.

    Args:
        config: configuration of the model.
        ddp_config: strategy, overlap and gradient precision. ``grad_reduce_in_fp32`` accumulates
            and reduces in fp32. ``megatron_fsdp_{main_params,main_grads,grad_comm}_dtype`` take
            precedence; older releases have ``preserve_fp32_weights``, which keeps fp32 main
            weights. ``megatron_fsdp_offload_policy``: host memory only, not files.
            ``megatron_fsdp_version`` 2: calls that start or await communication do nothing, since
            hooks do all of it, and gradients are final after every backward outside ``no_sync``.
        module: the model, which may be inside Float16Module; on the meta device with
            ``config.init_model_with_meta_device``.
        fsdp_unit_modules: classes or import paths of units. None: transformer layers, the
            embedding, the output layer.
        disable_bucketing: make the whole model one unit, with one group per dtype.
        device: the device to move the model to. None: the accelerator if there is one, otherwise
            the CPU.
        pg_collection: process groups; those of axes of size one may be missing. None: those of
            ``parallel_state``.

    Raises:
        ValueError: for configurations with which Megatron-Core would train wrongly, and silently.
        NotImplementedError: for options that are not built yet.
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
        pg_collection = complete(pg_collection, config)
        _check_configs(ddp_config, pg_collection)
        groups = ProcessGroupCollection.setup_process_groups_for_ddp(
            pg_collection, config, ddp_config
        )
        strategy = strategy_of(ddp_config)
        hooks_reduce = generation_of(ddp_config) == 2
        _check_experts(config, groups, pg_collection)
        index = mesh_axes(module, ddp_config, groups, pg_collection, device)
        _mark_parameters(module)
        units: Sequence[type | nn.Module | str] = default_unit_modules(module)
        if fsdp_unit_modules is not None:
            units = fsdp_unit_modules
        if index.device.type == "meta":  # a simulated run, of a model that stays where it is
            device = None
        engine = CoreEngine(
            module,
            index,
            _for_engine(ddp_config, module, config, has_experts=index.expert is not None),
            mixed_precision_policy=precision_policy(ddp_config),
            fsdp_unit_modules=units,
            disable_bucketing=disable_bucketing,
            device=device,
            pipeline=groups["pp_group"],
            calculate_per_token_loss=config.calculate_per_token_loss,
            init_model_with_meta_device=config.init_model_with_meta_device,
            # Programs read gradients between backward and step, or call backward within step.
            sync_model_each_microbatch=hooks_reduce or not ddp_config.use_distributed_optimizer,
            report_nan_in_param_grad=ddp_config.check_for_nan_in_grad,
        )
        if config.gradient_accumulation_fusion:
            _accept_fused_gradients(engine)
        if getattr(config, "overlap_moe_expert_parallel_comm", False):
            drive_combined_schedule(engine, config.delay_wgrad_compute)
        super().__init__(config=config, module=engine)
        self._choose_statistics_group(strategy, pg_collection)
        refuse_stale_weights()
        keep_main_weights()
        if not ddp_config.use_distributed_optimizer:
            follow_torch_optimizers(engine)
        self.ddp_config = ddp_config
        self._is_driven = not hooks_reduce
        self._is_captured = captures_iterations(config)
        self.megatron_fsdp_dist_index = index  # the published name of the mesh in use
        self.force_all_reduce = False  # the training loop assigns it at every step
        self._tied_across_stages = _tied_across_stages(engine)

    def _choose_statistics_group(
        self, strategy: Strategy, pg_collection: ProcessGroupCollection | None
    ) -> None:
        """Choose the ranks over which the optimizer sums squared norms of gradients."""
        dense_level, dense_outer = strategy.of(ParameterKind.DENSE)
        expert_level, expert_outer = strategy.of(ParameterKind.EXPERT)
        over_all_instances = dense_outer or expert_outer
        if over_all_instances:
            count_over(self, dist.group.WORLD)
        elif not (dense_level.shards_optimizer and expert_level.shards_optimizer):
            count_over(self, instance_group(pg_collection))
        _mark_copies(self.module, over_all_instances)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield main weights as DTensors, by ``module.`` and their global names.

        Args:
            prefix: precedes every name, with a dot.
            recurse: yield those of submodules too.
            remove_duplicate: yield a parameter that has several names only once.
        """
        prefix = f"{prefix}.module" if prefix else "module"
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @property
    def param_and_grad_buffer(self) -> CoreEngine:
        """The engine, by the name that optimizers and Megatron-LM's loop ask for."""
        return self.module

    # ---- gradients and weights

    @contextmanager  # of a generator: after an evaluation, pipeline schedules drop it unfinished
    def no_sync(self) -> Iterator[None]:
        """Mark the microbatches inside as not the last one of the step."""
        with self.module.no_sync():
            yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Start to reduce all gradients that have accumulated; arguments are ignored."""
        if self._is_driven:
            self.module.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Put final gradients on the ``.grad`` of every parameter that the optimizer steps."""
        # In the second generation they are there, unless a schedule ends inside of `no_sync`.
        self.module.finish_grad_sync(force_all_reduce and self._is_driven)
        for sharded in self._tied_across_stages:
            # Megatron-Core asks the model for the weight, sums this over the first and the last
            # stage in place, and then assigns the local tensor, which ``grad`` would not take.
            gradient = gradient_of(sharded.parameter)
            set_attributes(sharded.parameter, main_grad=gradient)
            set_attributes(sharded.compute, main_grad=gradient)
        if getattr(self.ddp_config, "megatron_fsdp_use_decoupled_grad", False):
            for sharded in self.module.sharded_params:
                # Megatron-Core sums some of these over tensor-parallel ranks.
                set_attributes(sharded.parameter, main_grad=gradient_of(sharded.parameter))

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply the gradients, in place."""
        self.module.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Clear the accumulated gradients, before the first microbatch of a step."""
        # A replay attaches no gradients: it writes to those that are there.
        self.module.zero_grad(set_to_none=not self._is_captured)
        self.module.is_last_microbatch = True

    def start_param_sync(
        self,
        *unused: Any,
        force_sync: bool = False,
        force_dispatch: bool = False,
    ) -> None:
        """Start the all-gathers of weights, at level 3 with ``force_dispatch`` only."""
        if self._is_driven and not self._is_captured:  # its graph gathers
            self.module.start_param_sync(force_sync=force_sync, force_dispatch=force_dispatch)

    def synchronize_param_gather(self) -> None:
        """Wait for all-gathers of weights; schedules call this after an evaluation."""
        if self._is_driven:
            self.module.synchronize_param_gather()

    def broadcast_params(self) -> None:
        """Broadcast the weights of the first data-parallel rank to the others."""
        self.module.broadcast_params()

    def stop_communication(self) -> None:
        """Wait for all communication."""
        self.module.stop_communication()

    # ---- state

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load the engine's state dict; the weights are active at once."""
        return self.module.load_state_dict(state_dict, strict=strict)


def generation_of(ddp_config: DistributedDataParallelConfig) -> int:
    """Return the generation, 1 or 2, that a configuration asks for; older ones have no field."""
    generation: int = getattr(ddp_config, "megatron_fsdp_version", 1)
    if generation not in (1, 2):
        raise ValueError(f"megatron_fsdp_version expects 1 or 2 but got {generation!r}")
    return generation


def default_unit_modules(module: nn.Module) -> list[type | nn.Module]:
    """List layers, the embedding, and the output layer, which is found by its name."""
    units: list[type | nn.Module] = [TransformerLayer, MambaLayer, LanguageModelEmbedding]
    for name, child in module.named_modules():
        if name.rpartition(".")[2] == "output_layer":
            units.append(child)
    return units


def _for_engine(
    ddp_config: DistributedDataParallelConfig,
    module: nn.Module,
    config: TransformerConfig,
    has_experts: bool,
) -> DistributedDataParallelConfig:
    """Return a copy of a configuration for the engine, with communication units in bytes.

    Args:
        ddp_config: configuration of the program, with communication units in elements.
        module: the model, whose first parameter has the dtype of the elements.
        config: configuration of the model.
        has_experts: this pipeline stage has experts; with expert parallelism other stages may.
    """
    ddp_config = copy(ddp_config)
    if config.num_moe_experts and config.expert_model_parallel_size > 1 and not has_experts:
        # Other pipeline stages have them.
        ddp_config.expert_data_parallel_sharding_strategy = None
        ddp_config.expert_outer_dp_sharding_strategy = None
    if config.pipeline_model_parallel_size > 1 and not embedding_parameters(module):
        ddp_config.embedding_data_parallel_sharding_strategy = None
    if captures_iterations(config):
        ddp_config.megatron_fsdp_cuda_graph_mode = True  # fixed addresses
        FullCudaGraphWrapper.__call__ = call_with_new_weights
    elements = ddp_config.suggested_communication_unit_size
    if elements is not None:
        first = next(module.parameters())
        ddp_config.suggested_communication_unit_size = elements * first.element_size()
    return ddp_config


def _check_configs(
    ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection | None
) -> None:
    if not ddp_config.use_megatron_fsdp:
        raise ValueError(
            "FullyShardedDataParallel needs ddp_config.use_megatron_fsdp: Megatron-Core would build"
            " an optimizer that trains on stale weights"
        )
    generation_of(ddp_config)
    offload = Offload.parse(getattr(ddp_config, "megatron_fsdp_offload_policy", None))
    if offload is not None and offload.folder is not None:
        raise NotImplementedError(
            f"megatron_fsdp_offload_policy={str(offload.folder)!r}: Megatron-Core's optimizer makes"
            ' its state in memory, and has none in files; use "host"'
        )
    instances = ddp_config.num_distributed_optimizer_instances
    groups = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    if instances > 1 and pg_collection is None and (groups is None or groups.size() != instances):
        raise ValueError(
            f"num_distributed_optimizer_instances is {instances} in ddp_config, but not in the"
            " process groups: call parallel_state.initialize_model_parallel"
            f"(num_distributed_optimizer_instances={instances})"
        )


def _check_experts(
    config: TransformerConfig,
    groups: dict[str, Any],
    pg_collection: ProcessGroupCollection | None,
) -> None:
    """Check the tensor axis of experts that Megatron-Core treats like other parameters."""
    if not config.num_moe_experts or groups["ep_group"].size() > 1:
        return
    tensor_size = groups["tp_group"].size()
    expert_tensor_size = expert_tensor_group(pg_collection).size()
    if tensor_size != expert_tensor_size:
        raise ValueError(
            f"experts with expert tensor parallelism {expert_tensor_size} and tensor parallelism"
            f" {tensor_size} need expert parallelism of at least 2: their gradients would be"
            " reduced over the wrong ranks"
        )


def _mark_parameters(module: nn.Module) -> None:
    """Set attributes that Megatron-Core reads; the engine copies them to the sharded parameters."""
    for embedding in module.modules():
        if isinstance(embedding, LanguageModelEmbedding):
            for parameter in embedding.parameters():
                # The model reads the weight to pass it on to a tied output layer.
                setattr(parameter, PASSED_ON, True)
    for parameter in module.parameters():
        set_attributes(parameter, __fsdp_param__=True)


def _accept_fused_gradients(engine: CoreEngine) -> None:
    for sharded in engine.sharded_params:
        if sharded.group.requires_grad:
            accept_fused_gradients(sharded.compute, sharded.group.gradients, sharded.index)


def _tied_across_stages(engine: CoreEngine) -> list[ShardedParam]:
    """Return the trainable parameters of which another pipeline stage has a copy."""
    tied = []
    for sharded in engine.sharded_params:
        if sharded.group.requires_grad and getattr(sharded.compute, "shared_embedding", False):
            tied.append(sharded)
    return tied


def _mark_copies(engine: MegatronFSDP, over_all_instances: bool) -> None:
    """Mark parameters whose gradient is a replica of another rank's."""
    # The optimizer sums squared norms over ranks, of one instance or all. Replicas must not be
    # counted again; "shared" is the attribute that its filter knows.
    for sharded in engine.sharded_params:
        partition = sharded.group.partition
        ranks = sharded.group.communicator
        is_replica = partition.num_inner == 1 and ranks.inner_rank > 0
        if over_all_instances and partition.num_outer == 1 and ranks.outer_rank > 0:
            is_replica = True
        if is_replica:
            set_attributes(sharded.parameter, shared=True)

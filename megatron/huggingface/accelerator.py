# SPDX-License-Identifier: Apache-2.0
"""An Accelerator that shards models and optimizers where accelerate wraps them for DDP."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.optimizer.sharded_optimizer import (
    ShardedOptimizer,
    refuse_optimizer,
    swap_parameters,
)
from megatron.huggingface import states
from megatron.huggingface.refusals import (
    problems_of_accelerator,
    problems_of_model,
    problems_of_sharding,
    raise_problems,
)
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer

SUPPORTED_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class ShardedAccelerator(Accelerator):
    """accelerate's Accelerator, whose `prepare` shards the model and its optimizer.

    What `prepare` returns for a model is a :class:`megatron.fsdp.MegatronFSDP`. With
    ``mixed_precision="bf16"`` the forward runs under autocast, as with DDP. Weights are gathered in
    the dtype that the model was loaded in, and updated in float32.

    Args:
        sharding: keyword arguments of :func:`megatron.fsdp.fully_shard_model`. Units default to the
            layers that transformers never splits over devices (`_no_split_modules`).
        **arguments: of accelerate's Accelerator, by name.

    Raises:
        ValueError: lists the arguments that are not supported, before any is used.
    """

    def __init__(self, *, sharding: Mapping[str, Any] | None = None, **arguments: Any):
        self.sharding = dict(sharding or {})
        problems = problems_of_sharding(self.sharding) + problems_of_accelerator(arguments)
        raise_problems("ShardedAccelerator does not take this", problems)
        # accelerate would otherwise leave the ranks of a machine without GPUs unconnected.
        arguments.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(**arguments)
        if self.distributed_type not in SUPPORTED_TYPES:
            problems = [f"{self.distributed_type}: use GPUs or CPUs"]
            raise_problems("ShardedAccelerator does not take this", problems)
        self._sharded: WeakSet[MegatronFSDP] = WeakSet()
        self._hidden: tuple[list[MegatronFSDP], list[torch.optim.Optimizer]] = ([], [])
        self.register_save_state_pre_hook(self._save_shards)
        self.register_load_state_pre_hook(self._load_shards)

    # ---- preparation

    def prepare(self, *args: Any, device_placement: None = None) -> Any:
        """Prepare objects as accelerate does; models become sharded, before their optimizers.

        Raises:
            NotImplementedError: for optimizers that need whole matrices, before a model is changed.
            ValueError: for models and optimizers that cannot be sharded, or for
                ``device_placement``.
        """
        if device_placement is not None:
            raise ValueError("device_placement: sharding places models; leave it out")
        for prepared in args:
            if isinstance(prepared, torch.optim.Optimizer) and not _is_sharded(prepared):
                refuse_optimizer(prepared)
        objects = []
        for prepared in args:
            if isinstance(prepared, nn.Module):
                prepared = self.prepare_model(prepared)
            objects.append(prepared)
        return super().prepare(*objects)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> MegatronFSDP:
        """Shard a model, for evaluation too; one that is sharded already is returned as it is.

        Args:
            model: an unsharded model, or what this method has returned.
            device_placement: ignored: sharding places the model.
            evaluation_mode: ignored: a model is sharded for evaluation as for training.

        Raises:
            ValueError: lists why the model cannot be sharded, the same on every rank.
        """
        wrapper = self._wrapper_of(model)
        if wrapper is None:
            raise_problems(f"{type(model).__name__} cannot be sharded", problems_of_model(model))
            # Evaluation mode leaves out the wrapper of DDP. What remains is autocast.
            prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
            self._models.remove(prepared)
            wrapper = fully_shard_model(prepared, **self._settings_for(prepared))
            # accelerate's own mark, with which it takes no model twice.
            wrapper._is_accelerate_prepared = True  # type: ignore[assignment]
            self._sharded.add(wrapper)
        if wrapper not in self._models:
            self._models.append(wrapper)
        return wrapper

    def prepare_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool | None = None,
    ) -> AcceleratedOptimizer:
        """Shard an optimizer over the parameters of a model, as it was before or after sharding.

        Raises:
            NotImplementedError: for optimizers that need whole matrices.
            ValueError: if its parameters are not those of one sharded model.
        """
        if not _is_sharded(optimizer):
            swap_parameters(optimizer, self._model_of(optimizer))
            fully_shard_optimizer(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def _settings_for(self, module: nn.Module) -> dict[str, Any]:
        """Return the arguments of `fully_shard_model` for a module."""
        settings = dict(self.sharding)
        if settings.get("fsdp_unit_modules") is None:
            settings["fsdp_unit_modules"] = default_units(module)
        if settings.get("device_mesh") is None and dist.is_initialized():
            # On the device of the Accelerator, which is a CPU with `cpu=True` on any machine.
            settings["device_mesh"] = init_device_mesh(
                self.device.type,
                (self.num_processes,),
                mesh_dim_names=("dp",),
            )
            settings["dp_shard_dim"] = "dp"
        return settings

    def _wrapper_of(self, module: nn.Module) -> MegatronFSDP | None:
        """Return the sharded model that is this module, or has it inside; None without one."""
        if isinstance(module, MegatronFSDP):
            return module
        for model in self._sharded:
            if model.module is module:
                return model
        return None

    def _model_of(self, optimizer: torch.optim.Optimizer) -> MegatronFSDP:
        own = set()
        for group in optimizer.param_groups:
            own.update(group["params"])
        for model in self._sharded:
            for sharded in model.sharded_params:
                if sharded.compute in own or sharded.parameter in own:
                    return model
        raise ValueError(
            "the optimizer has no parameters of a model that this ShardedAccelerator has prepared:"
            " hand both to prepare(), or prepare the model first"
        )

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> nn.Module:
        """Return the user's module, whose `generate` and `config` are used as before.

        Args:
            model: a sharded model, or any other one.
            keep_fp32_wrapper: whether the forward keeps running under autocast.
            keep_torch_compile: whether a compiled module stays compiled.
        """
        if isinstance(model, MegatronFSDP):
            model = model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    # ---- training

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Clip gradients by the norm over all ranks; a collective.

        Args:
            parameters: parameters of a sharded model; their gradients are scaled in place.
            max_norm: largest norm that is left as it is.
            norm_type: order of the norm.

        Returns:
            The norm over all ranks before clipping, a 0-d tensor.
        """
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        if isinstance(norm, DTensor):
            return norm.full_tensor()
        return norm

    @contextmanager
    def join_uneven_inputs(
        self,
        joinables: object,
        even_batches: bool | None = None,
    ) -> Iterator[NoReturn]:
        """Refuse: ranks with different numbers of batches would wait for each other.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "join_uneven_inputs: every forward of a sharded model is a collective; give each rank"
            " the same number of batches, which prepared data loaders do"
        )
        yield

    # ---- checkpoints

    def get_state_dict(
        self,
        model: nn.Module,
        unwrap: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Gather the weights under the module's own names; a collective.

        The main process gets tensors on the CPU, the others an empty dict.
        """
        wrapper = self._wrapper_of(model)
        if wrapper is None:
            return super().get_state_dict(model, unwrap)
        return states.whole_state_dict(wrapper, keep=self.is_main_process)

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **arguments: Any,
    ) -> str:
        """Save shards of models and optimizers; everything else as accelerate does."""
        with self._hiding_sharded_objects():
            return super().save_state(output_dir, safe_serialization, **arguments)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict | None = None,
        **arguments: Any,
    ) -> None:
        """Load what `save_state` has saved, on any number of ranks.

        The state of random generators and samplers is that of the rank that saved it.
        """
        with self._hiding_sharded_objects():
            super().load_state(input_dir, load_kwargs, **arguments)

    @contextmanager
    def _hiding_sharded_objects(self) -> Iterator[None]:
        """Leave models and optimizers, inside the context, to the hooks of this class."""
        lists: dict[str, list[Any]] = {"_models": self._models, "_optimizers": self._optimizers}
        self._hidden = lists["_models"], [prepared.optimizer for prepared in lists["_optimizers"]]
        for name in lists:
            setattr(self, name, [])
        try:
            yield
        finally:
            for name, objects in lists.items():
                setattr(self, name, objects)
            self._hidden = [], []

    def _save_shards(
        self,
        models: object,
        weights: object,
        folder: str,
    ) -> None:
        states.save_shards(folder, *self._hidden)

    def _load_shards(self, models: object, folder: str) -> None:
        states.load_shards(folder, *self._hidden)


def default_units(module: nn.Module) -> list[type[nn.Module] | nn.Module]:
    """Return the layers of a module of transformers.

    They are the classes that are never split, and the further layers in the model's plan for FSDP2
    (transformers 5.24), whose names have ``*`` for a number.
    """
    names = getattr(module, "_no_split_modules", None) or ()
    rules = getattr(module, "fsdp_plan", None) or ()
    never_split: dict[type[nn.Module], None] = {}
    planned = []
    for name, inner in module.named_modules():
        # A rule such as model.layers.* is for all layers.
        rule = re.sub(r"\d+", "*", name)
        if type(inner).__name__ in names:
            never_split[type(inner)] = None
        elif rule in rules and "*" in rule:
            planned.append(inner)
    return [*never_split, *planned]


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return isinstance(optimizer, ShardedOptimizer)

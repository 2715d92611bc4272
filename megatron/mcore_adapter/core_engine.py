# SPDX-License-Identifier: Apache-2.0
"""The engine with Megatron-Core's names of parameters and its initialisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.mcore_adapter.core_initialiser import MegatronCoreInitialiser
from megatron.mcore_adapter.global_names import GlobalNames
from megatron_fsdp import MegatronFSDP


class CoreEngine(MegatronFSDP):
    """The engine with Megatron-Core's names and initialisation.

    Layers are numbered across pipeline stages and experts across expert ranks, in
    ``named_parameters()`` and state dicts. Other arguments are those of :class:`MegatronFSDP`.

    Args:
        module: the model, which may be inside Float16Module.
        use_cpu_initialization: see :class:`MegatronCoreInitialiser`.
        pipeline: group of the ranks of all stages; an error on one stage is raised on all of them.
    """

    _gives_advice = False  # units have defaults, and Megatron-Core's optimizers step the weights
    _is_copyable = False  # its names and initialisation are those of this module
    _shows_attributes = False  # Megatron-Core unwraps models until one has the attribute

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        use_cpu_initialization: bool | None = None,
        pipeline: dist.ProcessGroup | None = None,
        **settings: Any,
    ):
        self._pipeline = pipeline
        self.initialiser = MegatronCoreInitialiser(module, use_cpu_initialization)
        self._global_names = GlobalNames(module)
        super().__init__(module, *args, **settings)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield main weights, as the base class does, by their global names.

        Args:
            prefix: precedes every name, with a dot.
            recurse: yield those of submodules too.
            remove_duplicate: yield a parameter that has several names only once.
        """
        if prefix:
            prefix += "."
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield prefix + self._global_names.to_global(name), parameter

    def _shown_name(self, sharded: ShardedParam) -> str:
        return self._global_names.to_global(super()._shown_name(sharded))

    def _groups_that_end_together(self) -> list[dist.ProcessGroup]:
        groups = super()._groups_that_end_together()
        if self._pipeline is None:
            return groups
        return [*groups, self._pipeline]

    def state_dict(  # type: ignore[override]  # torch declares overloads, of which this does both
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return main weights and buffers, as the base class does, by their global names.

        Args:
            args: positional arguments of ``torch.nn.Module.state_dict``.
            destination: is filled and returned; None: a new dict.
            prefix: precedes every key.
            keep_vars: leave the tensors attached to autograd.
        """
        if destination is None:
            destination = {}
        state = super().state_dict(*args, prefix="", keep_vars=keep_vars)
        for key, value in state.items():
            destination[prefix + self._global_names.to_global(key)] = value
        return destination

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load main weights and buffers, as the base class does, by their global names.

        Args:
            state_dict: DTensors or whole tensors, whose values are copied.
            strict: raise an error for keys that do not fit; otherwise a warning names them.
            assign: ignored: weights remain views of the flat tensors, so values are copied.
        """
        if isinstance(state_dict, Mapping):
            local = {}
            for key, value in state_dict.items():
                local[self._global_names.to_local(key)] = value
            state_dict = local
        return super().load_state_dict(state_dict, strict, assign)

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return :meth:`state_dict`, for programs that have unwrapped the model."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def copy_main_weights_to_model_weights(self) -> None:
        """Install main weights as compute weights; the optimizer calls this after a step."""
        self.install_optimized_model_weights(only_trainable=True)

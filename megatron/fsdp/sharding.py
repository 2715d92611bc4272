# SPDX-License-Identifier: Apache-2.0
"""From the parameters of units to groups and sharded parameters."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.fsdp import meta_init
from megatron.fsdp.dtensor.gradient import NormGroup
from megatron.fsdp.dtensor.sharded_param import ParameterMesh, ShardedParam
from megatron.fsdp.engine.axes import Axes
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import streams_for
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.policy import GradientPolicy, MixedPrecisionPolicy, ShardingStrategy
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.engine.units import is_expert_parameter


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded: everything that its groups need to know.

    Args:
        strategy: what the inner axis divides.
        outer_strategy: what the outer axis divides: nothing, or optimizer state.
        initialiser: gives modules on the meta device their first values; None where there are none.
    """

    index: FSDPDistributedIndex
    strategy: ShardingStrategy
    outer_strategy: ShardingStrategy
    gradients: GradientPolicy
    precision: MixedPrecisionPolicy
    device: torch.device
    initialiser: meta_init.Initialiser | None = None

    def shard(
        self, units: list[Unit], parameters_of: dict[Unit, dict[str, nn.Parameter]]
    ) -> dict[nn.Parameter, ShardedParam]:
        """Give every unit its groups; the sharded parameters, by the module's own."""
        streams = streams_for(self.device)
        communicators, places = {}, {}
        sharded: dict[nn.Parameter, ShardedParam] = {}
        for unit, parameters in parameters_of.items():
            for (dtype, trainable, expert, _), names in self._kinds(parameters).items():
                if expert not in places:
                    axes = self.index.axes(expert)
                    communicators[expert] = self._communicator(axes, streams)
                    places[expert] = self._place(axes, expert)
                group = ParamGroup(
                    names,
                    [parameters[name] for name in names],
                    self.strategy,
                    self.outer_strategy.shards_optimizer,
                    self.precision.resolve(dtype, trainable),
                    communicators[expert],
                    self.device,
                )
                unit.groups.append(group)
                for position, parameter in enumerate(group.parameters):
                    sharded[parameter] = ShardedParam(group, position, places[expert])
                    if not parameter.is_meta:
                        group.shard_parameter(position)
        if self.initialiser is not None:
            self._initialise(units, sharded)
        return sharded

    def _kinds(
        self, parameters: dict[str, nn.Parameter]
    ) -> dict[tuple[torch.dtype, bool, bool, str | None], list[str]]:
        """Names of the parameters that can be one group."""
        kinds: dict[tuple[torch.dtype, bool, bool, str | None], list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            expert = self.index.expert is not None and is_expert_parameter(name, parameter)
            # A weight that pipeline stages share is cut alike on all of them, whatever else is in
            # their units.
            alone = name if getattr(parameter, "shared_embedding", False) else None
            kinds[parameter.dtype, parameter.requires_grad, expert, alone].append(name)
        return kinds

    def _communicator(self, axes: Axes, streams: Any) -> Communicator:
        return Communicator(
            inner=axes.inner.get_group(),
            outer=axes.outer.get_group() if axes.outer is not None else None,
            all_gather_group=axes.all_gather_group,
            # Expert gradients are summed over fewer ranks, but the loss is the mean over all data
            # ranks.
            divisor=1 if self.gradients.sum_only else self.index.dense.num_data_ranks,
            average_in_collective=self.gradients.average_in_collective,
            streams=streams,
        )

    def _place(self, axes: Axes, expert: bool) -> ParameterMesh:
        mesh = axes.dtensor_mesh(self.outer_strategy.shards_optimizer)
        return ParameterMesh(
            axes, mesh, *(self._expert_holders(axes) if expert else self._holders(axes))
        )

    def _holders(self, axes: Axes) -> tuple[NormGroup, NormGroup]:
        """For norms: of parameters that the tensor axis divides, and of those that it copies."""
        groups = [axes.inner.get_group()] if self.strategy.shards_optimizer else []
        if self.outer_strategy.shards_optimizer:
            groups.append(axes.outer.get_group())
        tensor = [axes.tensor.get_group()] if axes.tensor is not None else []
        return NormGroup((*groups, *tensor)), NormGroup(tuple(groups))

    def _expert_holders(self, axes: Axes) -> tuple[NormGroup, NormGroup]:
        """The same for experts.

        Other ranks hold other experts of the same name: their norm is over all of them.
        """
        dense = self.index.dense
        groups = [dense.inner.get_group()]
        if self.outer_strategy.shards_optimizer:
            groups.append(dense.outer.get_group())
        if dense.tensor is not None:
            groups.append(dense.tensor.get_group())
        copies = 1 if self.strategy.shards_optimizer else axes.inner.size()
        return NormGroup(tuple(groups), copies), NormGroup(
            tuple(groups), copies * (axes.tensor.size() if axes.tensor else 1)
        )

    def _initialise(self, units: list[Unit], sharded: dict[nn.Parameter, ShardedParam]) -> None:
        wanted = [
            unit.module for unit in units if unit.module is not None and not unit.is_automatic
        ]
        for modules in meta_init.pieces(units[0].module, wanted):
            waiting = [
                p for module in modules for p in module.parameters(recurse=False) if p.is_meta
            ]
            meta_init.materialize(modules, self.device, self.initialiser)
            for parameter in dict.fromkeys(waiting):
                member = sharded[parameter]
                member.group.shard_parameter(member.index)

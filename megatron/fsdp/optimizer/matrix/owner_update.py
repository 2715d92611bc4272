# SPDX-License-Identifier: Apache-2.0
"""The update of whole matrices by their owners, with the step of an unmodified optimizer."""

# [Note: owners of matrices] In each round (see [Note: rounds]) the owners get gradients and weights
# of their matrices, step, and send the new weights. The messages of the next round travel while
# this one is computed, and the new weights while the next one is.
#
#     gradients, weights    | round 0 | round 1 | round 2 |
#     step of the owners              | round 0 | round 1 | round 2 |
#     new weights                               | round 0 | round 1 | round 2 |
#
# State stays with the owners. Before a state dict it is sharded like the parameters, so that its
# form is that of all other optimizers; the next step gives it back to the owners.

from __future__ import annotations

import inspect
from ast import literal_eval
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from megatron.fsdp.dtensor.sharded_param import ShardedParam, is_linked, sharded_param_of
from megatron.fsdp.engine import collectives
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.loops_in_c import are_same
from megatron.fsdp.engine.mesh import Axes
from megatron.fsdp.engine.tensor_parallel import has_uneven_slices, local_tensor
from megatron.fsdp.module.sharded_module import ShardedModule, owner_of
from megatron.fsdp.optimizer.flat_segments import State
from megatron.fsdp.optimizer.flat_update import run_step, step_on_parameters
from megatron.fsdp.optimizer.matrix.exchange import Exchange
from megatron.fsdp.optimizer.matrix.matrix_parts import Matrix, OwnerRanks
from megatron.fsdp.optimizer.matrix.owners import (
    NEWTON_SCHULZ_STEPS,
    UpdateCost,
    choose_owners,
    cost_of,
    first_entries,
    matrix_class,
)
from megatron.fsdp.optimizer.optimizer_state import (
    GroupSettings,
    OptimizerClass,
    ParamState,
    parameters_of,
)
from megatron.fsdp.quantized.tensor_subclasses import users_attributes

Round = list[Matrix]


class Owned(NamedTuple):
    """A matrix of which this rank is the owner, with all of its weight and gradient."""

    matrix: Matrix
    weight: torch.Tensor
    gradient: torch.Tensor


class OwnerUpdate:
    """The update of one optimizer by owners; see [Note: owners of matrices]."""

    def __init__(self, kind: OptimizerClass):
        self._step = inspect.unwrap(kind.step)  # without hooks
        self._first_entries = first_entries(kind)
        self._parameters: list[torch.Tensor] = []
        self._group_of: dict[torch.Tensor, int] = {}
        self._rounds: list[Round] = []
        self._others: set[torch.Tensor] = set()  # parameters that have no owner

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Update all parameters of ``optimizer`` that have a gradient."""
        self.prepare(optimizer)
        rounds = []
        for own_round in self._rounds:
            trained = []
            for matrix in own_round:
                if matrix.parameter.grad is not None:
                    trained.append(matrix)
            if trained:
                rounds.append(trained)
        collected = None
        if rounds:
            collected = _collect(rounds[0])
        sent = Pending()
        for number, own_round in enumerate(rounds, 1):
            assert collected is not None
            arrival, owned = collected
            if number < len(rounds):
                collected = _collect(rounds[number])
            arrival.wait()
            if owned is not None:
                self._update(optimizer, owned)
            sent.wait()
            sent = _distribute(own_round, owned)
        sent.wait()
        if self._others:
            others = []
            for group in optimizer.param_groups:
                group_others = []
                for parameter in group["params"]:
                    if parameter in self._others:
                        group_others.append(parameter)
                others.append(group_others)
            step_on_parameters(self._step, optimizer, others)

    def _update(self, optimizer: Optimizer, owned: Owned) -> None:
        """Step on a whole matrix of this rank; the step may create or replace its state."""
        matrix, weight, gradient = owned
        parameter = matrix.parameter
        param_state = optimizer.state[parameter]
        # Optimizers read the user's attributes. All tensor-parallel slices are in this matrix.
        attributes = users_attributes(matrix.sharded_param.compute)
        attributes["partition_dim"] = -1
        vars(weight).update(attributes)
        weight.grad = gradient.to(weight.dtype)
        state: State = defaultdict(dict)
        state[weight] = tree_map_only(DTensor, local_tensor, param_state)
        params: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        params[self._group_of[parameter]].append(weight)
        run_step(self._step, optimizer, params, state)
        for name, value in state[weight].items():
            known = param_state.get(name)
            if getattr(known, "_local_tensor", None) is not value:
                param_state[name] = tree_map_only(torch.Tensor, matrix.take, value)

    # ---- owners

    def _assign_owners(self, optimizer: Optimizer) -> None:
        self._group_of = {}
        self._rounds = []
        self._others = set()
        found: dict[tuple[ShardedModule, Axes], list[ShardedParam]] = defaultdict(list)
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self._group_of[parameter] = number
                if not _can_have_owner(parameter):
                    self._others.add(parameter)
                    continue
                model = owner_of(parameter)
                sharded_param = sharded_param_of(parameter)
                axes = model._mesh.axes(sharded_param.kind)
                found[model, axes].append(sharded_param)
        for (_, axes), sharded_params in found.items():
            ranks = OwnerRanks(axes)
            costs = []
            able = []
            for sharded_param in sharded_params:
                costs.append(self._cost(optimizer, sharded_param))
                able.append(ranks.with_all(sharded_param))
            rounds = choose_owners(costs, able, list(ranks.members))
            for pairs in rounds:
                own_round = []
                for index, owner in pairs:
                    matrix = Matrix(sharded_params[index], ranks, owner)
                    own_round.append(matrix)
                self._rounds.append(own_round)

    def _cost(self, optimizer: Optimizer, sharded_param: ShardedParam) -> UpdateCost:
        parameter = sharded_param.parameter
        number = self._group_of[parameter]
        settings: GroupSettings = optimizer.param_groups[number]
        return cost_of(
            shape=sharded_param.slice.shape,
            itemsize=parameter.dtype.itemsize,
            steps=settings.get("ns_steps", NEWTON_SCHULZ_STEPS),
        )

    # ---- state

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer) -> None:
        """Assign owners where the parameters have changed, and give the state to the owners."""
        parameters = parameters_of(optimizer)
        if not are_same(self._parameters, parameters):
            self.shard_state(optimizer)  # other matrices change the owners of all
            self._assign_owners(optimizer)
            self._parameters = [*parameters]
        for own_round in self._rounds:
            exchange = Exchange(own_round[0].ranks.group)
            collected = []
            for matrix in own_round:
                param_state = optimizer.state[matrix.parameter]
                self._add_first_entries(matrix, param_state)
                for name in sorted(param_state):
                    value = param_state[name]
                    if matrix.is_with_owner(value):
                        continue
                    if not isinstance(value, DTensor) or value.shape != matrix.shape:
                        param_state[name] = tree_map_only(torch.Tensor, matrix.take, value)
                        continue
                    local = local_tensor(value)
                    whole = matrix.collect(local, exchange)
                    if whole is None:
                        whole = local.new_empty(0)
                    collected.append((matrix, name, whole))
            if collected:
                exchange.start().wait()
            for matrix, name, whole in collected:
                param_state = optimizer.state[matrix.parameter]
                param_state[name] = matrix.with_owner(whole, matrix.shape)

    def _add_first_entries(self, matrix: Matrix, param_state: ParamState) -> None:
        if not matrix.parameter.requires_grad:
            return
        for name in self._first_entries:
            if name not in param_state:
                local = matrix.weight.new_zeros(0)
                if matrix.is_own:
                    local = matrix.weight.new_zeros(matrix.shape)
                param_state[name] = matrix.with_owner(local, matrix.shape)

    @torch.no_grad()
    def shard_state(self, optimizer: Optimizer) -> None:
        """Shard the state of the owners like the parameters, for a state dict; a collective."""
        for own_round in self._rounds:
            if not self._first_entries:
                _share_entries(own_round, optimizer)
            exchange = Exchange(own_round[0].ranks.group)
            sharded = []
            for matrix in own_round:
                param_state = optimizer.state[matrix.parameter]
                for name in sorted(param_state):
                    value = param_state[name]
                    if not matrix.is_with_owner(value):
                        continue
                    if value.shape != matrix.shape:
                        continue
                    whole = None
                    if matrix.is_own:
                        whole = local_tensor(value).contiguous()
                    local = torch.empty_like(matrix.weight, dtype=value.dtype)
                    matrix.distribute(whole, local, exchange)
                    sharded.append((matrix, name, local))
            if sharded:
                exchange.start().wait()
            for matrix, name, local in sharded:
                param_state = optimizer.state[matrix.parameter]
                param_state[name] = matrix.sharded_param.over(local)


def owner_update(
    optimizer: Optimizer,
    kind: OptimizerClass,
) -> OwnerUpdate | None:
    """Return the update by owners for a matrix optimizer of the user's class, else None."""
    if matrix_class(kind) is None:
        return None
    update = OwnerUpdate(kind)
    optimizer.register_state_dict_pre_hook(update.shard_state)
    return update


def _can_have_owner(parameter: torch.Tensor) -> bool:
    """Return True for a sharded matrix of which tensor-parallel ranks have equal layouts."""
    if not is_linked(parameter) or parameter.ndim != 2:  # the optimizer itself refuses vectors
        return False
    in_group = sharded_param_of(parameter).group.parameters
    return not any(has_uneven_slices(compute) for compute in in_group)


# ---- rounds


def _collect(own_round: Round) -> tuple[Pending, Owned | None]:
    """Start to send the owners what they update; return what this rank owns, not yet complete."""
    exchange = Exchange(own_round[0].ranks.group)
    owned = None
    for matrix in own_round:
        weight = matrix.collect(matrix.weight, exchange)
        gradient = matrix.collect(matrix.gradient, exchange)
        if weight is not None and gradient is not None:
            owned = Owned(matrix, weight, gradient)
    arrival = exchange.start()
    return arrival, owned


def _distribute(own_round: Round, owned: Owned | None) -> Pending:
    """Start to send all ranks the new weights of a round."""
    exchange = Exchange(own_round[0].ranks.group)
    for matrix in own_round:
        whole = None
        if owned is not None and matrix.is_own:
            whole = owned.weight
        matrix.distribute(whole, matrix.weight, exchange)
    return exchange.start()


# ---- state that only a step can create
#
# Only the owner has it then. In a state dict, all ranks have the same names: those of tensors, of
# which the owner has all, and values that are no tensors or have no dims.


def _share_entries(own_round: Round, optimizer: Optimizer) -> None:
    """Add the entries of the owners' state on all other ranks, without values; a collective."""
    ranks = own_round[0].ranks
    members = list(ranks.members)
    entries = []
    for number, matrix in enumerate(own_round):
        if not matrix.is_own:
            continue
        param_state = optimizer.state[matrix.parameter]
        for name, value in param_state.items():
            if isinstance(value, DTensor) and not matrix.is_with_owner(value):
                continue  # sharded already
            entry = (members, number, name, _described(value))
            entries.append(repr(entry))
    texts = collectives.exchange(entries, [ranks.group])
    for text in texts:
        other_members, number, name, description = literal_eval(text)
        if other_members != members:
            continue
        matrix = own_round[number]
        if not matrix.is_own:
            param_state = optimizer.state[matrix.parameter]
            param_state[name] = _made_from(description, matrix)


def _described(value: Any) -> Any:
    """Return a literal that describes an entry, or a part of one."""
    if isinstance(value, list | tuple):
        return [_described(element) for element in value]
    if not isinstance(value, torch.Tensor):
        return (value,)
    dtype_name = str(value.dtype).removeprefix("torch.")
    if not value.ndim:
        return value.item(), dtype_name
    return tuple(value.shape), dtype_name


def _made_from(description: Any, matrix: Matrix) -> Any:
    """Return the entry of a rank that is not the owner."""
    if isinstance(description, list):
        return [_made_from(element, matrix) for element in description]
    if len(description) == 1:
        return description[0]
    content, dtype_name = description
    dtype = getattr(torch, dtype_name)
    if not isinstance(content, tuple):
        return torch.tensor(content, dtype=dtype)
    nothing = matrix.weight.new_empty(0, dtype=dtype)
    return matrix.with_owner(nothing, content)

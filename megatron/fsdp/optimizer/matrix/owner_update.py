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
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from megatron.fsdp.dtensor.sharded_param import ShardedParam, is_linked, sharded_param_of
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.policy import ParameterKind
from megatron.fsdp.engine.tensor_parallel import has_uneven_slices
from megatron.fsdp.optimizer.flat_segments import State, are_same
from megatron.fsdp.optimizer.flat_update import run_step
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
from megatron.fsdp.optimizer.optimizer_state import OptimizerClass, Setting, Slots, parameters_of
from megatron.fsdp.quantized.tensor_subclasses import users_attributes
from megatron.fsdp.sharded_module import ShardedModule, owner_of

Round = list[Matrix]
Owned = tuple[Matrix, torch.Tensor, torch.Tensor]  # with its weight and gradient, all of them


class OwnerUpdate:
    """The update of one optimizer by owners; see [Note: owners of matrices]."""

    def __init__(self, kind: OptimizerClass):
        self._step = inspect.unwrap(kind.step)  # without hooks
        self._first_entries = first_entries(kind)
        self._parameters: list[torch.Tensor] = []
        self._group_of: dict[torch.Tensor, int] = {}
        self._rounds: list[Round] = []
        self._others: set[torch.Tensor] = set()  # that have no owner

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update all parameters of ``optimizer`` that have a gradient."""
        self.prepare(optimizer)
        trained = ([one for one in own if one.parameter.grad is not None] for own in self._rounds)
        rounds = list(filter(None, trained))
        ahead = _collect(rounds[0]) if rounds else None
        sent = Pending()
        for number, own_round in enumerate(rounds, 1):
            assert ahead is not None
            arrival, owned = ahead
            ahead = _collect(rounds[number]) if number < len(rounds) else None
            arrival.wait()
            if owned is not None:
                self._update(optimizer, owned)
            sent.wait()
            sent = _distribute(own_round, owned)
        sent.wait()
        # torch's operations on several tensors take no mix of DTensors and plain parameters.
        for are_sharded in (True, False) if self._others else ():
            groups = [
                [each for each in own if each in self._others and is_linked(each) == are_sharded]
                for own in (group["params"] for group in optimizer.param_groups)
            ]
            run_step(self._step, optimizer, groups, optimizer.state)

    def _update(self, optimizer: torch.optim.Optimizer, owned: Owned) -> None:
        """Step on a whole matrix of this rank, whose state may be made or replaced by that."""
        matrix, weight, gradient = owned
        slots = optimizer.state[matrix.parameter]
        # Optimizers look for marks of the user. All slices of tensor parallelism are in the matrix.
        vars(weight).update(users_attributes(matrix.sharded_param.compute), partition_dim=-1)
        weight.grad = gradient.to(weight.dtype)
        whole = tree_map_only(DTensor, attrgetter("_local_tensor"), slots)
        state: State = defaultdict(dict, {weight: whole})
        groups: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        groups[self._group_of[matrix.parameter]].append(weight)
        run_step(self._step, optimizer, groups, state)
        for name, value in state[weight].items():
            if getattr(slots.get(name), "_local_tensor", None) is not value:
                slots[name] = tree_map_only(torch.Tensor, matrix.take, value)

    # ---- owners

    def _assign_owners(self, optimizer: torch.optim.Optimizer) -> None:
        self._group_of, self._rounds, self._others = {}, [], set()
        found: dict[tuple[ShardedModule, ParameterKind], list[ShardedParam]] = defaultdict(list)
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self._group_of[parameter] = number
                if not _can_have_owner(parameter):
                    self._others.add(parameter)
                    continue
                model, sharded_param = owner_of(parameter), sharded_param_of(parameter)
                found[model, sharded_param.kind].append(sharded_param)
        for (model, kind), sharded_params in found.items():
            ranks = OwnerRanks(model._mesh.axes(kind))
            costs = [self._cost(optimizer, each) for each in sharded_params]
            able = [ranks.with_all(each) for each in sharded_params]
            self._rounds += [
                [Matrix(sharded_params[index], ranks, owner) for index, owner in pairs]
                for pairs in choose_owners(costs, able, [*ranks.members])
            ]

    def _cost(self, optimizer: torch.optim.Optimizer, sharded_param: ShardedParam) -> UpdateCost:
        parameter = sharded_param.parameter
        settings: Setting = optimizer.param_groups[self._group_of[parameter]]
        steps = settings.get("ns_steps", NEWTON_SCHULZ_STEPS)
        return cost_of(sharded_param.slice.shape, parameter.dtype.itemsize, steps)

    # ---- state

    @torch.no_grad()
    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign owners where the parameters have changed, and give the state to the owners."""
        parameters = parameters_of(optimizer)
        if not are_same(self._parameters, parameters):
            self.shard_state(optimizer)  # other matrices change the owners of all
            self._assign_owners(optimizer)
            self._parameters = [*parameters]
        for own_round in self._rounds:
            exchange, given = Exchange(own_round[0].ranks.group), []
            for matrix in own_round:
                slots = optimizer.state[matrix.parameter]
                self._add_first_entries(matrix, slots)
                for name in sorted(slots):
                    value = slots[name]
                    if matrix.is_with_owner(value):
                        continue
                    if isinstance(value, DTensor) and tuple(value.shape) == matrix.shape:
                        local = value._local_tensor
                        whole = matrix.collect(local, exchange)
                        given.append((matrix, name, local.new_empty(0) if whole is None else whole))
                    else:
                        slots[name] = tree_map_only(torch.Tensor, matrix.take, value)
            if given:
                exchange.start().wait()
            for matrix, name, local in given:
                optimizer.state[matrix.parameter][name] = matrix.with_owner(local, matrix.shape)

    def _add_first_entries(self, matrix: Matrix, slots: Slots) -> None:
        missing = [name for name in self._first_entries if name not in slots]
        for name in missing if matrix.parameter.requires_grad else ():
            shape = matrix.shape if matrix.is_own else (0,)
            slots[name] = matrix.with_owner(matrix.weight.new_zeros(shape), matrix.shape)

    @torch.no_grad()
    def shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Shard the state of the owners like the parameters, for a state dict; a collective."""
        for own_round in self._rounds:
            if not self._first_entries:
                _tell_state(own_round, optimizer)
            exchange, sharded = Exchange(own_round[0].ranks.group), []
            for matrix in own_round:
                slots = optimizer.state[matrix.parameter]
                for name in sorted(slots):
                    value = slots[name]
                    if matrix.is_with_owner(value) and tuple(value.shape) == matrix.shape:
                        local = torch.empty_like(matrix.weight, dtype=value.dtype)
                        whole = value._local_tensor.contiguous() if matrix.is_own else None
                        matrix.distribute(whole, local, exchange)
                        sharded.append((matrix, name, local))
            if sharded:
                exchange.start().wait()
            for matrix, name, local in sharded:
                optimizer.state[matrix.parameter][name] = matrix.sharded_param.over(local)


def owner_update(optimizer: torch.optim.Optimizer, kind: OptimizerClass) -> OwnerUpdate | None:
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
    return not any(map(has_uneven_slices, sharded_param_of(parameter).group.parameters))


# ---- rounds


def _collect(own_round: Round) -> tuple[Pending, Owned | None]:
    """Start to send the owners what they update; return what this rank owns, not yet complete."""
    exchange, owned = Exchange(own_round[0].ranks.group), None
    for matrix in own_round:
        weight = matrix.collect(matrix.weight, exchange)
        gradient = matrix.collect(matrix.gradient, exchange)
        if weight is not None and gradient is not None:
            owned = matrix, weight, gradient
    return exchange.start(), owned


def _distribute(own_round: Round, owned: Owned | None) -> Pending:
    """Start to send all ranks the new weights of a round."""
    exchange = Exchange(own_round[0].ranks.group)
    for matrix in own_round:
        whole = owned[1] if owned is not None and matrix.is_own else None
        matrix.distribute(whole, matrix.weight, exchange)
    return exchange.start()


# ---- state that only a step can make
#
# Only the owner has it then. In a state dict, all ranks have the same names: those of tensors, of
# which the owner has all, and values that are no tensors or have no dims.


def _tell_state(own_round: Round, optimizer: torch.optim.Optimizer) -> None:
    """Make entries of the owners' state known to all ranks; a collective."""
    ranks, told = own_round[0].ranks, []
    members = list(ranks.members)
    for number, matrix in enumerate(own_round):
        for name, value in optimizer.state[matrix.parameter].items() if matrix.is_own else ():
            if not isinstance(value, DTensor) or matrix.is_with_owner(value):  # not sharded yet
                told.append(repr((members, number, name, _described(value))))
    for text in agree(told, [ranks.group]):
        other_members, number, name, description = literal_eval(text)
        matrix = own_round[number]
        if other_members == members and not matrix.is_own:
            optimizer.state[matrix.parameter][name] = _made_from(description, matrix)


def _described(value: Any) -> Any:
    """Return a literal that describes an entry, or a part of one."""
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return (value,)
    content = tuple(value.shape) if value.ndim else value.item()
    return content, str(value.dtype).removeprefix("torch.")


def _made_from(description: Any, matrix: Matrix) -> Any:
    """Return the entry of a rank that is not the owner."""
    if isinstance(description, list):
        return [_made_from(each, matrix) for each in description]
    if len(description) == 1:
        return description[0]
    content, dtype = description[0], getattr(torch, description[1])
    if not isinstance(content, tuple):
        return torch.tensor(content, dtype=dtype)
    return matrix.with_owner(matrix.weight.new_empty(0, dtype=dtype), content)

# SPDX-License-Identifier: Apache-2.0
"""Flat segments of main weights, with their gradients and optimizer state."""

# [Note: flat segments] The local tensors of a group's parameters are views of one flat tensor, and
# so are those of their gradients. Updating it element by element updates every parameter in it.
#
#     main shard   | weight 1 | bias 1 |..| weight 2 | weight 3 |        dots are padding
#     runs         |         param group 0           | group 1  |
#     exp_avg      |        one flat tensor          | another  |
#     segments     |       step 7      |  |  step 5  |  step 7  |
#
# A run has neighbors in the main shard that are in one param group of the optimizer. Each of its
# moments is one flat tensor, of which the tensors in `optimizer.state` are views. A segment has
# members of a run with equal counters (`step`) which all have a gradient, or all have none.
#
# State dicts contain counters of every parameter: they are 0-d views of one vector. A step counts
# once for a segment, and one call copies the counts to all parameters. Padding has gradients of
# zero, so its weights and moments remain zero.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron.fsdp.dtensor.sharded_gradient import ShardedGradient
from megatron.fsdp.dtensor.sharded_param import ShardedParam, is_linked, sharded_param_of
from megatron.fsdp.dtensor.uneven_dtensor import GRAD
from megatron.fsdp.engine.loops_in_c import are_same, attributes, concatenated
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.optimizer.host_state import flat_moment, is_expanded
from megatron.fsdp.optimizer.optimizer_state import GroupSettings, ParamState, parameters_of

# Elements; a multiple of what one vector instruction computes, in any dtype.
BLOCK = 64
# Elements of a segment of several parameters. Optimizers that step on one tensor after the other
# make three temporary tensors of its size, which would be the most memory that a step needs.
LARGEST = 1 << 19

State = defaultdict[torch.Tensor, ParamState]  # of an optimizer


@dataclass
class Member:
    """A parameter in a run."""

    sharded_param: ShardedParam
    param_state: ParamState  # state in the optimizer
    has_grad: bool
    start: int  # first element in the main shard of its group
    stop: int  # behind the last one; equal to `start` if this rank owns none
    counts: list[float] = field(default_factory=list)  # the values of its counters

    @property
    def is_empty(self) -> bool:
        """True if this rank owns no element of the parameter."""
        return self.start == self.stop

    @property
    def signature(self) -> list[tuple[str, bool, torch.dtype]]:
        """Names and dtypes of the state, which the members of a run have in common."""
        entries = []
        for name, value in self.param_state.items():
            is_moment = isinstance(value, DTensor)
            entries.append((name, is_moment, value.dtype))
        return entries


Run = list[Member]


@dataclass(eq=False)
class Segment:
    """A flat range of a main shard; see [Note: flat segments]."""

    members: list[Member]
    weight: torch.Tensor  # the flat range of the main weights
    start: int  # position in the main shard
    grad_offset: int = 0  # the gradient's position in its storage, from `find_gradient`

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the optimizer steps."""
        return [member.sharded_param.parameter for member in self.members]

    def find_gradient(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Find the flat gradient of which the members' gradients are views.

        Return False if they are no views of one flat gradient, as after the user replaced one.
        """
        origins = set()  # storage, and where the main shard's first element would be in it
        for member, gradient in zip(self.members, gradients):
            if not isinstance(gradient, ShardedGradient):
                return False
            shard = local_tensor(gradient)
            if shard.dtype != self.weight.dtype:
                return False
            if not shard.is_contiguous():
                return False
            if member.is_empty:
                continue
            storage = shard.untyped_storage()
            origin = int(shard.storage_offset()) - member.start
            origins.add((storage._cdata, origin))
        if not origins:
            return True
        if len(origins) > 1:
            return False
        _, origin = origins.pop()
        self.grad_offset = origin + self.start
        return True

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Set ``weight.grad`` to the flat gradient, given the gradient of the first member."""
        # Every step makes a new view, because a view that is kept would keep its storage in use.
        size = self.weight.shape
        local = local_tensor(gradient)
        self.weight.grad = local.as_strided(size, (1,), self.grad_offset)


class Counters:
    """One counter (``step``) of parameters, as views of one vector, and of their segments."""

    def __init__(self, name: str, members: Sequence[Member]):
        self._name = name
        self._members = members
        counters = [member.param_state[name] for member in members]
        self._vector = torch.stack(counters)
        counts = self._vector.tolist()
        for index, member in enumerate(members):
            member.param_state[name] = self._vector[index]
            member.counts.append(counts[index])

    def count_segments(self, segments: Sequence[Segment], state: State) -> None:
        """Put a counter of each segment, equal to that of its members, into ``state``."""
        position_of = {}
        for position, member in enumerate(self._members):
            position_of[id(member)] = position
        counted: list[Segment] = []  # segments with this counter
        first_members = []  # the position of the first member of each
        segment_of_member = [0] * len(self._members)
        for segment in segments:
            first_member = segment.members[0]
            first = position_of.get(id(first_member))
            if first is None:
                continue
            for member in segment.members:
                position = position_of[id(member)]
                segment_of_member[position] = len(counted)
            counted.append(segment)
            first_members.append(first)
        vector = self._vector
        self._of_segments = vector[first_members]
        for number, segment in enumerate(counted):
            state[segment.weight][self._name] = self._of_segments[number]
        self._segment_of_member = torch.tensor(segment_of_member, device=vector.device)
        self._version = vector._version

    @property
    def have_changed(self) -> bool:
        """True if somebody else has written to a counter of a parameter."""
        return self._vector._version != self._version

    def copy_to_members(self) -> None:
        """Set the counters of the parameters to those of their segments."""
        torch.index_select(
            self._of_segments,
            0,
            self._segment_of_member,
            out=self._vector,
        )
        self._version = self._vector._version


class Segments:
    """The segments of one optimizer, whose state becomes views of flat tensors."""

    def __init__(self, optimizer: Optimizer):
        self.parameters: list[torch.Tensor] = [*parameters_of(optimizer)]
        self.of_group: list[list[Segment]] = []
        self.others: list[list[torch.Tensor]] = []  # the parameters in no segment, by param group
        self.state: State = defaultdict(dict)
        runs_of_group = []
        gradients = iter(self.gradients())
        for group in optimizer.param_groups:
            members = []
            others = []
            for parameter, gradient in zip(group["params"], gradients):
                member = None
                if is_linked(parameter):
                    member = _member_of(
                        parameter,
                        param_state=optimizer.state.get(parameter, {}),
                        group=group,
                        has_grad=gradient is not None,
                    )
                if member is None:
                    others.append(parameter)
                else:
                    members.append(member)
            runs_of_group.append(_runs(members, group))
            self.others.append(others)
        # Counters first: a run is divided by the values of its counters.
        self.counters = _counters(runs_of_group)
        for runs in runs_of_group:
            segments: list[Segment] = []
            for run in runs:
                segments += self._divide(run)
            self.of_group.append(segments)
        for counters in self.counters:
            counters.count_segments(self.all(), self.state)
        # What the segments were made from, to notice changes.
        self._settings = _settings_of(optimizer)
        self._param_states = list(optimizer.state.values())
        self._state_values = _values_of(self._param_states)

    def all(self) -> list[Segment]:
        """List the segments of all param groups."""
        return concatenated(self.of_group)

    def gradients(self) -> list[torch.Tensor | None]:
        """List the gradients of all parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            return attributes(self.parameters, GRAD)

    def are_current(self, optimizer: Optimizer) -> bool:
        """Return True if parameters, settings and state are those that segments were made from."""
        if any(counters.have_changed for counters in self.counters):
            return False
        param_states = list(optimizer.state.values())
        return (
            self._settings == _settings_of(optimizer)
            and are_same(self.parameters, parameters_of(optimizer))
            and are_same(self._param_states, param_states)
            and are_same(self._state_values, _values_of(param_states))
        )

    def _divide(self, run: Run) -> Iterator[Segment]:
        """Yield the segments of a run, whose moments become views of flat tensors."""
        first = run[0]
        start = first.start
        numel = _stop_of(run) - start
        main = first.sharded_param.group.main_shard
        flat_moments = {}
        for name, value in first.param_state.items():
            if isinstance(value, DTensor):
                flat_moments[name] = _flat_moment(name, run, start, numel)
        for members in _parts(run):
            low = members[0].start
            high = _stop_of(members)
            weight = main[low:high]
            in_run = slice(low - start, high - start)
            for name, flat in flat_moments.items():
                self.state[weight][name] = flat[in_run]
            yield Segment(members, weight, low)


def _settings_of(optimizer: Optimizer) -> list[tuple[int, bool, bool]]:
    """Return the sizes and the settings of the param groups on which segments depend."""
    settings = []
    for group in optimizer.param_groups:
        num_params = len(group["params"])
        is_fused = bool(group.get("fused"))
        has_momentum = bool(group.get("momentum"))
        settings.append((num_params, is_fused, has_momentum))
    return settings


def _values_of(param_states: Iterable[ParamState]) -> list[Any]:
    return concatenated(map(dict.values, param_states))


# ---- parameters


def _shard_range(group: ParamGroup, index: int) -> tuple[int, int]:
    return group.layout.shard_range(index, group.rank)


def _member_of(
    parameter: torch.Tensor,
    param_state: ParamState,
    group: GroupSettings,
    has_grad: bool,
) -> Member | None:
    """Return a sharded parameter as a member of a run, or None if it is updated by itself."""
    sharded_param = sharded_param_of(parameter)
    start, stop = _shard_range(sharded_param.group, sharded_param.index)
    member = Member(
        sharded_param=sharded_param,
        param_state=param_state,
        has_grad=has_grad,
        start=start,
        stop=stop,
    )
    is_plain_sgd = "dampening" in group and group["momentum"] == 0  # which has no state
    if (param_state or is_plain_sgd) and _can_be_flat(member, group):
        return member
    _allocate_alone(member)
    return None


def _can_be_flat(member: Member, group: GroupSettings) -> bool:
    """Return True if a parameter and its state can be updated as a part of a flat tensor."""
    weight = local_tensor(member.sharded_param.parameter)
    if not weight.is_floating_point():
        return False
    if _needs_blocks(group, weight.dtype) and weight.numel() % BLOCK:
        return False
    for value in member.param_state.values():
        tensor = local_tensor(value)
        if type(tensor) is not torch.Tensor:
            return False
        if not isinstance(value, DTensor):
            if value.dim():
                return False
            continue
        if tensor.shape != weight.shape:
            return False
        if tensor.device != weight.device:
            return False
        if not tensor.is_contiguous() and not is_expanded(tensor):
            return False
    return True


def _needs_blocks(group: GroupSettings, dtype: torch.dtype) -> bool:
    """Return True if flat tensors must consist of whole blocks of :data:`BLOCK` elements."""
    # On a CPU, elements at the end of a tensor that fill no vector are computed one by one. Fused
    # kernels, and kernels for 16-bit dtypes, round these otherwise than vectors.
    if group.get("fused"):
        return True
    return dtype.itemsize < 4


def _runs(
    members: Sequence[Member],
    group: GroupSettings,
) -> list[Run]:
    """Return the runs of the members of one param group."""
    members_of: dict[ParamGroup, dict[int, Member]] = defaultdict(dict)
    for member in members:
        sharded_param = member.sharded_param
        members_of[sharded_param.group][sharded_param.index] = member
    runs: list[Run] = []
    for param_group, by_index in members_of.items():
        dtype = param_group.main_shard.dtype
        is_dense = _needs_blocks(group, dtype)  # no padding in a run
        group_runs: list[Run] = []
        previous: Member | None = None
        for start, index in _in_order(param_group):
            current = by_index.get(index)
            if current is not None:
                if (
                    previous is None
                    or previous.signature != current.signature
                    or (is_dense and previous.stop != start)
                ):
                    group_runs.append([])
                group_runs[-1].append(current)
            previous = current
        for member in by_index.values():
            if member.is_empty:
                _add_empty(member, group_runs)
        runs += group_runs
    return runs


def _in_order(group: ParamGroup) -> list[tuple[int, int]]:
    """List start and index of the parameters of which this rank owns elements, by start."""
    found = []
    for index in range(len(group.parameters)):
        start, stop = _shard_range(group, index)
        if start < stop:
            found.append((start, index))
    return sorted(found)


def _stop_of(members: Sequence[Member]) -> int:
    return max(member.stop for member in members)


def _parts(run: Run) -> Iterator[list[Member]]:
    """Yield the members of each segment of a run."""
    part: list[Member] = []
    for member in run:
        if part:
            first = part[0]
            numel = 0
            if not member.is_empty:
                numel = member.stop - first.start
            is_alike = member.has_grad == first.has_grad and member.counts == first.counts
            if numel > LARGEST or not is_alike:
                yield part
                part = []
        part.append(member)
    yield part


def _add_empty(member: Member, runs: list[Run]) -> None:
    """Add a parameter of which this rank owns nothing to a run: only its counters matter."""
    for run in runs:
        last = run[-1]
        if last.signature == member.signature:
            member.start = last.stop
            member.stop = last.stop
            run.append(member)
            return
    runs.append([member])


# ---- state


def _counters(runs_of_group: Iterable[list[Run]]) -> list[Counters]:
    members_of: dict[Any, list[Member]] = defaultdict(list)
    for member in concatenated(concatenated(runs_of_group)):
        for name, value in member.param_state.items():
            if not isinstance(value, DTensor):
                key = name, value.dtype, value.device
                members_of[key].append(member)
    counters = []
    for (name, _, _), members in members_of.items():
        counters.append(Counters(name, members))
    return counters


def _flat_moment(
    name: str,
    run: Run,
    start: int,
    numel: int,
) -> torch.Tensor:
    """Make the local tensors of a moment views of one flat tensor, and return it."""
    values = []
    for member in run:
        local = local_tensor(member.param_state[name])
        values.append((member.start - start, local))
    memory = run[0].sharded_param.group.memory
    flat = flat_moment(memory, values, numel)
    for member, (offset, value) in zip(run, values):
        stop = offset + value.numel()
        part = flat[offset:stop]
        moment = member.param_state[name]
        moment._local_tensor = part.view(value.shape)
    return flat


def _allocate_alone(member: Member) -> None:
    """Give the new moments of a parameter that is in no segment their memory."""
    numel = member.stop - member.start
    for name, value in member.param_state.items():
        if isinstance(value, DTensor) and is_expanded(local_tensor(value)):
            _flat_moment(name, [member], member.start, numel)

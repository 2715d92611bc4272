# SPDX-License-Identifier: Apache-2.0
"""Flat segments of main weights, with their gradients and optimizer state.

[Note: flat segments] The local tensors of the sharded parameters of a group are views of one flat
tensor, and so are those of their gradients. An element-wise update of the flat tensor is the update
of every parameter in it. Torch's optimizers therefore step on segments instead of on parameters.

    main shard   | weight 1 | bias 1 |..| weight 2 | weight 3 |        dots are padding
    runs         |         param group 0           | group 1  |
    exp_avg      |        one flat tensor          | another  |
    segments     |       step 7      |  |  step 5  |  step 7  |

run       parameters that follow one another in the main shard and are in the same param group of
          the optimizer. Each moment of a run is one flat tensor, of which the local tensors of the
          DTensors in ``optimizer.state`` are views
segment   parameters of a run whose counters (``step``) are equal and which all have a gradient, or
          all have none; no more of them than :data:`LARGEST` allows

Every parameter keeps counters of its own, because state dicts contain them: they are 0-d views of
one vector. A step counts once for a segment, and one call copies the counts to all parameters.

Padding has gradients of zero, so its weights and moments remain zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.sharded_param import ShardedGradient, ShardedParam, sharded_param_of
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.optimizer.elementwise import OptimizerClass, Setting
from megatron.fsdp.optimizer.optimizer_state import Slots

BLOCK = 64
"""Elements; a multiple of what one vector instruction computes, in any dtype."""

LARGEST = 1 << 19
"""Elements of a segment of several parameters. Optimizers that step on one tensor after the other
make three temporary tensors of its size, which would be the most memory that a step needs."""

State = defaultdict[torch.Tensor, Slots]
"""The state of an optimizer."""


@dataclass
class Member:
    """A parameter in a run.

    Args:
        sharded_param: the parameter.
        slots: its state in the optimizer.
        has_grad: it has a gradient.
        start: its first element in the main shard of its group.
        stop: behind the last one; equal to ``start`` if this rank owns none.
        counts: the values of its counters.
    """

    sharded_param: ShardedParam
    slots: Slots
    has_grad: bool
    start: int
    stop: int
    counts: list[float] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if this rank owns no element of the parameter."""
        return self.start == self.stop

    @property
    def signature(self) -> tuple[tuple[str, bool, torch.dtype], ...]:
        """Names and dtypes of the state, which the members of a run have in common."""
        return tuple(
            (name, isinstance(value, DTensor), value.dtype) for name, value in self.slots.items()
        )


Run = list[Member]


@dataclass(eq=False)
class Segment:
    """A flat range of a main shard; see [Note: flat segments].

    Args:
        members: its parameters.
        weight: the flat range of the main weights.
        start: its position in the main shard.
        first: the member that :meth:`take_gradient` is given the gradient of.
        grad_offset: the position of the gradient in its storage, once :meth:`find_gradient` has
            found it.
    """

    members: list[Member]
    weight: torch.Tensor
    start: int
    first: Member
    grad_offset: int = 0

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the optimizer steps."""
        return [member.sharded_param.parameter for member in self.members]

    def find_gradient(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Find the flat gradient of which ``gradients``, the members', are views.

        Return False if there is none: the user has replaced a gradient by another tensor.
        """
        if not all(isinstance(gradient, ShardedGradient) for gradient in gradients):
            return False
        shards = [_local(gradient) for gradient in gradients]
        flat = _flat_over(shards, self.members, self.start, self.weight.numel())
        if flat is None or flat.dtype != self.weight.dtype:
            return False
        self.grad_offset = int(flat.storage_offset())
        return True

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Set ``weight.grad`` to the flat gradient, given the gradient of :attr:`first`."""
        # It is made anew for every step, because it would keep storage in use.
        size = self.weight.shape
        self.weight.grad = _local(gradient).as_strided(size, (1,), self.grad_offset)


class CounterKey(NamedTuple):
    """The properties that all elements of a vector of counters share."""

    name: str
    dtype: torch.dtype
    device: torch.device


class Counters:
    """One counter (``step``) of parameters, and of the segments that they are in.

    Args:
        name: of the counter.
        members: the parameters that have it. Their slots become views of one vector.
        own: storages that belong to this optimizer's segments.
    """

    def __init__(self, name: str, members: Sequence[Member], own: set[int]):
        self._name = name
        self._members = members
        values = [member.slots[name] for member in members]
        vector = _vector_over(values, own)
        if vector is None:
            vector = torch.stack(values)
            for index, member in enumerate(members):
                member.slots[name] = vector[index]
        for member, count in zip(members, vector.tolist()):
            member.counts.append(count)
        self.vector = vector

    def count_segments(self, segments: Sequence[Segment], state: State) -> None:
        """Put a counter of each segment, equal to that of its members, into ``state``."""
        position = {id(member): index for index, member in enumerate(self._members)}
        own = [segment for segment in segments if id(segment.first) in position]
        self._of_segments = self.vector[[position[id(segment.first)] for segment in own]]
        segment_of_member = [0] * len(self._members)
        for number, segment in enumerate(own):
            state[segment.weight][self._name] = self._of_segments[number]
            for member in segment.members:
                segment_of_member[position[id(member)]] = number
        self._segment_of_member = torch.tensor(segment_of_member, device=self.vector.device)
        self._version = self.vector._version

    @property
    def have_changed(self) -> bool:
        """True if somebody else has written to a counter of a parameter."""
        return self.vector._version != self._version

    def copy_to_members(self) -> None:
        """Set the counters of the parameters to those of their segments."""
        torch.index_select(self._of_segments, 0, self._segment_of_member, out=self.vector)
        self._version = self.vector._version


class Segments:
    """The segments of one optimizer, in the form in which torch's ``step`` takes parameters.

    Args:
        kind: the class of torch whose ``step`` is used.
        groups: the param groups of the optimizer.
        state: its state. Slots become views of flat tensors.
        gradients: of all parameters, None for those without one.
        before: the segments that these replace, whose flat tensors are used again if they fit.

    Attributes:
        of_group: the segments of each param group.
        others: the parameters of each param group that are in none.
        state: the state of all segments.
        counters: of all parameters in segments.
    """

    def __init__(
        self,
        kind: OptimizerClass,
        groups: Sequence[Setting],
        state: State,
        gradients: dict[torch.Tensor, torch.Tensor | None],
        before: Segments | None,
    ):
        self._own = before.storages() if before is not None else set()
        self.of_group: list[list[Segment]] = []
        self.others: list[list[torch.Tensor]] = []
        self.state: State = defaultdict(dict)
        self._flats: list[torch.Tensor] = []
        runs_of_group: list[list[Run]] = []
        for group in groups:
            needs_state = kind is not torch.optim.SGD or group["momentum"] != 0
            self.others.append([])
            members: list[Member] = []
            for parameter in group["params"]:
                slots = state.get(parameter, {})
                member = _member(parameter, slots, gradients[parameter] is not None)
                if (slots or not needs_state) and _can_be_flat(member, group):
                    members.append(member)
                else:
                    self.others[-1].append(parameter)
            runs_of_group.append(_runs(members, group))
        self.counters = self._count(runs_of_group)
        for runs in runs_of_group:
            self.of_group.append([])
            for run in runs:
                self.of_group[-1] += self._divide(run)
        for counters in self.counters:
            counters.count_segments(self.all(), self.state)
        self._own = set()

    def all(self) -> list[Segment]:
        """List the segments of all param groups."""
        return list(chain.from_iterable(self.of_group))

    def storages(self) -> set[int]:
        """Return the storages of moments and counters."""
        tensors = [*self._flats, *(counters.vector for counters in self.counters)]
        return {tensor.untyped_storage()._cdata for tensor in tensors}

    def _count(self, runs_of_group: list[list[Run]]) -> list[Counters]:
        members_of: dict[CounterKey, list[Member]] = defaultdict(list)
        for run in chain.from_iterable(runs_of_group):
            for member in run:
                for name, value in member.slots.items():
                    if not isinstance(value, DTensor):
                        members_of[CounterKey(name, value.dtype, value.device)].append(member)
        return [Counters(key.name, members, self._own) for key, members in members_of.items()]

    def _divide(self, run: Run) -> Iterator[Segment]:
        """Yield the segments of a run, whose moments become views of flat tensors."""
        start, stop = run[0].start, max(member.stop for member in run)
        main = run[0].sharded_param.group.main_shard
        flats: dict[str, torch.Tensor] = {}
        for name, value in run[0].slots.items():
            if isinstance(value, DTensor):
                flats[name] = self._flat_moment(name, run, start, stop - start)
        for members in _parts(run):
            low, high = members[0].start, max(member.stop for member in members)
            segment = Segment(members, main[low:high], low, members[0])
            self.state[segment.weight] = {
                name: flat[low - start : high - start] for name, flat in flats.items()
            }
            yield segment

    def _flat_moment(self, name: str, run: Run, start: int, numel: int) -> torch.Tensor:
        """Return the flat tensor of which the local tensors of a moment are views."""
        values = [member.slots[name] for member in run]
        shards = [_local(value) for value in values]
        flat = _flat_over(shards, run, start, numel)
        if flat is None or flat.untyped_storage()._cdata not in self._own:
            flat = torch.zeros(numel, dtype=shards[0].dtype, device=shards[0].device)
            for member, value, shard in zip(run, values, shards):
                view = flat[member.start - start : member.stop - start].view(shard.shape)
                value._local_tensor = view.copy_(shard)
        self._flats.append(flat)
        return flat


# ---- parameters


def _member(parameter: torch.Tensor, slots: Slots, has_grad: bool) -> Member:
    sharded_param = sharded_param_of(parameter)
    group = sharded_param.group
    start, stop = group.layout.shard_range(sharded_param.index, group.rank)
    return Member(sharded_param, slots, has_grad, start, stop)


def _can_be_flat(member: Member, group: Setting) -> bool:
    """Return True if a parameter and its state can be updated as a part of a flat tensor."""
    weight = _local(member.sharded_param.parameter)
    if not weight.is_floating_point():
        return False
    if _needs_blocks(group, weight.dtype) and weight.numel() % BLOCK:
        return False
    for value in member.slots.values():
        if isinstance(value, DTensor):
            shard = _local(value)
            is_fit = type(shard) is torch.Tensor and shard.is_contiguous()
            if not is_fit or shard.shape != weight.shape or shard.device != weight.device:
                return False
        elif type(value) is not torch.Tensor or value.dim():
            return False
    return True


def _needs_blocks(group: Setting, dtype: torch.dtype) -> bool:
    """Return True if flat tensors must consist of whole blocks of :data:`BLOCK` elements.

    On a CPU, elements at the end of a tensor that fill no vector are computed one by one. Fused
    kernels, and kernels for 16 bits, round these otherwise than vectors.
    """
    return bool(group.get("fused")) or dtype.itemsize < 4


def _runs(members: Sequence[Member], group: Setting) -> list[Run]:
    """Return the runs of the members of one param group."""
    members_of: dict[ParamGroup, dict[int, Member]] = defaultdict(dict)
    for member in members:
        members_of[member.sharded_param.group][member.sharded_param.index] = member
    runs: list[Run] = []
    for param_group, by_index in members_of.items():
        dense = _needs_blocks(group, param_group.main_shard.dtype)
        own: list[Run] = []
        previous: Member | None = None
        for index in _order(param_group):
            current = by_index.get(index)
            if current is not None:
                if previous is None or not _follows(current, previous, dense):
                    own.append([])
                own[-1].append(current)
            previous = current
        for member in by_index.values():
            if member.is_empty:
                _add_empty(member, own)
        runs += own
    return runs


def _order(group: ParamGroup) -> list[int]:
    """Return the parameters of which this rank owns elements, in the order of its shard."""
    starts = {}
    for index in range(len(group.parameters)):
        start, stop = group.layout.shard_range(index, group.rank)
        if start < stop:
            starts[index] = start
    return sorted(starts, key=starts.__getitem__)


def _follows(member: Member, previous: Member, dense: bool) -> bool:
    """Return True if a member can be in the run of the one before it in the shard.

    Args:
        member: the later one.
        previous: the earlier one.
        dense: padding between the two must not be in a run.
    """
    is_near = member.start == previous.stop or not dense
    return is_near and member.signature == previous.signature


def _parts(run: Run) -> Iterator[list[Member]]:
    """Yield the members of each segment of a run."""
    for _, alike in groupby(run, lambda member: (member.has_grad, member.counts)):
        part: list[Member] = []
        for member in alike:
            if part and not member.is_empty and member.stop - part[0].start > LARGEST:
                yield part
                part = []
            part.append(member)
        yield part


def _add_empty(member: Member, runs: list[Run]) -> None:
    """Add a parameter of which this rank owns nothing to a run: only its counters matter."""
    for run in runs:
        if run[-1].signature == member.signature:
            member.start = member.stop = run[-1].stop
            run.append(member)
            return
    runs.append([member])


# ---- flat tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # of a DTensor
    return local


def _flat_over(
    shards: Sequence[torch.Tensor], members: Sequence[Member], start: int, numel: int
) -> torch.Tensor | None:
    """Return the flat tensor ``[numel]`` of which ``shards`` are views; None if there is none.

    Args:
        shards: a tensor for each member.
        members: their positions in the main shard.
        start: the position of the flat tensor in the main shard.
        numel: the length of the flat tensor.
    """
    first = shards[0]
    if members[0].is_empty:  # so are all others
        return first.reshape(-1)
    storage = first.untyped_storage()
    begin = first.storage_offset() - (members[0].start - start)
    for shard, member in zip(shards, members):
        if shard.numel() != member.stop - member.start or shard.dtype != first.dtype:
            return None
        if member.is_empty:
            continue
        is_there = shard.storage_offset() == begin + member.start - start
        is_same = shard.untyped_storage()._cdata == storage._cdata
        if not (is_there and is_same and shard.is_contiguous()):
            return None
    if begin < 0 or (begin + numel) * first.itemsize > storage.nbytes():
        return None
    return first.as_strided((numel,), (1,), begin)


def _vector_over(values: Sequence[torch.Tensor], own: set[int]) -> torch.Tensor | None:
    """Return the vector of which ``values`` are the elements, in order; None if there is none.

    Args:
        values: 0-d tensors.
        own: the storages that the vector may be in.
    """
    begin = values[0].storage_offset()
    storage = values[0].untyped_storage()._cdata
    for index, value in enumerate(values):
        is_same = value.untyped_storage()._cdata == storage
        if not is_same or value.storage_offset() != begin + index:
            return None
    return values[0].as_strided((len(values),), (1,), begin) if storage in own else None

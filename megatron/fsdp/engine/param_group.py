# SPDX-License-Identifier: Apache-2.0
"""A parameter group: the parameters of a unit that share dtype, trainability and mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import FlatBuffer, Storage, shard_view
from megatron.fsdp.engine.collectives import Communicator, Gather
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.gradients import GroupGradients
from megatron.fsdp.engine.layout import PREFER_ROWS, Granularity, plan
from megatron.fsdp.engine.policy import Precision, ShardingStrategy
from megatron.fsdp.engine.states import MainState, WeightState, change_state
from megatron.fsdp.engine.tensor_parallel import local_tensor, set_local_tensor

# [Note: the weights of a group]
#     compute parameter  the parameter that the module's forward reads, in the module's dtype: a
#                        view of the flat buffer `compute`, freed between uses at level 3
#     compute shard      this rank's slice of the compute weights, the input of the all-gather. It
#                        is a slice of the flat buffer, but at level 3 a separate tensor if the
#                        optimizer updates it itself, or the outer axis gathers it
#     owned shard        the part of the compute shard that this rank updates: all of it, unless
#                        the outer axis divides it (see [Note: shards and owned shards])
#     main shard         the owned shard in the main dtype, which the optimizer updates. If the
#                        dtypes are equal, it is the owned shard itself. Otherwise it is cast into
#                        the compute shard, at the first use after a step or before each all-gather
# Gradients have a class of their own: see [Note: the way of a gradient].

# [Note: weights that backward may not read] A tensor may leave a unit by another way than as its
# result (kept on the module, or in a list). No hook tells the schedule of its backward, which would
# read freed memory at level 3, or what an all-gather has not filled yet. So compute parameters have
# the version counters that graphs know while the unit is unsharded only. Otherwise they have this
# one, and autograd, which compares it with what it has saved, raises before it reads.
UNREADABLE = 1 << 31  # "is at version 2147483648; expected version 0" in its message
_set_versions = torch._C._autograd._unsafe_set_version_counter
_version_of = attrgetter("_version")


class ParamGroup:
    """The weights of some parameters that are sharded together, and their ``gradients``.

    :meth:`shard_parameter` moves each of ``parameters`` into the group. Of DTensors (tensor
    parallelism), the local tensors are sharded. ``shards_outer``, at level 3 only: the outer axis
    shards optimizer state too.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        strategy: ShardingStrategy,
        shards_outer: bool,
        precision: Precision,
        communicator: Communicator,
        device: torch.device,
        unit_name: str,
        weight_storage: Storage,
        gradient_storage: Storage,
        granularity: Granularity = PREFER_ROWS,
    ):
        self.names = list(names)
        self.parameters = list(parameters)
        self.strategy = strategy
        self.precision = precision
        self.unit_name = unit_name
        self.requires_grad = parameters[0].requires_grad
        self.communicator = communicator
        self.partition = communicator.partition(strategy.shards_optimizer, shards_outer)
        self.rank = self.partition.rank
        shapes = [tuple(local_tensor(parameter).shape) for parameter in parameters]
        self.layout = plan(shapes, self.partition.num_owned, granularity)
        self.has_all_shards = self.layout.world_size == 1  # weights need no all-gather then
        self.reshards_after_use = strategy.shards_parameters and self.partition.num_inner > 1
        self.main_is_compute = precision.main_param == precision.compute
        self._casts_at_unshard = (
            self.reshards_after_use and not self.main_is_compute and self.partition.num_outer == 1
        )
        name = f"the gathered weights of unit {unit_name!r} ({names[0]}, ...)"
        storage = weight_storage if self.reshards_after_use else Storage()
        self.compute = FlatBuffer(
            self.layout, precision.compute, device, name, storage, self._point_parameters
        )
        self.compute_shard, self._owned_shard, self.main_shard = self._make_shards()
        if self.reshards_after_use:
            self.compute.discard()  # that was no use
        elif self.compute.padding:
            torch._foreach_zero_(self.compute.padding)  # for sums over the flat tensor
        self.state = WeightState.SHARDED if self.reshards_after_use else WeightState.UNSHARDED
        self.main_state = MainState.INSTALLED
        self._kept: torch.Tensor | None = None  # the compute shard to gather while HELD, if cast
        self._all_gather: Pending | None = None
        self._versions: tuple[int, ...] | None = None  # of the compute parameters while unreadable
        self.gradients = GroupGradients(
            self.parameters,
            self.layout,
            self.partition,
            strategy,
            precision,
            communicator,
            device,
            unit_name,
            gradient_storage,
        )

    def __str__(self) -> str:
        return f"parameter group {self.names[0]}"

    def _make_shards(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the compute shard, the owned shard and the main shard, without values yet."""
        partition = self.partition
        compute_shard = self.compute.slice(partition.inner_rank, partition.num_inner)
        if self.reshards_after_use and not self._casts_at_unshard:
            compute_shard = torch.zeros_like(compute_shard)
        owned_shard = compute_shard
        if partition.num_outer > 1:
            owned_shard = compute_shard.view(partition.num_outer, -1)[partition.outer_rank]
        if self.main_is_compute:
            return compute_shard, owned_shard, owned_shard
        main_shard = torch.zeros_like(owned_shard, dtype=self.precision.main_param)
        return compute_shard, owned_shard, main_shard

    @torch.no_grad()
    def shard_parameter(self, index: int) -> None:
        """Move parameter ``index`` into the group, with the values of the first data rank."""
        # Ranks that began with different seeds would otherwise train different replicas.
        values = local_tensor(self.parameters[index]).detach().contiguous()
        with observe.work(self.unit_name, "shard"):
            self.communicator.broadcast(values)
        if not self.reshards_after_use:
            self.compute.views[index].copy_(values)
        elif not self._casts_at_unshard:  # otherwise the main shard alone has the values
            # Positions in the compute shard: a parameter at [10, 18), a shard at [16, 24) have
            # [0, 2) in common, the last two elements of the parameter.
            size = self.compute_shard.numel()
            start = self.layout.positions[index].start - self.partition.inner_rank * size
            low, high = max(start, 0), min(start + values.numel(), size)
            if low < high:
                self.compute_shard[low:high] = values.view(-1)[low - start : high - start]
        owned = self.layout.owned(index, self.rank)
        self.main_view(index).view(-1).copy_(values.view(-1)[owned.start : owned.stop])
        self._point_parameters([index])

    @torch.no_grad()
    def _point_parameters(self, indices: Iterable[int] | None = None) -> None:
        """Make these compute parameters, or all of them, views of the flat buffer."""
        for index in range(len(self.parameters)) if indices is None else indices:
            # `.data` has a version counter of its own, so autograd does not take all-gathers into
            # the flat buffer for in-place edits of the parameter.
            set_local_tensor(self.parameters[index], self.compute.views[index].data)

    def main_view(self, index: int) -> torch.Tensor:
        """Return the part of main parameter ``index`` that this rank owns; it may be empty."""
        return shard_view(self.main_shard, self.layout, index, self.rank)

    @property
    def versions(self) -> tuple[int, ...]:
        """The version counters of the compute parameters as autograd knows them."""
        return self._versions or tuple(map(_version_of, self.parameters))

    # ---- unshard and reshard

    def prepare_unshard(self) -> Gather:
        """Allocate the compute parameters, cast the shard, and return the all-gather to start."""
        self.compute.allocate()
        if self.main_state is MainState.DUE:
            self._cast()
        if self._casts_at_unshard:
            with torch.no_grad():
                self.compute_shard.copy_(self.main_shard if self._kept is None else self._kept)
        is_outer_due = self.partition.num_outer > 1 and self.main_state is not MainState.INSTALLED
        owned = self._owned_shard if is_outer_due else None
        return Gather(self.compute.flat, self.compute_shard, owned)

    def begin_unshard(self, all_gather: Pending) -> None:
        """Note that the all-gather of :meth:`prepare_unshard` has started."""
        self._all_gather = all_gather
        if self.main_state is MainState.DUE:
            self.main_state = change_state(self, self.main_state, MainState.INSTALLED)
        self.state = change_state(self, self.state, WeightState.UNSHARDING)

    @torch.no_grad()
    def _cast(self) -> None:
        """Cast main weights into the owned shard, where no all-gather does so."""
        if not (self.main_is_compute or self._casts_at_unshard):
            self._owned_shard.copy_(self.main_shard)

    def wait_for_unshard(self) -> None:
        """Make compute wait for the all-gather that :func:`unshard` has started, if any."""
        if self._all_gather is not None:
            with observe.work(self.unit_name, "wait for unshard"):
                self._all_gather.wait()
            self._all_gather = None
            if self._versions is not None:
                _set_versions(tuple(self.parameters), self._versions)
                self._versions = None
            self.state = change_state(self, self.state, WeightState.UNSHARDED)

    def reshard(self) -> None:
        """Free the compute parameters at level 3; at other levels do nothing."""
        if self.reshards_after_use:
            # Hooks reshard units while the error of a failed all-gather is under way, and torch
            # warns of a second one.
            if self._all_gather is not None and self._all_gather.has_failed:
                self._all_gather = None
            else:
                self.wait_for_unshard()
            if self._versions is None:
                self._versions = tuple(map(_version_of, self.parameters))
                _set_versions(tuple(self.parameters), (UNREADABLE,) * len(self._versions))
            with observe.work(self.unit_name, "reshard"):
                self.compute.free()
            self.state = change_state(self, self.state, WeightState.SHARDED)

    # ---- new values

    @torch.no_grad()
    def keep_compute_weights(self) -> None:
        """Keep a copy of the compute shard, which all-gathers send until weights are installed."""
        # Where compute weights do not follow every change of main weights, they are the copy.
        if self.main_state is MainState.DUE:
            self._cast()
        if self._casts_at_unshard and self._kept is None:
            self._kept = self.main_shard.to(self.precision.compute)
        self.main_state = change_state(self, self.main_state, MainState.HELD)

    def note_edit(self) -> None:
        """Note that main weights were written to: the next use of the unit installs them."""
        if self.main_state is not MainState.HELD:
            self._make_due()

    @torch.no_grad()
    def install_main_weights(self) -> None:
        """Let the next use of the unit cast and gather main weights, which may change till then."""
        self._kept = None
        self._make_due()
        if self.reshards_after_use and self.state is WeightState.STALE:
            unshard([self])  # a call is using the unit: gather the new values now
            self.wait_for_unshard()

    def _make_due(self) -> None:
        self.wait_for_unshard()
        is_in_place = self.has_all_shards and self.main_is_compute
        due = MainState.INSTALLED if is_in_place else MainState.DUE
        self.main_state = change_state(self, self.main_state, due)
        if self.state is WeightState.UNSHARDED and not is_in_place:
            self.state = change_state(self, self.state, WeightState.STALE)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Broadcast main weights from the first of the ranks that own the same shard."""
        if self.layout.world_size < self.communicator.inner_size * self.communicator.outer_size:
            with observe.work(self.unit_name, "broadcast"):
                self.communicator.broadcast(
                    self.main_shard,
                    over_inner=self.partition.num_inner == 1,
                    over_outer=self.partition.num_outer == 1,
                )
            self.install_main_weights()


def unshard(groups: Sequence[ParamGroup]) -> None:
    """Start the all-gathers of groups of a unit, unless they are done or under way."""
    # In one launch where the ranks are the same: see [Note: one launch for several gathers].
    by_ranks: dict[tuple[bool, Hashable], list[ParamGroup]] = defaultdict(list)
    for group in groups:
        if group.state in (WeightState.SHARDED, WeightState.STALE):
            by_ranks[group.has_all_shards, group.communicator.gather_groups].append(group)
    if not by_ranks:
        return
    with observe.work(groups[0].unit_name, "unshard"):
        for (is_whole, _), together in by_ranks.items():
            gathers = [group.prepare_unshard() for group in together]
            communicator = together[0].communicator
            all_gather = Pending() if is_whole else communicator.all_gather(gathers)
            for group in together:
                group.begin_unshard(all_gather)

# SPDX-License-Identifier: Apache-2.0
"""A parameter group: the parameters of a unit that share dtype, trainability and mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import FlatBuffer, ShardMemory, Storage, shard_view
from megatron.fsdp.engine.collectives import Communicator, Gather
from megatron.fsdp.engine.device import Pending, all_of, record_on_current_stream
from megatron.fsdp.engine.gradients import GroupGradients, GroupNames
from megatron.fsdp.engine.layout import PREFER_ROWS, Granularity, Layout, plan
from megatron.fsdp.engine.policy import Precision, ShardingStrategy
from megatron.fsdp.engine.states import MainState, StateOwner, WeightState, change_state
from megatron.fsdp.engine.tensor_parallel import local_tensor, set_local_tensor
from megatron.fsdp.engine.transforms import outside_transforms
from megatron.fsdp.engine.weight_guard import WeightGuard

# [Note: the weights of a group]
#     compute parameter  the parameter that the module's forward reads, in the module's dtype: a
#                        view of the flat buffer `compute`, freed between uses at level 3
#     compute shard      this rank's slice of the compute weights, the input of the all-gather. It
#                        is a slice of the flat buffer, but at level 3 a separate tensor if the
#                        optimizer updates it, the outer axis gathers it, or its form is not plain
#     owned shard        the part of the compute shard that this rank updates: all of it, unless
#                        the outer axis divides it (see [Note: shards and owned shards])
#     main shard         the owned shard in the main dtype, which the optimizer updates. If the
#                        dtypes are equal, it is the owned shard itself. Otherwise it is cast into
#                        the compute shard, at the first use after a step or before each all-gather
# Gradients have a class of their own: see [Note: the way of a gradient].


class StoredForm:
    """The form in which a group stores compute weights; by default their values, in one dtype.

    Args:
        granularity: smallest part of a parameter's values that no shard boundary cuts.
    """

    def __init__(self, granularity: Granularity = PREFER_ROWS):
        self.granularity = granularity

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the values to shard: the local tensor, detached, which shares its storage."""
        return local_tensor(parameter).detach()

    def buffer(self, layout: Layout, dtype: torch.dtype) -> tuple[Layout, torch.dtype]:
        """Return layout and dtype of the flat buffer for values with this layout and dtype."""
        return layout, dtype

    def point(self, parameter: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
        """Make a compute parameter use its view of the buffer; return it, or what replaces it."""
        # `.data` has a version counter of its own, so autograd does not take all-gathers into
        # the flat buffer for in-place edits of the parameter.
        set_local_tensor(parameter, view.data)
        return parameter

    def fill(
        self,
        shard: torch.Tensor,
        main: torch.Tensor,
        layout: Layout,
        rank: int,
    ) -> None:
        """Compute the compute shard of a rank from its main weights; a collective.

        Args:
            shard: the owned shard ``[layout.shard_size]``, which is overwritten.
            main: its main weights, of the same shape, in another dtype.
            layout: the layout of the values.
            rank: index of the owned shard.
        """
        shard.copy_(main)

    def finish(self, flat: torch.Tensor) -> None:
        """Complete the compute parameters when the buffer ``flat`` is gathered."""

    def release(self) -> None:
        """Free what :meth:`finish` has allocated."""


class ParamGroup(StateOwner[WeightState]):
    """The weights of some parameters that are sharded together, and their ``gradients``.

    :meth:`shard_parameter` moves each of the parameters into the group.

    Args:
        named: the compute parameters by their names. They share dtype, trainability and mesh.
        strategy: the ZeRO level.
        shards_outer: the outer axis shards optimizer state too; at level 3 only.
        precision: dtypes of weights and gradients.
        communicator: the collectives over the mesh of the parameters.
        unit_name: name of the unit, for messages and observers.
        weight_storage: memory of gathered weights at level 3.
        gradient_storage: memory of local gradients.
        form: the form in which compute weights are stored.
        memory: memory of main weights and gradient shards.
    """

    def __init__(
        self,
        *,
        named: dict[str, nn.Parameter],
        strategy: ShardingStrategy,
        shards_outer: bool,
        precision: Precision,
        communicator: Communicator,
        unit_name: str,
        weight_storage: Storage,
        gradient_storage: Storage,
        form: StoredForm,
        memory: ShardMemory,
    ):
        self._names = GroupNames(unit_name, list(named))
        self.parameters = list(named.values())
        self.strategy = strategy
        self.precision = precision
        self.requires_grad = self.parameters[0].requires_grad
        self.communicator = communicator
        self.partition = communicator.partition(strategy.shards_optimizer, shards_outer)
        self.rank = self.partition.rank
        self.form = form
        self.memory = memory
        shapes = [form.values(parameter).shape for parameter in self.parameters]
        self.layout = plan(
            shapes=shapes,
            world_size=self.partition.num_owned,
            granularity=form.granularity,
        )
        self.has_all_shards = self.layout.world_size == 1  # weights need no all-gather then
        has_shards = self.partition.num_inner > 1
        self.reshards_after_use = strategy.shards_parameters and has_shards
        self.compute = self._make_buffer(weight_storage)
        self.buffers = [self.compute]  # buffers that a use may allocate
        is_same = precision.main_param == self.compute.flat.dtype
        self.main_is_compute = is_same and not memory.is_offloaded
        is_cast = self.compute.layout is self.layout and not self.main_is_compute
        has_one_stage = self.partition.num_outer == 1
        self._casts_at_unshard = self.reshards_after_use and is_cast and has_one_stage
        self.compute_shard, self._owned_shard = self._make_shards(self.compute)
        self.main_shard = self._make_main_shard()
        self.state = WeightState.UNSHARDED
        self.main_state = MainState.INSTALLED
        if self.reshards_after_use:
            self.state = WeightState.SHARDED
        elif self.compute.padding:
            torch._foreach_zero_(self.compute.padding)  # for sums over the flat tensor
        # The compute shard to gather while HELD, if each all-gather casts.
        self._held_shard: torch.Tensor | None = None
        self._all_gather: Pending | None = None
        self.guard = WeightGuard(self.parameters, self._names)
        self.gradients = self._make_gradients(gradient_storage)

    def __str__(self) -> str:
        return f"parameter group {self.names[0]}"

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return self._names.parameters

    @property
    def unit_name(self) -> str:
        """The name of the unit."""
        return self._names.unit

    @property
    def _buffer_name(self) -> str:
        return f"the gathered weights of unit {self.unit_name!r} ({self.names[0]}, ...)"

    def rename(self, names: Sequence[str], unit_name: str) -> None:
        """Use other names of the parameters and of their unit, in messages and for observers."""
        self._names.unit = unit_name
        self._names.parameters = list(names)
        for buffer in self.buffers:
            buffer.name = self._buffer_name

    def _make_buffer(self, storage: Storage) -> FlatBuffer:
        """Return the flat buffer of compute weights, allocated, without values yet."""
        if not self.reshards_after_use:
            storage = Storage()
        layout, dtype = self.form.buffer(self.layout, self.precision.compute)
        return FlatBuffer(
            layout=layout,
            dtype=dtype,
            device=self.memory.device,
            name=self._buffer_name,
            storage=storage,
            on_move=self._point_parameters,
        )

    def _make_shards(self, buffer: FlatBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the compute shard of a new buffer and its owned shard, without values yet."""
        partition = self.partition
        shard = buffer.slice(partition.inner_rank, partition.num_inner)
        if self.reshards_after_use:
            if not self._casts_at_unshard:
                shard = torch.zeros_like(shard)
            buffer.discard()  # this was no use
        if partition.num_outer == 1:
            return shard, shard
        owned_shards = shard.view(partition.num_outer, -1)
        return shard, owned_shards[partition.outer_rank]

    def _make_main_shard(self) -> torch.Tensor:
        """Return the main shard: the owned shard itself, or zeros in the memory of the group."""
        shard = self._owned_shard
        if not self.main_is_compute:
            shard = self.memory.empty(self.layout.shard_size, self.precision.main_param)
            shard.zero_()
        self.memory.release(shard)
        return shard

    def _make_gradients(self, storage: Storage) -> GroupGradients:
        return GroupGradients(
            parameters=self.parameters,
            layout=self.layout,
            partition=self.partition,
            strategy=self.strategy,
            precision=self.precision,
            communicator=self.communicator,
            names=self._names,
            storage=storage,
            memory=self.memory,
        )

    @torch.no_grad()
    def shard_parameter(self, index: int) -> None:
        """Move parameter ``index`` into the group, with the values of the first data rank."""
        # Ranks that began with different seeds would otherwise train different replicas.
        parameter = self.parameters[index]
        values = record_on_current_stream(self.form.values(parameter))
        values = values.contiguous()
        with observe.work(self.unit_name, "shard"):
            self.communicator.broadcast(values)
        owned = self.layout.owned(index, self.rank)
        owned_values = values.view(-1)[owned.start : owned.stop]
        main_values = self.main_view(index).view(-1)
        main_values.copy_(owned_values)
        self.memory.release(self.main_shard)
        if self.compute.layout is self.layout and not self.reshards_after_use:
            self.compute.views[index].copy_(values)
        else:
            self._make_due()
        self._point_parameters([index])

    @torch.no_grad()
    def _point_parameters(self, indices: Iterable[int] | None = None) -> None:
        """Make these compute parameters, or all of them, views of the flat buffer."""
        if indices is None:
            indices = range(len(self.parameters))
        for index in indices:
            parameter = self.parameters[index]
            view = self.compute.views[index]
            self.parameters[index] = self.form.point(parameter, view)

    def main_view(self, index: int) -> torch.Tensor:
        """Return the part of main parameter ``index`` that this rank owns; it may be empty."""
        return shard_view(
            shard=self.main_shard,
            layout=self.layout,
            index=index,
            rank=self.rank,
        )

    # ---- unshard and reshard

    @property
    def is_readable(self) -> bool:
        """True if compute parameters have values, which may be older than main weights."""
        return self.state in (WeightState.UNSHARDED, WeightState.STALE)

    def needs_unshard(self) -> bool:
        """Return True if a use in the pass under way needs an all-gather."""
        return self.state in (WeightState.SHARDED, WeightState.STALE)

    def prepare_unshard(self) -> list[Gather]:
        """Allocate the compute parameters, cast the shard, and return the all-gathers to start."""
        self.compute.allocate()
        filled = Pending()
        # Where the compute shard is a slice of the buffer, which has memory only now, each
        # all-gather casts. A compute shard that lasts is cast once after each update.
        if self._casts_at_unshard or self.main_state is MainState.DUE:
            filled = self._cast()
        owned = None
        if self.partition.num_outer > 1 and self.main_state is not MainState.INSTALLED:
            owned = self._owned_shard
        gather = Gather(
            full=self.compute.flat,
            shard=self.compute_shard,
            filled=filled,
            owned=owned,
        )
        return [gather]

    def begin_unshard(self, all_gather: Pending) -> None:
        """Note that the all-gather of :meth:`prepare_unshard` has started."""
        self._all_gather = all_gather
        if self.main_state is MainState.DUE:
            self._change_main_state(MainState.INSTALLED)
        self.change_state(WeightState.UNSHARDING)

    @torch.no_grad()
    def _cast(self) -> Pending:
        """Begin to fill the owned shard from main weights, or from the copy that is kept."""
        if self._held_shard is not None:
            self._owned_shard.copy_(self._held_shard)
        elif not self.main_is_compute:
            return self._fill(self._owned_shard)
        return Pending()

    def _fill(self, shard: torch.Tensor) -> Pending:
        def fill(main: torch.Tensor) -> None:
            self.form.fill(
                shard=shard,
                main=main,
                layout=self.layout,
                rank=self.rank,
            )

        return self.memory.use(self.main_shard, fill)

    @outside_transforms
    def wait_for_unshard(self) -> None:
        """Make compute wait for the all-gather that :func:`unshard_groups` has started, if any."""
        if self._all_gather is not None:
            with observe.work(self.unit_name, "wait for unshard"):
                self._all_gather.wait()
            self._all_gather = None
            finish = partial(self.form.finish, self.compute.flat)
            self.guard.open(finish)
            self.change_state(WeightState.UNSHARDED)

    @outside_transforms
    def reshard(self) -> None:
        """Free the compute parameters at level 3; at other levels do nothing."""
        if self.reshards_after_use:
            all_gather = self._all_gather
            # Hooks reshard units while the error of a failed all-gather is under way, and torch
            # warns of a second one.
            if all_gather is not None and all_gather.has_failed:
                self._all_gather = None
                self.compute.is_in_failed_collective = True
            else:
                self.wait_for_unshard()
            self.guard.close()
            with observe.work(self.unit_name, "reshard"):
                self.compute.free()
                self.form.release()
            self.change_state(WeightState.SHARDED)

    # ---- new values

    def wait_for_readers(self) -> None:
        """Wait for all-gathers and copies that read main weights, before other code writes to them.

        On CPU this may be a collective: the second all-gather of hybrid sharding runs in it.
        """
        if self._all_gather is not None and not self._all_gather.has_failed:
            self.wait_for_unshard()
        self.memory.wait()

    @torch.no_grad()
    def keep_compute_weights(self) -> None:
        """Keep a copy of the compute shard, which all-gathers send until weights are installed."""
        # Where compute weights do not follow every change of main weights, they are the copy.
        if not self._casts_at_unshard and self.main_state is MainState.DUE:
            self._cast().wait()
        if self._casts_at_unshard and self._held_shard is None:
            self._held_shard = torch.empty_like(self._owned_shard)
            self._fill(self._held_shard).wait()
        self._change_main_state(MainState.HELD)

    def note_edit(self) -> None:
        """Prepare for a write to main weights; the next use of the unit installs them."""
        self.wait_for_readers()
        if self.main_state is not MainState.HELD:
            self._make_due()

    @torch.no_grad()
    def mark_main_weights_changed(self) -> None:
        """Mark main weights as changed: the next use of the unit casts and gathers them."""
        self._held_shard = None
        self._make_due()
        if self.reshards_after_use and self.state is WeightState.STALE:
            unshard_groups([self])  # a call is using the unit: gather the new values now
            self.wait_for_unshard()

    def _make_due(self) -> None:
        self.wait_for_unshard()
        if self.has_all_shards and self.main_is_compute:
            # The optimizer updates the compute weights themselves: nothing is cast or gathered.
            self._change_main_state(MainState.INSTALLED)
            return
        self._change_main_state(MainState.DUE)
        if self.state is WeightState.UNSHARDED:
            self.change_state(WeightState.STALE)

    def _change_main_state(self, main_state: MainState) -> None:
        self.main_state = change_state(self, self.main_state, main_state)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Broadcast main weights from the first of the ranks that own the same shard."""
        if self.layout.world_size == self.communicator.num_ranks:
            return
        self.wait_for_readers()
        with observe.work(self.unit_name, "broadcast"):
            self.communicator.broadcast(
                self.main_shard,
                over_inner=self.partition.num_inner == 1,
                over_outer=self.partition.num_outer == 1,
            )
        self.mark_main_weights_changed()


@outside_transforms
def unshard_groups(groups: Sequence[ParamGroup]) -> None:
    """Start the all-gathers of groups of a unit, unless they are done or under way."""
    # In one launch where the ranks are the same: see [Note: one launch for several gathers].
    by_ranks: dict[tuple[bool, Hashable], list[ParamGroup]] = defaultdict(list)
    for group in groups:
        if group.needs_unshard():
            ranks = (group.has_all_shards, group.communicator.gather_groups)
            by_ranks[ranks].append(group)
    if not by_ranks:
        return
    with observe.work(groups[0].unit_name, "unshard"):
        for together in by_ranks.values():
            _unshard_together(together)


def _unshard_together(groups: Sequence[ParamGroup]) -> None:
    """Start the all-gathers of groups whose ranks are the same, in one launch over each axis."""
    gathers: list[Gather] = []
    for group in groups:
        gathers += group.prepare_unshard()
    try:
        # A rank that has all shards only casts: the copies of main weights are all there is to do.
        if groups[0].has_all_shards:
            all_gather = all_of([gather.filled for gather in gathers])
        else:
            all_gather = groups[0].communicator.all_gather(gathers)
    except BaseException:  # some of its messages may be under way
        for group in groups:
            group.compute.is_in_failed_collective = True
        raise
    for group in groups:
        group.begin_unshard(all_gather)

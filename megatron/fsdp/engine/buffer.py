# SPDX-License-Identifier: Apache-2.0
"""Flat buffers over the parameters of a group, and running sums of shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap

import torch

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.layout import Layout


class Storage:
    """The memory of flat buffers; by default each has its own, which is resized to nothing.

    Attributes:
        is_assigned_ahead: buffers take turns in memory that is assigned ahead of its use. All ranks
            must then allocate the same buffers at the same times, also those without gradients.
        holds_addresses: no address may ever change, as captured graphs expect.
    """

    is_assigned_ahead = False
    holds_addresses = False

    def adopt(self, buffer: FlatBuffer) -> None:
        """Note a new buffer, which is allocated."""

    def allocate(self, buffer: FlatBuffer) -> None:
        """Give a freed buffer memory; its values are undefined."""
        buffer.flat.untyped_storage().resize_(buffer.num_bytes)
        observe.storage("allocate", buffer.flat)

    def free(self, buffer: FlatBuffer) -> None:
        """Free the memory of an allocated buffer."""
        buffer.flat.untyped_storage().resize_(0)
        observe.storage("release", buffer.flat)

    def abandon(self, buffer: FlatBuffer) -> None:
        """Give an allocated buffer other memory, since a failed collective may use the old one."""
        observe.storage("release", buffer.flat)
        buffer.move(None)

    def discard(self, buffer: FlatBuffer) -> None:
        """Forget a freed buffer that is not used any more, with the record of its uses."""

    def blocker(self, buffer: FlatBuffer) -> FlatBuffer | None:
        """Return the unused buffer that must be freed before this one can be allocated, if any."""
        return None


class FlatBuffer:
    """One flat tensor ``[layout.numel]`` over all parameters of a group; its storage can be freed.

    Args:
        layout: positions of the parameters.
        dtype: dtype of the elements.
        device: device of the tensor.
        name: contents, for messages.
        storage: gives and takes the memory.
        on_move: called when the tensor has moved to other memory.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
        storage: Storage,
        on_move: Callable[[], None] | None = None,
    ):
        self.layout = layout
        self.name = name
        # The flat tensor and its views stay the same objects, to which modules and autograd may
        # refer. They are created now, because a tensor without storage cannot be sliced.
        self.flat = torch.empty(layout.numel, dtype=dtype, device=device)
        self.num_bytes = self.flat.numel() * self.flat.element_size()
        observe.storage("allocate", self.flat)
        self.views: list[torch.Tensor] = []  # whole parameters, in their logical shapes
        for position in layout.positions:
            flat = self.flat[position.start : position.stop]
            self.views.append(flat.view(position.shape))
        self.padding = padding_of(self.flat, layout)
        self._slices: list[torch.Tensor] = []
        self.is_allocated = True
        # A collective has failed; other ranks may still write to this memory, or read it.
        self.is_in_failed_collective = False
        self.num_moves = 0  # moves to other addresses: graphs of autograd refer to the old one
        self.storage = storage
        self._on_move = on_move
        storage.adopt(self)

    def allocate(self) -> None:
        """Allocate the storage if it is freed; new storage has undefined values."""
        if not self.is_allocated:
            self.storage.allocate(self)
            self.is_allocated = True

    def free(self) -> None:
        """Free the storage if it is allocated."""
        if self.is_allocated:
            if self.is_in_failed_collective:
                self.storage.abandon(self)
            else:
                self.storage.free(self)
            self.is_allocated = False
            self.is_in_failed_collective = False

    def discard(self) -> None:
        """Free the storage, and drop the record of its uses."""
        self.free()
        self.storage.discard(self)

    @property
    def blocker(self) -> FlatBuffer | None:
        """The buffer that must be freed before this one can be allocated, if there is one."""
        return self.storage.blocker(self)

    def move(self, memory: torch.Tensor | None) -> None:
        """Move the buffer, which nobody may use, to other memory.

        Args:
            memory: ``uint8``, at least ``num_bytes`` long. None: freed storage of its own.
        """
        if memory is None:
            storage = torch.UntypedStorage(self.num_bytes, device=self.flat.device)
        else:
            storage = memory.untyped_storage()
        # These tensors stay the same objects, but aliases made by `.data` do not follow them.
        for tensor in (self.flat, *self.views, *self.padding, *self._slices):
            tensor.set_(
                storage,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
        if memory is None:
            storage.resize_(0)
        self.num_moves += 1
        if self._on_move is not None:
            self._on_move()

    def slice(self, index: int, count: int) -> torch.Tensor:
        """Return number ``index`` of ``count`` equal slices of the flat tensor."""
        slices = self.flat.view(count, -1)
        self._slices.append(slices[index])
        return self._slices[-1]


class ShardMemory:
    """The memory of main weights, reduced gradients and optimizer state; here that of the device.

    Args:
        device: device on which units compute.
    """

    is_offloaded = False  # the memory is elsewhere, and copies to and from the device are needed

    def __init__(self, device: torch.device):
        self.device = device

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat tensor."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def use(
        self,
        tensor: torch.Tensor,
        function: Callable[[torch.Tensor], None],
    ) -> Pending:
        """Begin to call ``function`` with ``tensor`` of this memory, or its copy on the device."""
        function(tensor)
        return Pending()

    def add(
        self,
        total: torch.Tensor,
        addend: torch.Tensor,
        is_first: bool,
    ) -> None:
        """Add a tensor to a sum.

        Copies may be under way on return: the host calls :meth:`wait` before it reads the total,
        and until then nobody writes to the addend or frees its storage.

        Args:
            total: flat tensor of this memory.
            addend: flat tensor of the same size on the device; its dtype may differ.
            is_first: the total has no values yet.
        """
        if is_first:
            total.copy_(addend)
        else:
            total.add_(addend)

    def wait(self) -> None:
        """Make the host wait for all copies from and to the device."""

    def release(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` is not used soon: a file may write it back."""


class RunningSum:
    """A flat tensor ``[numel]`` that the first addend fills and later ones are added to.

    Args:
        numel: number of elements.
        dtype: dtype in which addends are summed.
        memory: memory of the sum; addends are on its device.
        holds_address: keep the tensor for all sums, because captured graphs know its address.
        view_specs: the views of the parameters' gradients. None: no views.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        memory: ShardMemory,
        holds_address: bool,
        view_specs: ViewSpecs | None = None,
    ):
        self.dtype = dtype
        self.view_specs = view_specs or ViewSpecs([])
        self.is_empty = True
        self._numel = numel
        self.memory = memory
        self._holds_address = holds_address
        self._total: torch.Tensor | None = None
        self._views: list[torch.Tensor] | None = None

    @property
    def total(self) -> torch.Tensor:
        """The sum, or zeros if nothing was added, which the host may read."""
        self.memory.wait()
        total = self.tensor()
        if self.is_empty:
            total.zero_()
        return total

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is the tensor of the sum."""
        return tensor is self._total

    def tensor(self) -> torch.Tensor:
        """Return the tensor of the sum; the values of an empty one are undefined."""
        if self._total is None:
            self._total = self.memory.empty(self._numel, self.dtype)
            if not self.memory.is_offloaded:
                observe.storage("allocate", self._total)
        return self._total

    def views(self) -> list[torch.Tensor]:
        """Return the parameters' parts of :meth:`tensor`."""
        if self._views is None:
            self._views = self.view_specs.views_of(self.tensor())
        return self._views

    def buffer_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor ``[numel]`` for the next addend."""
        # For the first addend it is the sum itself, if the dtypes are equal, which saves a copy.
        memory = self.memory
        if self.is_empty and dtype == self.dtype and not memory.is_offloaded:
            return self.tensor()
        return torch.empty(self._numel, dtype=dtype, device=memory.device)

    def add(self, addend: torch.Tensor) -> None:
        """Add ``addend`` ``[numel]``, which may be the result of :meth:`buffer_for`."""
        is_in_place = addend is self._total
        if not is_in_place:
            self.memory.add(self.tensor(), addend, self.is_empty)
        self.is_empty = False

    def drop(self) -> None:
        """Begin a new sum, in another tensor unless the address is kept."""
        # Code that keeps a gradient still has the tensor: nothing writes to it any more.
        self.is_empty = True
        if self._total is not None and not self._holds_address:
            observe.storage("release", self._total)
            self._total = None
            self._views = None


class ViewSpecs:
    """Shapes, strides and offsets of some views of a flat tensor, to make equal views of others.

    Args:
        views: views of one flat tensor, which may be on the meta device.
    """

    def __init__(self, views: Sequence[torch.Tensor]):
        self._specs = []
        for view in views:
            self._specs.append((view.shape, view.stride(), view.storage_offset()))

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the same views of ``flat``."""
        return list(starmap(flat.as_strided, self._specs))  # in C: every step does this


def padding_of(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the slices of a flat tensor that belong to no parameter."""
    used = []
    for position in layout.positions:
        if position.numel:
            used.append((position.start, position.stop))
    # Positions are in the order of the group, which need not be that of the buffer.
    used.sort()
    padding = []
    end = 0  # end of the parameters so far
    for start, stop in used:
        if end < start:
            padding.append(flat[end:start])
        end = stop
    if end < layout.numel:
        padding.append(flat[end:])
    return padding


def shard_view(
    shard: torch.Tensor,
    layout: Layout,
    index: int,
    rank: int,
) -> torch.Tensor:
    """Return the part of a parameter that a shard contains, in its local shape.

    Args:
        shard: ``[layout.shard_size]``; the result shares its storage.
        layout: the layout of the group.
        index: index of the parameter in the group.
        rank: the owner of the shard.
    """
    start, stop = layout.shard_range(index, rank)
    local_shape = layout.owned(index, rank).local_shape
    return shard[start:stop].view(local_shape)

# SPDX-License-Identifier: Apache-2.0
"""Local gradients of a parameter group: this rank's sum since the last reduction.

[Note: where local gradients accumulate] They accumulate in a flat buffer of their own, which is
freed when it is reduced. But a rank whose gradient shard is the whole gradient (level 0, or data
axes of one rank) needs no second buffer of that size, nor a copy between the two: as long as the
shard has no reduced gradients, local ones accumulate in its tensor and are reduced in place.
    level 0, 3 microbatches    copied into the shard's tensor, added, added, all-reduced there
    another step on top        the shard has reduced gradients, to which all ranks have added: local
                               ones accumulate in the buffer, are all-reduced there, and added
    data axes of one rank      a reduction neither sends nor divides, so gradients that are reduced
                               at once are added to the reduced ones
A layer may also write its gradient into the flat tensor itself, which saves the copy too.
Memory slots have fixed addresses, which gradient shards have not: with slots there is always a
buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress, count, repeat
from operator import attrgetter, is_not

import torch
from torch import nn

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import FlatBuffer, RunningSum, Storage, padding_of, views_of
from megatron.fsdp.engine.layout import Layout
from megatron.fsdp.engine.tensor_parallel import local_grad

# Loops over all parameters, which every step repeats, are left to `map`: they run in C.
_grad = attrgetter("grad")
_is_sparse = attrgetter("is_sparse")


class LocalGradients:
    """The sum of this rank's gradients of whole parameters, since the last reduction.

    Args:
        parameters: the compute parameters, on which autograd leaves gradients.
        layout: the positions of the parameters in the flat tensor.
        device: where the buffer is allocated.
        unit_name: name of the unit of the group, for traces and messages.
        storage: the memory of the buffer.

    Attributes:
        is_empty: there are no gradients that wait for a reduction.
        is_in_sum: the gradients, which wait or are being reduced, are in the gradient shard.
        notes_users: the next attribute is kept.
        users: indices of the parameters that got a gradient since reduced ones were dropped.
        num_forgotten: how often what layers have written was forgotten; what they keep themselves
            of a pass before is then worthless.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        device: torch.device,
        unit_name: str,
        storage: Storage,
    ):
        self._parameters = parameters
        self._layout = layout
        self._device = device
        self._unit_name = unit_name
        self._storage = storage
        self.is_empty = True
        self.is_in_sum = False
        self.notes_users = False
        self.users: set[int] = set()
        self.num_forgotten = 0
        self._buffer: FlatBuffer | None = None  # made when it is first needed
        self._sum: torch.Tensor | None = None  # the gradient shard, where they accumulate in it
        self._views: list[torch.Tensor] = []  # of the tensor that is in use
        self._sum_views: list[torch.Tensor] = []
        self._sum_padding: list[torch.Tensor] = []
        self._may_write = False  # nothing was accumulated since the flat tensor was opened
        self._written: set[int] = set()  # parameters whose gradient a layer has written here
        self._early: dict[int, torch.Tensor] = {}  # what was written long before it arrives

    @property
    def flat(self) -> torch.Tensor:
        """The flat tensor ``[layout.numel]`` of the gradients that were added last."""
        if self.is_in_sum and self._sum is not None:
            return self._sum
        assert self._buffer is not None, "there are no local gradients"
        return self._buffer.flat

    def num_aliases(self, shard: torch.Tensor) -> int:
        """Return how many tensors there are here over the storage of a gradient shard."""
        return len(self._sum_views) + len(self._sum_padding) if shard is self._sum else 0

    # ---- accumulation

    def accumulate(self, dtype: torch.dtype, gradient_sum: RunningSum | None) -> None:
        """Add the gradients that autograd left on the compute parameters, and clear them there.

        Args:
            dtype: of a buffer that is opened for them.
            gradient_sum: the sum in whose tensor they accumulate if there are none yet; None: they
                accumulate in the buffer.
        """
        grads = list(map(_grad, self._parameters))
        arrived = list(compress(count(), map(is_not, grads, repeat(None))))
        if self.notes_users:
            self.users.update(arrived)
        # Ranks that do not allocate the same buffers at the same time assign different slots. So a
        # rank that has not used the group (an expert without tokens) accumulates zeros.
        if not (arrived or self._written) and not self._storage.is_assigned_ahead:
            return
        self._may_write = False
        with observe.work(self._unit_name, "accumulate gradients"):
            covers_all = len(arrived) == len(self._parameters)
            has_values = self.open(dtype, gradient_sum, covers_all)
            arrived = self._take_written(arrived) if self._written else arrived
            targets = list(map(self._views.__getitem__, arrived))
            grads = list(map(grads.__getitem__, arrived))
            if set(map(type, grads)) != {torch.Tensor} or any(map(_is_sparse, grads)):
                grads = [local_grad(self._parameters[index]) for index in arrived]
            if arrived and has_values:
                torch._foreach_add_(targets, grads)
            elif arrived:
                torch._foreach_copy_(targets, grads)
        clear_grads(self._parameters)

    def view_to_write(
        self, index: int, dtype: torch.dtype, gradient_sum: RunningSum | None
    ) -> torch.Tensor | None:
        """Return zeros in the flat tensor for the gradient of parameter ``index``.

        None: there may be gradients of the parameter already, or what an outer pass has written
        long before waits for that pass, and a nested one must not take it for its own.

        Args:
            index: number of the parameter.
            dtype: see :meth:`accumulate`.
            gradient_sum: see :meth:`accumulate`; it is empty.
        """
        if index in self._early:
            return None
        if self.is_empty:
            with observe.work(self._unit_name, "accumulate gradients"):
                self.open(dtype, gradient_sum, covers_all=False)
            self._may_write = True
        if not self._may_write or index in self._written:
            return None
        self._written.add(index)
        return self._views[index]

    def written(self, index: int) -> torch.Tensor:
        """Return the gradient of parameter ``index`` that a layer has written, when it arrives."""
        early = self._early.pop(index, None)
        return self._views[index] if early is None else early

    def _take_written(self, arrived: list[int]) -> list[int]:
        """Finish gradients that layers have written; return the other parameters of ``arrived``."""
        for index in self._written:
            parameter, view = self._parameters[index], self._views[index]
            if index not in arrived:
                # Autograd waits for another use of the parameter, and then brings the sum.
                self._early[index] = view.clone()
                view.zero_()
            elif parameter.grad is not None:
                # Autograd has kept the alias and added to it, or has made a tensor of the sum.
                if parameter.grad.data_ptr() != view.data_ptr():
                    view.copy_(parameter.grad)
                parameter.grad = None
        others = [index for index in arrived if index not in self._written]
        self._written.clear()
        return others

    def forget_written(self) -> None:
        """Forget what layers have written and autograd has not brought, and will not bring.

        The pass has failed, or it is over and wanted no gradients of these parameters.
        """
        self.num_forgotten += 1
        self._early.clear()
        if self._written:  # then nothing has been accumulated since the flat tensor was opened
            self.free()

    def open(self, dtype: torch.dtype, gradient_sum: RunningSum | None, covers_all: bool) -> bool:
        """Allocate the flat tensor, unless it has gradients already.

        Args:
            dtype: see :meth:`accumulate`.
            gradient_sum: see :meth:`accumulate`.
            covers_all: the caller writes the gradient of every parameter, so only the padding
                between them has to be zeroed, otherwise all of it.

        Returns:
            True if it has values that the caller must add to.
        """
        if not self.is_empty:
            return True
        self.is_empty = False
        self.is_in_sum = gradient_sum is not None
        if gradient_sum is not None:
            self._open_sum(gradient_sum.allocated())
            if not gradient_sum.is_empty:
                return True
            padding = self._sum_padding
        else:
            buffer = self._open_buffer(dtype)
            padding = buffer.padding
        if not covers_all:
            self.flat.zero_()
        elif padding:
            torch._foreach_zero_(padding)
        return False

    def _open_sum(self, total: torch.Tensor) -> None:
        if total is not self._sum:  # it is the same tensor in every step
            self._sum = total
            self._sum_views = views_of(total, self._layout)
            self._sum_padding = padding_of(total, self._layout)
        self._views = self._sum_views

    def _open_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        if self._buffer is None or self._buffer.flat.dtype != dtype:
            if self._buffer is not None:
                self._buffer.discard()
            name = f"the local gradients of unit {self._unit_name!r}"
            self._buffer = FlatBuffer(self._layout, dtype, self._device, name, self._storage)
        self._buffer.allocate()
        self._views = self._buffer.views
        return self._buffer

    # ---- reduction

    def take(self) -> torch.Tensor:
        """Return the flat tensor for a reduction; gradients that come later begin a new sum."""
        self.is_empty = True
        return self.flat

    def free(self) -> None:
        """Drop the gradients, and free the storage of the buffer."""
        self.is_empty = True
        self.is_in_sum = False
        self._may_write = False
        self._written.clear()
        if self._buffer is not None:
            self._buffer.free()

    def move_to_buffer(self) -> None:
        """Move gradients from the tensor of the gradient shard into the buffer."""
        if not self.is_empty and self.is_in_sum and self._sum is not None:
            self.is_in_sum = False
            self._open_buffer(self._sum.dtype).flat.copy_(self._sum)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients by a number or a 0-d tensor."""
        if not self.is_empty:
            self.flat.mul_(factor)


def clear_grads(parameters: Sequence[nn.Parameter]) -> None:
    """Drop the gradients that autograd has left on the compute parameters."""
    deque(map(setattr, parameters, repeat("grad"), repeat(None)), maxlen=0)

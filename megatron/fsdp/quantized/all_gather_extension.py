# SPDX-License-Identifier: Apache-2.0
"""Weights whose class decides what is all-gathered: the all-gather extension of FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.layout import ROWS, Layout, ParamPosition, row_size
from megatron.fsdp.engine.param_group import StoredForm
from megatron.fsdp.engine.planner import MIN_ALIGNMENT
from megatron.fsdp.quantized.frozen_bytes import allocated, ends_of, parts_of
from megatron.fsdp.quantized.tensor_subclasses import users_attributes

# [Note: the all-gather extension] A tensor subclass around one tensor of high precision may have
# two methods, which FSDP2 and this library call alike:
#
#     fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy), or (mesh) alone,
#         returns the tensors to gather for this rank's rows, and metadata. It may communicate over
#         `mesh`: the scale of a float8 weight is one for all rows.
#     fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)
#         returns the tensor that the forward reads, and the tensors inside it; with `out`, which it
#         has returned once, it updates that.
#
# FSDP2 calls the first before every gather; here it is called once after main weights have changed.
# Classes rely on FSDP2's shards: every rank has as many rows of the weight as the others (a scale
# is the mean of means), the last ones zeros if the ranks do not divide them. So each weight is a
# group by itself. Its rows are those of the main weights, in their dtype; the optimizer knows
# nothing of the class. The groups of a unit are still gathered in one launch.
#
# The buffer is one of bytes. If the class gathers one tensor, the forward reads the buffer itself;
# several are copied out of it, as each rank sends one block with a part of all of them.


class ExtensionForm(StoredForm):
    """A weight as its class stores it. See [Note: the all-gather extension].

    Args:
        name: name of the parameter, for messages.
        parameter: the parameter, which the one that forwards read replaces.
        owners: the modules that own it, each with the parameter's name in it.
        mesh: the ranks that shard it.
        device: the device of the shards.
        main_dtype: the dtype of its main weights.
        policy: the dtypes of compute weights and of reductions.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        owners: Sequence[tuple[nn.Module, str]],
        mesh: DeviceMesh,
        device: torch.device,
        main_dtype: torch.dtype,
        policy: MixedPrecisionPolicy,
    ):
        super().__init__(ROWS)
        self._name = name
        self._owners = owners
        self._mesh = mesh
        self._policy = policy
        tensor: Any = parameter
        self._class: Any = type(tensor)
        names, self._context = tensor.__tensor_flatten__()
        (self._inner,) = names  # checked with the module
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._main_dtype = main_dtype
        self._device = device
        self._shard: Any = None  # the weight of this rank's rows
        self._metadata: Any = None  # result of `fsdp_pre_all_gather`, for `fsdp_post_all_gather`
        self._sent: list[torch.Tensor] = []  # meta tensors of what every rank sends
        self._compute: nn.Parameter | None = None  # the parameter that forwards read
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._separate: dict[torch.UntypedStorage, int] = {}  # outside the buffer, with its bytes

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the values of high precision, which the main weights take over."""
        values: torch.Tensor = getattr(parameter, self._inner)
        return values.detach()

    def buffer(
        self,
        layout: Layout,
        dtype: torch.dtype,
    ) -> tuple[Layout, torch.dtype]:
        """Return the layout of the bytes that all ranks send; a collective for some classes.

        Raises:
            NotImplementedError: if the ranks cannot have whole rows.
        """
        world_size = layout.world_size
        size = row_size(self._shape)
        num_rows = -(-self._shape[0] // world_size)
        if layout.shard_size != num_rows * size:
            raise NotImplementedError(
                f"{self._name}: a {self._class.__name__} is sharded by rows of a multiple of"
                f" {MIN_ALIGNMENT} elements, but has {size} in a row"
            )
        zeros = torch.zeros(
            (num_rows, *self._shape[1:]),
            dtype=self._main_dtype,
            device=self._device,
        )
        tensors = self._send(zeros)
        self._sent = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        shard_bytes = ends_of(self._sent)[-1]
        whole = ParamPosition((shard_bytes * world_size,), 0, False)
        sent_layout = Layout(world_size, shard_bytes, (whole,))
        return sent_layout, torch.uint8

    def _send(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors to gather for a shard; a collective for some classes."""
        self._shard = self._class.__tensor_unflatten__(
            {self._inner: rows},
            self._context,
            rows.shape,
            rows.stride(),
        )
        prepare = self._shard.fsdp_pre_all_gather
        arguments: list[Any] = [self._mesh]
        if len(inspect.signature(prepare).parameters) > 1:
            module, _ = self._owners[0]
            arguments += [self._shape, self._stride, module, self._policy]
        tensors, self._metadata = prepare(*arguments)
        return [tensor.contiguous() for tensor in tensors]

    def fill(
        self,
        shard: torch.Tensor,
        main: torch.Tensor,
        layout: Layout,
        rank: int,
    ) -> None:
        """Write the tensors to gather for this rank's rows to its shard of the buffer, as bytes.

        Args:
            shard: this rank's shard of the buffer, uint8.
            main: this rank's shard of main weights, flat.
            layout: that of the main weights.
            rank: the number of the shard.
        """
        row_shape = self._shape[1:]
        owned = shard_view(main, layout, 0, rank)
        rows = owned.view(-1, *row_shape)
        missing = len(self._sent[0]) - len(rows)
        if missing:
            padding = rows.new_zeros(missing, *row_shape)
            rows = torch.cat([rows, padding])
        parts = parts_of(shard, self._sent)
        tensors = self._send(rows)
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor)

    def point(
        self,
        parameter: nn.Parameter,
        view: torch.Tensor,
    ) -> nn.Parameter:
        """Return the parameter that forwards read, made by its class of the gathered tensors."""
        if self._compute is not None:
            return self._compute  # its memory never moves
        with allocated(view) as buffer:
            tensor = self._make(buffer)
        # A new object, since torch.utils.swap_tensors cannot make a parameter one with slots.
        self._compute = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        attributes = users_attributes(parameter)
        for name, value in attributes.items():
            setattr(self._compute, name, value)
        for module, name in self._owners:
            module._parameters[name] = self._compute
        return self._compute

    def _make(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the class makes of the gathered tensors."""
        shard_bytes = ends_of(self._sent)[-1]
        world_size = buffer.numel() // shard_bytes
        outputs = []
        for sent in self._sent:
            flat = buffer
            if len(self._sent) > 1:
                flat = buffer.new_empty(world_size * sent.nbytes)
            typed = flat.view(sent.dtype)
            outputs.append(typed.view(-1, *sent.shape[1:]))
        self._outputs = tuple(outputs)
        made: torch.Tensor
        made, inside = self._shard.fsdp_post_all_gather(
            self._outputs,
            self._metadata,
            self._policy.param_dtype,
        )
        address = buffer.untyped_storage().data_ptr()
        for tensor in (*self._outputs, *inside):
            storage = tensor.untyped_storage()
            if storage.data_ptr() != address:
                self._separate[storage] = storage.nbytes()
        if made.shape == self._shape:
            return made
        # Without the rows that make all shards equal.
        return torch.as_strided(made, self._shape, self._stride, 0)

    @torch.no_grad()
    def finish(self, flat: torch.Tensor) -> None:
        """Let the class update the parameter that forwards read."""
        for storage, size in self._separate.items():
            storage.resize_(size)
        if len(self._sent) > 1:
            shard_bytes = ends_of(self._sent)[-1]
            blocks = flat.view(-1, shard_bytes)
            for rank, block in enumerate(blocks):
                parts = parts_of(block, self._sent)
                for output, part in zip(self._outputs, parts):
                    start = rank * len(part)
                    stop = start + len(part)
                    output[start:stop] = part
        self._shard.fsdp_post_all_gather(
            self._outputs,
            self._metadata,
            self._policy.param_dtype,
            out=self._compute,
        )

    def release(self) -> None:
        """Free the gathered tensors, and those of the class, that are not the buffer."""
        for storage in self._separate:
            storage.resize_(0)

# SPDX-License-Identifier: Apache-2.0
"""Groups of weights of which the backward reads other codes than the forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.fsdp.engine.buffer import FlatBuffer
from megatron.fsdp.engine.collectives import Gather
from megatron.fsdp.engine.device import Pending, in_backward
from megatron.fsdp.engine.param_group import ParamGroup, unshard_groups
from megatron.fsdp.engine.states import MainState, WeightState
from megatron.fsdp.quantized.transformer_engine_weights import TransformerEngineForm

# [Note: codes for the backward] MXFP8 scales blocks of 32 values in a row for the forward, and of
# 32 in a column for the backward. Neither can be computed from the other, so both are sharded: each
# side has a buffer and a shard of its own. At level 3 a pass gathers only the sides that it reads.
#
#     forward                            rows
#     backward                           columns
#     recomputation in a backward        rows too, when a module with such weights is called
#     levels 1 and 2                     both, after each step
ROWS = 0
COLUMNS = 1


class TwoSidedGroup(ParamGroup):
    """A group of such weights. See [Note: codes for the backward]."""

    form: TransformerEngineForm

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        rows = self.compute
        columns = FlatBuffer(
            layout=rows.layout,
            dtype=rows.flat.dtype,
            device=rows.flat.device,
            name=f"{rows.name}, for the backward",
            storage=rows.storage,
            on_move=self._point_parameters,
        )
        self.buffers.append(columns)
        self._shards = [
            (self.compute_shard, self._owned_shard),
            self._make_shards(columns),
        ]
        self._gathered: set[int] = set()  # sides whose buffers have the codes of all ranks
        self._outer_due: set[int] = set()  # sides whose shards the outer axis has not gathered yet
        self._recomputes = False  # a forward runs in the backward for which the group is unsharded
        # LayerNormMLP(checkpoint=True) recomputes without a forward that hooks could see.
        self._hides_forward = False
        for module in self.form.owners:
            module.register_forward_pre_hook(self._before_forward)
            if getattr(module, "checkpoint", False):
                self._hides_forward = True

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Gather the rows for a forward in a backward, which recomputes activations."""
        if in_backward() and ROWS not in self._gathered:
            self._recomputes = True
            unshard_groups([self])
            self.wait_for_unshard()

    @property
    def _missing(self) -> set[int]:
        """The sides that the pass under way reads, and that are not gathered."""
        wanted = {ROWS, COLUMNS}
        if self.reshards_after_use:
            if not in_backward():
                wanted = {ROWS}
            elif not self._recomputes and not self._hides_forward:
                wanted = {COLUMNS}
        return wanted - self._gathered

    def needs_unshard(self) -> bool:
        """Finish the other side's all-gather if a side is missing; return True if one is needed."""
        if self._missing:
            self.wait_for_unshard()
            if self.state is WeightState.UNSHARDED:
                self.change_state(WeightState.STALE)
        return super().needs_unshard()

    def prepare_unshard(self) -> list[Gather]:
        """Allocate the sides that are missing, and return the all-gathers to start."""
        filled = Pending()
        if self.main_state is MainState.DUE:
            filled = self._cast()
        missing = sorted(self._missing)
        gathers = []
        for side in missing:
            buffer = self.buffers[side]
            buffer.allocate()
            shard, owned = self._shards[side]
            owned_if_due = None
            if side in self._outer_due:
                owned_if_due = owned
            gather = Gather(buffer.flat, shard, filled, owned_if_due)
            gathers.append(gather)
        self._outer_due.difference_update(missing)
        self._gathered.update(missing)
        self.form.show(self._gathered)
        return gathers

    @torch.no_grad()
    def _cast(self) -> Pending:
        """Begin to fill the owned shards of both sides from main weights."""
        owned = [shard for _, shard in self._shards]

        def quantize(main: torch.Tensor) -> None:
            self.form.quantize(owned, main, self.layout, self.rank)

        filled = self.memory.use(self.main_shard, quantize)
        self._gathered.clear()
        if self.partition.num_outer > 1:
            self._outer_due = {ROWS, COLUMNS}
        return filled

    def reshard(self) -> None:
        """Free both sides at level 3."""
        super().reshard()
        if self.reshards_after_use:
            self.buffers[COLUMNS].free()
            self._gathered.clear()
            self._recomputes = False
            self.form.show([ROWS])

    @torch.no_grad()
    def _point_parameters(self, indices: Iterable[int] | None = None) -> None:
        """Make weights keep the codes of both sides in the buffers."""
        if indices is None:
            indices = range(len(self.parameters))
        for index in indices:
            parameter = self.parameters[index]
            for side, buffer in enumerate(self.buffers):
                self.form.place(parameter, side, buffer.views[index])

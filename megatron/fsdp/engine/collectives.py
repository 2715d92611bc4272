# SPDX-License-Identifier: Apache-2.0
"""The only caller of torch.distributed collectives, and the one place where gradients are divided.

[Note: the divisor] A reduced gradient is the sum over the ranks divided by ``divisor``. The
division happens here and
nowhere else: before the collective where the sum could overflow (fp16), inside it where the process
group is asked to average, and otherwise on the result, which is the smallest tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.engine.device import Collective, CpuStreams, CudaStreams, Pending

# torch 2.13 renamed both and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Communicator:
    """The collectives of one kind of parameters: over the inner axis, which divides them, and an outer one.

    Args:
        inner: group of the ranks that divide the parameters.
        outer: group of the ranks that replicate them or divide them further; None without such an
            axis.
        all_gather_group: group of the inner ranks for gathers of weights; may be ``inner`` itself.
        divisor: what a summed gradient is divided by: the number of data ranks for a mean, 1 for a
            sum.
        average_in_collective: let the process groups divide. What their sizes leave of the divisor
            (expert parameters are reduced over fewer ranks than there are data ranks) is divided
            here.
    """

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup | None
    all_gather_group: dist.ProcessGroup
    divisor: int
    average_in_collective: bool
    streams: CpuStreams | CudaStreams

    @property
    def inner_size(self) -> int:
        return dist.get_world_size(self.inner)

    @property
    def inner_rank(self) -> int:
        return dist.get_rank(self.inner)

    @property
    def outer_size(self) -> int:
        return dist.get_world_size(self.outer) if self.outer is not None else 1

    @property
    def outer_rank(self) -> int:
        return dist.get_rank(self.outer) if self.outer is not None else 0

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, piece: torch.Tensor | None = None
    ) -> Pending:
        """Fill ``full`` ``[inner * n]`` with the ``shard`` ``[n]`` of every inner rank; ``shard`` may be a slice of it.

        With ``piece`` ``[n / outer]`` ``shard`` is filled first, with those of the outer ranks.
        """
        steps = [] if piece is None else [_gather_step(shard, piece, self.outer)]
        if self.inner_size > 1:
            in_place = full.untyped_storage()._cdata == shard.untyped_storage()._cdata
            own_is_written = in_place and self.streams.gathers_write_own_part
            steps.append(
                (_gather_others_step if own_is_written else _gather_step)(
                    full, shard, self.all_gather_group
                )
            )
        return self.streams.launch("gather", *steps)

    def reduce_scatter(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """``shard`` ``[n]``: this inner rank's slice of the reduced ``full`` ``[inner * n]``, which may be overwritten."""
        return self._divide(
            full, shard, _reduce_scatter_step(full, shard, self.inner, self._operation)
        )

    def all_reduce(self, full: torch.Tensor) -> Pending:
        """``full`` becomes the reduced tensor on every inner rank."""
        return self._divide(full, full, _all_reduce_step(full, self.inner, self._operation))

    def reduce_scatter_outer(self, shard: torch.Tensor, piece: torch.Tensor) -> Pending:
        """``piece`` ``[n]``: this outer rank's slice of what the outer ranks have of ``shard`` ``[outer * n]``, summed."""
        return self.streams.launch(
            "reduce", _reduce_scatter_step(shard, piece, self.outer, self._operation)
        )

    def all_reduce_outer(self, shard: torch.Tensor) -> Pending:
        """``shard`` becomes the sum over the outer ranks, on all of them."""
        return self.streams.launch("reduce", _all_reduce_step(shard, self.outer, self._operation))

    @property
    def _operation(self) -> dist.ReduceOp:
        return dist.ReduceOp.AVG if self.average_in_collective else dist.ReduceOp.SUM

    def _divide(self, full: torch.Tensor, result: torch.Tensor, step: Collective) -> Pending:
        """The inner reduction, divided once: what the outer axis adds up later are parts of the mean."""
        divisor = (
            self.divisor / (self.inner_size * self.outer_size)
            if self.average_in_collective
            else self.divisor
        )
        before = full.dtype == torch.float16 and divisor > 1
        if before:
            full.div_(divisor)
        pending = self.streams.launch("reduce", step)
        if before or divisor == 1:
            return pending

        def wait_and_divide() -> None:
            pending.wait()
            result.div_(divisor)

        return Pending(wait_and_divide)

    def broadcast(
        self, tensor: torch.Tensor, over_inner: bool = True, over_outer: bool = True
    ) -> None:
        """``tensor`` of the first data rank, or of the first one along one of the axes, on all of them."""
        for group, wanted in ((self.inner, over_inner), (self.outer, over_outer)):
            if wanted and group is not None and dist.get_world_size(group) > 1:
                dist.broadcast(tensor, group=group, group_src=0)


def _gather_step(full: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Collective:
    return lambda asynchronous: _all_gather_single(full, part, group=group, async_op=asynchronous)


def _gather_others_step(
    full: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> Collective:
    """In place, but this rank's own part, which others may write meanwhile, is left alone."""
    parts = list(full.chunk(dist.get_world_size(group)))
    parts[dist.get_rank(group)] = torch.empty_like(part)
    return lambda asynchronous: dist.all_gather(parts, part, group=group, async_op=asynchronous)


def _reduce_scatter_step(
    full: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp
) -> Collective:
    return lambda asynchronous: _reduce_scatter_single(
        part, full, op=op, group=group, async_op=asynchronous
    )


def _all_reduce_step(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp
) -> Collective:
    return lambda asynchronous: dist.all_reduce(tensor, op=op, group=group, async_op=asynchronous)


def agree(
    problems: Iterable[str], groups: Sequence[dist.ProcessGroup | None] = (None,)
) -> list[str]:
    """The ``problems`` of every rank, on every rank, so that all raise the same error.

    Args:
        groups: every rank is reached by one after the other: the axes of a mesh. None: all ranks
            there are.
    """
    known = set(problems)
    for group in groups:
        everybodys: list[set[str]] = [set()] * dist.get_world_size(group)
        dist.all_gather_object(everybodys, known, group=group)
        known = set().union(*everybodys)
    return sorted(known)


def all_reduce_over(
    tensor: torch.Tensor, groups: Sequence[dist.ProcessGroup], op: dist.ReduceOp
) -> torch.Tensor:
    """``tensor``, in place, reduced over the ranks of one group after the other: over a whole mesh."""
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(tensor, op=op, group=group)
    return tensor


def all_gather_uneven(piece: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The flat ``piece`` of every rank, of any size, in rank order."""
    ranks = dist.get_world_size(group)
    sizes = torch.empty(ranks, dtype=torch.int64, device=piece.device)
    _all_gather_single(sizes, sizes.new_tensor([piece.numel()]), group=group)
    longest = int(sizes.max())
    padded = piece.new_zeros(longest)
    padded[: piece.numel()] = piece
    everything = piece.new_empty(ranks * longest)
    _all_gather_single(everything, padded, group=group)
    return [row[:size] for row, size in zip(everything.view(ranks, longest), sizes.tolist())]

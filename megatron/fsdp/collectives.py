# SPDX-License-Identifier: Apache-2.0
"""The only caller of torch.distributed collectives, and the one place where gradients are divided.

[Note: the divisor] A reduced gradient is the sum over the ranks divided by ``divisor``. The division happens here and
nowhere else: before the collective where the sum could overflow (fp16), inside it where the process group is asked to
average, and otherwise on the result, which is the smallest tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.device import CpuLanes, CudaLanes, Pending, lanes_for

# torch 2.13 renamed both and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Communicator:
    """The collectives of one shard axis.

    Args:
        group: its process group.
        divisor: what a summed gradient is divided by: the number of data ranks for a mean, 1 for a sum.
        average_in_collective: let the process group divide; needs ``divisor`` to be the group's size.
    """

    group: dist.ProcessGroup
    divisor: int
    average_in_collective: bool
    lanes: CpuLanes | CudaLanes

    @classmethod
    def over(cls, group: dist.ProcessGroup, device: torch.device, sum_only: bool, average_in_collective: bool) -> Communicator:
        divisor = 1 if sum_only else dist.get_world_size(group)
        return cls(group, divisor, average_in_collective, lanes_for(device))

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill ``full`` ``[size * n]`` with the ``shard`` ``[n]`` of every rank; ``shard`` may be a slice of it."""
        return self.lanes.launch(
            "gather", lambda asynchronous: _all_gather_single(full, shard, group=self.group, async_op=asynchronous)
        )

    def reduce_scatter(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """``shard`` ``[n]`` becomes this rank's slice of the reduced ``full`` ``[size * n]``, which may be overwritten."""
        return self._reduce(
            full,
            shard,
            lambda op, asynchronous: _reduce_scatter_single(shard, full, op=op, group=self.group, async_op=asynchronous),
        )

    def all_reduce(self, full: torch.Tensor) -> Pending:
        """``full`` becomes the reduced tensor on every rank."""
        return self._reduce(
            full, full, lambda op, asynchronous: dist.all_reduce(full, op=op, group=self.group, async_op=asynchronous)
        )

    def _reduce(self, full: torch.Tensor, result: torch.Tensor, collective) -> Pending:
        before = full.dtype == torch.float16 and not self.average_in_collective
        if before and self.divisor != 1:
            full.div_(self.divisor)
        op = dist.ReduceOp.AVG if self.average_in_collective else dist.ReduceOp.SUM
        pending = self.lanes.launch("reduce", lambda asynchronous: collective(op, asynchronous))
        if before or self.average_in_collective or self.divisor == 1:
            return pending

        def wait_and_divide() -> None:
            pending.wait()
            result.div_(self.divisor)

        return Pending(wait_and_divide)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """``tensor`` of the first rank of the axis, on all its ranks."""
        dist.broadcast(tensor, group=self.group, group_src=0)


def agree(problem: str | None, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's ``problem``, on every rank, so that all raise the same error."""
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return sorted({problem for problem in problems if problem})


def all_gather_uneven(piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The flat ``piece`` of every rank, of any size, one behind the other."""
    ranks = dist.get_world_size(group)
    sizes = piece.new_empty(ranks, dtype=torch.int64)
    _all_gather_single(sizes, sizes.new_tensor([piece.numel()]), group=group)
    longest = int(sizes.max())
    padded = piece.new_zeros(longest)
    padded[: piece.numel()] = piece
    everything = piece.new_empty(ranks * longest)
    _all_gather_single(everything, padded, group=group)
    return torch.cat([row[:size] for row, size in zip(everything.view(ranks, longest), sizes.tolist())])

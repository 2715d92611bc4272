# SPDX-License-Identifier: Apache-2.0
"""Methods of process groups: the tensors that each of them reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import ProcessGroup

from tools.cuda_model.ranges import written_by_gather


class Call(NamedTuple):
    """A collective: its tensors, and how in-place operands would lie in each other."""

    reads: list[torch.Tensor]
    writes: list[torch.Tensor]
    reduces: bool = False
    # Pairs of a whole tensor and this rank's slice of it, which may be its own memory.
    slices: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The whole tensors that have new values at the end."""
        is_gather = self.slices and not self.reduces
        return [whole for whole, _ in self.slices] if is_gather else self.writes


def _flat(lists: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return list(chain.from_iterable(lists))


def _rooted(group: ProcessGroup, tensors: list[torch.Tensor], root: int) -> Call:
    is_root = group.rank() == root
    return Call(tensors, [] if is_root else tensors)


def _broadcast(group: ProcessGroup, tensors: Any, options: Any = 0, *rest: Any) -> Call:
    root = options if isinstance(options, int) else options.rootRank
    return _rooted(group, list(tensors), root)


def _all_reduce(group: ProcessGroup, tensors: Any, *rest: Any) -> Call:
    each = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    return Call(each, each, reduces=True)


def _all_gather(group: ProcessGroup, outputs: Any, inputs: Any, *rest: Any) -> Call:
    return Call(list(inputs), _flat(outputs))


def _all_gather_single(group: ProcessGroup, output: Any, given: Any, *rest: Any) -> Call:
    return Call([given], written_by_gather(group.rank(), output, given), slices=[(output, given)])


def _all_gather_singles(group: ProcessGroup, outputs: Any, inputs: Any, *rest: Any) -> Call:
    pairs = list(zip(outputs, inputs, strict=True))
    writes = [written_by_gather(group.rank(), output, given) for output, given in pairs]
    return Call(list(inputs), _flat(writes), slices=pairs)


def _reduce_scatter(group: ProcessGroup, outputs: Any, inputs: Any, *rest: Any) -> Call:
    return Call(_flat(inputs), list(outputs), reduces=True)


def _reduce_scatter_single(group: ProcessGroup, output: Any, given: Any, *rest: Any) -> Call:
    return Call([given], [output], True, [(given, output)])


def _reduce_scatter_singles(group: ProcessGroup, outputs: Any, inputs: Any, *rest: Any) -> Call:
    pairs = list(zip(inputs, outputs, strict=True))
    return Call(list(inputs), list(outputs), True, pairs)


def _exchange(group: ProcessGroup, output: Any, given: Any, *rest: Any) -> Call:
    outputs = [output] if isinstance(output, torch.Tensor) else list(output)
    return Call([given] if isinstance(given, torch.Tensor) else list(given), outputs)


def _gather(group: ProcessGroup, outputs: Any, inputs: Any, *rest: Any) -> Call:
    return Call(list(inputs), _flat(outputs))


def _scatter(group: ProcessGroup, outputs: Any, inputs: Any, *rest: Any) -> Call:
    return Call(_flat(inputs), list(outputs))


def _send(group: ProcessGroup, tensors: Any, *rest: Any) -> Call:
    return Call(list(tensors), [])


def _receive(group: ProcessGroup, tensors: Any, *rest: Any) -> Call:
    return Call([], list(tensors))


def _barrier(group: ProcessGroup, *rest: Any) -> Call:
    return Call([], [])


METHODS: dict[str, Callable[..., Call]] = {
    "broadcast": _broadcast,
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "reduce": _all_reduce,
    "allgather": _all_gather,
    "allgather_coalesced": _all_gather,
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "allgather_into_tensor_coalesced": _all_gather_singles,
    "all_gather_single_coalesced": _all_gather_singles,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_singles,
    "reduce_scatter_single_coalesced": _reduce_scatter_singles,
    "alltoall_base": _exchange,
    "all_to_all_single": _exchange,
    "alltoall": _exchange,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _receive,
    "barrier": _barrier,
}
"""Methods of process groups by the names that torch's releases have; one has some of them."""

# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer's buffers, decoded into whole tensors of parameters.

Megatron-Core's ``DistributedOptimizer`` keeps the main weights and moments of a rank in *buffers*:
one for all parameters of a dtype in a model chunk, that is in the layers that a pipeline stage runs
in one go. Data-parallel ranks share a buffer. Parameters are in it in the reverse of the order in
which the model registers them, flattened, each one this rank's shard under tensor parallelism. A
buffer is cut into *buckets*, whose gradients are reduced together. Each parameter begins at a
multiple of 64 elements from its bucket's start, and a bucket is padded at its end so that all
data-parallel ranks own equal shards of it::

    parameters registered     a (60 elements), b (100), c (100)
    bucket 0                  c: 0 to 100, gap, b: 128 to 228, padding to 256
    bucket 1                  a: 0 to 60, padding to 128

    |<-------------- bucket 0 -------------->|<------ bucket 1 ------>|
    | c (100)    | gap | b (100)   | padding | a (60) | padding       |
    |<-- data rank 0 ->|<-- data rank 1 ---->|<- rank 0 ->|<- rank 1 >|

Two layouts of files store them so, without the padding at the ends of buckets:

- ``dp_reshardable``: a tensor for each bucket and optimizer slot. Bucket 0 has 228 elements, in the
  chunks 0 to 100 and 128 to 228 here; a shard that two data-parallel ranks own is two chunks.
- ``dp_zero_gather_scatter``: an object for each rank, with a tensor for each buffer and slot. Its
  buckets stand one after another: a is at 228 to 288.

Neither stores which parameters are where. That follows from the number of layers that each pipeline
stage has, from the sizes of tensor parallelism, and from the layers that the model was made of.
Layouts are tried, the one of the run's arguments first, until every parameter begins and ends where
something does in the file.
"""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Shape, Tensors, concatenate
from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.torch_dist.optimizer_buffers import BuffersOfRanks, LayoutMismatchError
from megatron.checkpoint.torch_dist.pipeline_split import Placement, StoredShard, place_model
from megatron.checkpoint.torch_dist.registered_model import (
    BucketLayout,
    LayerImplementation,
    RegisteredModel,
)

_IMPLEMENTATIONS = (
    # Local layers split the down projections of latent attention. Transformer Engine's layers have
    # them whole, but for early releases.
    LayerImplementation(False, grouped_experts=False, splits_down_projections=True),
    LayerImplementation(True, grouped_experts=False, splits_down_projections=False),
    LayerImplementation(True, grouped_experts=True, splits_down_projections=False),
    LayerImplementation(True, grouped_experts=False, splits_down_projections=True),
    LayerImplementation(True, grouped_experts=True, splits_down_projections=True),
)
_NEEDED_ARGUMENTS = ("tensor_model_parallel_size", "transformer_impl")
"""Arguments of a run that, all together, decide between layouts that fit."""


def decode(
    dense: BuffersOfRanks,
    experts: BuffersOfRanks,
    weights: Tensors,
    args: Namespace | None,
) -> Iterator[tuple[str, str, LazyTensor]]:
    """Yield name, slot and whole tensor of every parameter in the buffers.

    Args:
        dense: buffers of every model-parallel rank, tensor-parallel ranks fastest, then pipeline
            stages. Those of a rank are in the order of its model chunks.
        experts: buffers of the optimizer that has the experts, if they have one: expert tensor
            parallelism fastest, then expert parallelism, then pipeline stages.
        weights: canonical name -> the model's tensor.
        args: arguments of the run. All values are tried for the ones that they lack.

    Raises:
        ValueError: if no layout fits, or several do and ``args`` do not decide between them. While
            a tensor is read, if two pipeline stages have different copies of it.
    """
    model, placement = _find_layout(dense, experts, weights, args)
    for name, copies in placement.items():
        for slot in copies[0][0].buffer.slots:
            tensors = []
            for shards in copies:
                tensors.append(joined_tensor(model, name, slot, shards))
            yield name, slot, first_of_equal(name, slot, tensors)


def _find_layout(
    dense: BuffersOfRanks,
    experts: BuffersOfRanks,
    weights: Tensors,
    args: Namespace | None,
) -> tuple[RegisteredModel, Placement]:
    """Find the layout that fits: the model in it, and where its parameters are."""
    missing = []
    for name in _NEEDED_ARGUMENTS:
        if getattr(args, name, None) is None:
            missing.append(name)
    found: list[tuple[RegisteredModel, Placement]] = []
    failures: dict[str, BucketLayout] = {}  # reason -> first layout that fails for it
    for layout in _possible_layouts(dense, experts, args):
        try:
            model = RegisteredModel(weights, layout)
            placement = place_model(model, dense, experts)
        except LayoutMismatchError as error:
            failures.setdefault(str(error), layout)
            continue
        if all(placement != other for _, other in found):
            found.append((model, placement))
        if not missing:
            break
    if not found:
        reasons = [f"{layout}: {reason}" for reason, layout in failures.items()]
        raise ValueError(listed("the optimizer's buckets do not fit the model", reasons))
    if len(found) > 1:
        title = (
            "the optimizer's buckets fit several layouts, and the checkpoint's args lack"
            f" {', '.join(missing)}"
        )
        layouts = [str(model.layout) for model, _ in found]
        raise ValueError(listed(title, layouts))
    return found[0]


def _possible_layouts(
    dense: BuffersOfRanks,
    experts: BuffersOfRanks,
    args: Namespace | None,
) -> Iterator[BucketLayout]:
    """Yield all layouts that are possible, the one of the arguments first."""
    buffers = itertools.chain(*dense, *experts)
    shows_order = all(buffer.shows_order for buffer in buffers)
    given_size = getattr(args, "tensor_model_parallel_size", None)
    given_expert_size = getattr(args, "expert_tensor_parallel_size", None)
    sizes = _divisors(len(dense))
    if given_size:
        sizes = [given_size]
    for layers in _possible_implementations(args, shows_order):
        for size in sizes:
            if given_expert_size:
                expert_sizes = [given_expert_size]
            elif given_size or not experts:
                expert_sizes = [size]
            else:
                expert_sizes = _divisors(len(experts))
            for expert_size in expert_sizes:
                yield BucketLayout(size, expert_size, layers)


def _possible_implementations(
    args: Namespace | None,
    shows_order: bool,
) -> list[LayerImplementation]:
    """List the implementations of layers that are possible, the one of the arguments first."""
    named = getattr(args, "transformer_impl", None)
    if named is None:
        return [*_IMPLEMENTATIONS]
    is_engine = named != "local"
    is_grouped = is_engine and bool(getattr(args, "moe_grouped_gemm", False))
    of_args = LayerImplementation(is_engine, is_grouped, splits_down_projections=not is_engine)
    possible = [of_args]
    for other in _IMPLEMENTATIONS:
        has_same_layers = other.transformer_engine == is_engine
        is_same_order = has_same_layers and other.grouped_experts == is_grouped
        # A model can be made of other layers than the arguments name. Where the file shows the
        # order of parameters, the file decides.
        if other != of_args and (shows_order or is_same_order):
            possible.append(other)
    return possible


def _divisors(number: int) -> list[int]:
    divisors = []
    for size in range(1, number + 1):
        if number % size == 0:
            divisors.append(size)
    return divisors


def joined_tensor(
    model: RegisteredModel,
    name: str,
    slot: str,
    shards: Sequence[StoredShard],
) -> LazyTensor:
    """Join the shards that tensor-parallel ranks have of one slot of a parameter.

    Of a parameter that is not split they are copies, and the first one is used.

    Args:
        model: the model in the layout of the file.
        name: canonical name of the parameter.
        slot: slot of the optimizer, such as ``exp_avg``.
        shards: the shard of each tensor-parallel rank, in the order of the ranks.

    Raises:
        ValueError: if there are fewer shards than in the layout.
    """
    dim = model.layout.split_dim(name)
    num_shards = 1
    if dim is not None:
        num_shards = model.layout.num_splits(name)
    if num_shards > len(shards):
        raise ValueError(f"{name} is divided among {num_shards} ranks, but {len(shards)} have it")
    shape = model.shard(name).shape
    tensors = []
    for shard in shards[:num_shards]:
        tensors.append(_shard_tensor(shard, slot, shape))
    if num_shards == 1:
        return tensors[0]
    if dim == 1:
        return _side_by_side(tensors)
    if model.has_halves(name):
        return _with_halves_joined(tensors)
    return concatenate(tensors)


def _with_halves_joined(shards: Sequence[LazyTensor]) -> LazyTensor:
    """Join shards that consist of rows of a gate, followed by as many rows that it multiplies.

    With gate rows g0 to g3, other rows u0 to u3 and two ranks::

        rank 0: g0 g1 u0 u1     rank 1: g2 g3 u2 u3     whole: g0 g1 g2 g3 u0 u1 u2 u3
    """
    half = shards[0].num_rows // 2
    gates = [shard.rows(0, half) for shard in shards]
    others = []
    for shard in shards:
        others.append(shard.rows(half, 2 * half))
    return concatenate([*gates, *others])


def _side_by_side(shards: Sequence[LazyTensor]) -> LazyTensor:
    """Join matrices along dim 1."""
    rows, columns = shards[0].shape

    def read_rows(start: int, stop: int) -> torch.Tensor:
        parts = [shard.read_rows(start, stop) for shard in shards]
        return torch.cat(parts, dim=1)

    shape = (rows, columns * len(shards))
    return LazyTensor(shape, shards[0].dtype, read_rows)


def _shard_tensor(
    shard: StoredShard,
    slot: str,
    shape: Shape,
) -> LazyTensor:
    """Return a shard in its shape; the buffer has its elements row by row."""
    row = math.prod(shape[1:])

    def read_rows(start: int, stop: int) -> torch.Tensor:
        elements = shard.buffer.read(
            slot,
            location=shard.location,
            start=start * row,
            stop=stop * row,
        )
        return elements.reshape(stop - start, *shape[1:])

    return LazyTensor(shape, shard.buffer.slots[slot], read_rows)


def first_of_equal(
    name: str,
    slot: str,
    copies: Sequence[LazyTensor],
) -> LazyTensor:
    """Return the first of the copies that pipeline stages have of a parameter's slot.

    Reading it reads the others too, and raises a ValueError if they differ.

    Args:
        name: canonical name of the parameter, for the message.
        slot: slot of the optimizer, for the message.
        copies: the whole tensor as each of the stages has it.
    """
    first, *others = copies
    if not others:
        return first

    def read_rows(start: int, stop: int) -> torch.Tensor:
        rows = first.read_rows(start, stop)
        for other in others:
            if not torch.equal(rows, other.read_rows(start, stop)):
                raise ValueError(
                    f"the pipeline stages that share {name} have different copies of its {slot}"
                )
        return rows

    return LazyTensor(first.shape, first.dtype, read_rows)

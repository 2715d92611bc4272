# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's strategies of saves and loads in torch_dist.

That of a save is kept for saves of the same structure.
"""

from __future__ import annotations

import argparse
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from megatron.fsdp.engine.collectives import agree

Structure = list[tuple[Any, ...]]


class SaveStrategies:
    """The strategy of the save before.

    With --ckpt-assume-constant-structure it is used again, with the plans that it has kept, as long
    as every rank has the entries that it had. Megatron-Core itself does not compare them, and would
    write a changed structure under the old plan.
    """

    def __init__(self) -> None:
        self._strategy: Any = None
        self._structure: Structure = []
        self._group: weakref.ref[Any] | None = None

    def strategy(self, args: argparse.Namespace, content: dict[str, Any]) -> Any:
        """Return the strategy of a save; a collective.

        Args:
            args: of the run.
            content: of this rank, in Megatron-Core's sharded form.
        """
        if not args.ckpt_assume_constant_structure:
            return new_strategy(args)
        structure = structure_of(content)
        is_same_world = self._group is not None and self._group() is dist.group.WORLD
        is_kept = self._strategy is not None and is_same_world and structure == self._structure
        if agree([] if is_kept else ["changed"]):
            self._strategy = new_strategy(args)
        self._structure, self._group = structure, weakref.ref(dist.group.WORLD)
        return self._strategy

    def forget(self) -> None:
        """Forget the strategy, after a save that failed."""
        self._strategy = None


def new_strategy(args: argparse.Namespace) -> Any:
    """Return a strategy that has planned nothing yet.

    Ranks that have the same tensors share the work unless ``args.ckpt_fully_parallel_save`` is
    False: then the first of them writes all.
    """
    strategy = get_default_save_sharded_strategy("torch_dist")
    strategy.use_cached_ckpt_structure = args.ckpt_assume_constant_structure
    if not args.ckpt_fully_parallel_save:
        return strategy
    return FullyParallelSaveStrategyWrapper(
        strategy,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        do_cache_distribution=args.ckpt_assume_constant_structure,
    )


def load_strategy(args: argparse.Namespace, source: Path) -> Any:
    """Return the strategy of a load; None for Megatron-Core's own choice.

    With ``args.ckpt_fully_parallel_load``, of the data-parallel ranks that need the same tensor one
    reads it from ``source`` and sends it to the others.
    """
    if not args.ckpt_fully_parallel_load:
        return None
    return FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(source)),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def structure_of(content: dict[str, Any]) -> Structure:
    """Return key, dtype, shapes and place of every entry of this rank, without their content."""
    found: Structure = []
    for value in nested_values(content):
        if isinstance(value, ShardedTensor):
            shapes = (tuple(value.local_shape), tuple(value.global_shape))
            offsets = (tuple(value.global_offset), value.flattened_range)
            found.append((value.key, value.dtype, *shapes, *offsets, value.replica_id))
        elif isinstance(value, ShardedObject):
            found.append((value.unique_key, value.replica_id))
    return found

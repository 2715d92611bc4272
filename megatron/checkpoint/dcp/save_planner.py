# SPDX-License-Identifier: Apache-2.0
"""Planner for ``torch.distributed.checkpoint.save``: torch's own plans with less work.

torch's own planner sends every entry of every rank to the first one and back. DCP's plan caching is
not used: it keeps plans in the class of planners, for all runs of a process, and sends every rank
its entries of the merged plan.
"""

from __future__ import annotations

import dataclasses
import io
import math
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megatron.checkpoint.dcp import safe_pickle

_OVERHEAD = 1200
"""About the bytes that ``torch.save`` adds to the elements of a tensor, or writes for a number."""


class EvenPlanner(DefaultSavePlanner):
    """A planner that has every entry written once, and about as many bytes by each rank.

    Ranks send the first one their tensors and the names of their objects, and get back the
    positions of those that they write: the thousands of small objects of param groups are on every
    rank.

    Args:
        reuse: the plan of the save before, which is used again if it fits. By default no plan is
            kept.
        spreads: whether ranks that have the same entries share the work. Otherwise the first of
            them writes all of these.
    """

    def __init__(self, reuse: PlanReuse | None = None, spreads: bool = True):
        super().__init__()
        self._reuse = reuse
        self._spreads = spreads

    def own_entries(self) -> tuple[list[WriteItem], dict[str, Any] | None]:
        """Return the items that this rank could write, and the paths of keys in a nested dict."""
        plan = super().create_local_plan()
        return plan.items, plan.planner_data

    def create_local_plan(self) -> SavePlan:
        """Return the tensors of this rank as items, and the paths of all entries."""
        items, self._paths = self.own_entries()
        self._own_items = sorted(items, key=lambda item: item.type == WriteItemType.BYTE_IO)
        if self._reuse is not None:
            unchanged = self._reuse.unchanged(self._own_items, self._paths)
            if unchanged is not None:
                return SavePlan([], planner_data=unchanged)
        tensors = []
        objects = []
        for item in self._own_items:
            if item.type == WriteItemType.BYTE_IO:
                objects.append(item.index.fqn)
            else:
                tensors.append(item)
        return SavePlan(tensors, planner_data=_LocalEntries(objects, self._paths))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Choose the rank that writes each entry; called on the first rank.

        Returns:
            For each rank the positions of its items that it writes, and the metadata of all.

        Raises:
            ValueError: if the chunks of a tensor overlap or do not make it up.
        """
        if self._reuse is not None:
            kept = self._reuse.metadata_of(all_plans)
            if kept is not None:
                self.metadata = kept
                return all_plans, kept
            all_plans = self._reuse.whole(all_plans)
        objects = _Items()
        items_of_ranks = []
        for plan in all_plans:
            items_of_objects = [objects[key] for key in plan.planner_data.objects]
            items_of_ranks.append(plan.items + items_of_objects)
        chosen = assign(items_of_ranks, self._spreads)
        plans = []
        for items, positions in zip(items_of_ranks, chosen):
            plans.append(SavePlan([items[position] for position in positions]))
        plans, metadata = create_default_global_save_plan(plans, rewrite_index_hints=False)
        paths: dict[str, Any] = {}
        for plan in all_plans:
            for key, path in (plan.planner_data.paths or {}).items():
                paths.setdefault(key, path)
        metadata = dataclasses.replace(metadata, planner_data=paths or None)
        # A list of errors; torch 2.10 logs them, and returns True without any.
        problems: Any = _validate_global_plan(plans, metadata)
        if problems not in ([], True):
            found = "; ".join(problems or ["torch has logged what is wrong"])
            raise ValueError(f"the ranks do not have each tensor once: {found[:500]}")
        self.global_plan = plans
        self.metadata = metadata
        save = ""
        if self._reuse is not None:
            save = self._reuse.keep_all(all_plans, metadata)
        answers = []
        for positions in chosen:
            answers.append(SavePlan([], planner_data=ChosenItems(positions, save)))
        return answers, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the items that this rank writes."""
        answer = new_plan.planner_data
        if isinstance(answer, ChosenItems):
            positions = answer.positions
            if self._reuse is not None:
                self._reuse.keep(self._own_items, self._paths, answer)
        else:
            assert self._reuse is not None  # nothing else lets a plan be unchanged
            positions = self._reuse.positions()
        items = [self._own_items[position] for position in positions]
        self.plan = SavePlan(items, storage_data=new_plan.storage_data)
        return self.plan

    def transform_object(
        self,
        write_item: WriteItem,
        object: Any,
    ) -> torch.Tensor | io.BytesIO:
        """Return a tensor, or the pickle of an object."""
        if write_item.type == WriteItemType.BYTE_IO and safe_pickle.is_scalar(object):
            return io.BytesIO(safe_pickle.save_torch(object))
        data: torch.Tensor | io.BytesIO = super().transform_object(write_item, object)
        return data


@dataclass(frozen=True)
class _LocalEntries:
    """The entries of a rank, other than tensors.

    Attributes:
        objects: keys of the rank's objects.
        paths: key of every entry -> path in the nested dict; None for flat keys.
    """

    objects: list[str]
    paths: dict[str, Any] | None


class _Items(dict[str, WriteItem]):
    """The items of objects, by key: one for all ranks."""

    def __missing__(self, key: str) -> WriteItem:
        self[key] = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        return self[key]


def assign(
    items_of_ranks: Sequence[Sequence[WriteItem]],
    spreads: bool,
) -> list[list[int]]:
    """Choose for each item one of the ranks that have it.

    Items of one rank alone are its own. The others, from the largest to the smallest, go to the
    rank that has the fewest bytes until then, or to the first rank that has them.

    Args:
        items_of_ranks: the items that each rank could write.
        spreads: whether to let ranks have about as many bytes.

    Returns:
        The positions of the items that each rank writes, in order.
    """
    candidates: dict[Any, list[tuple[int, int]]] = {}
    sizes = {}
    for rank, items in enumerate(items_of_ranks):
        for position, item in enumerate(items):
            key = (item.index.fqn, item.index.offset)
            candidates_of_key = candidates.setdefault(key, [])
            candidates_of_key.append((rank, position))
            sizes[key] = _num_bytes(item)
    num_bytes = [0] * len(items_of_ranks)
    chosen: list[list[int]] = [[] for _ in items_of_ranks]

    def order(key: Any) -> tuple[bool, int]:
        return len(candidates[key]) > 1, -sizes[key]

    for key in sorted(sizes, key=order):
        owners = candidates[key]
        if not spreads:
            owners = owners[:1]
        rank, position = min(owners, key=lambda owner: num_bytes[owner[0]])
        num_bytes[rank] += sizes[key]
        chosen[rank].append(position)
    return [sorted(positions) for positions in chosen]


def _num_bytes(item: WriteItem) -> int:
    """Return about the bytes of an item in a file.

    ``WriteItem.tensor_storage_size`` counts the whole tensor for each of its chunks.
    """
    data = item.tensor_data
    if data is None or data.chunk is None:
        return _OVERHEAD
    numel = math.prod(data.chunk.sizes)
    itemsize = data.properties.dtype.itemsize
    return _OVERHEAD + numel * itemsize


# ---- plans that later saves of the same structure use again


@dataclass(frozen=True)
class UnchangedPlan:
    """A reference that a rank sends instead of its entries, if they have not changed.

    Attributes:
        save: identifier of the plan with the same entries.
    """

    save: str


@dataclass(frozen=True)
class ChosenItems:
    """The items that a rank writes.

    Attributes:
        positions: positions among the items that the rank could write.
        save: identifier of the plan that all ranks keep; empty if none is kept.
    """

    positions: list[int]
    save: str


@dataclass
class _OfRank:
    """The plan of a rank, which every rank keeps.

    Attributes:
        group: the default process group of the save.
        items: the items that the rank could write.
        paths: paths of keys in a nested dict.
        chosen: the items that it writes.
    """

    group: weakref.ref[Any]
    items: list[WriteItem]
    paths: Any
    chosen: ChosenItems


@dataclass
class _OfFirstRank:
    """The plans of all ranks, which the first rank keeps.

    Attributes:
        save: identifier of the plan.
        plans: plan of each rank, with all of its entries.
        metadata: metadata of all entries.
    """

    save: str
    plans: list[SavePlan]
    metadata: Metadata


class PlanReuse:
    """The plan of the save before."""

    def __init__(self) -> None:
        self._kept: _OfRank | None = None
        self._kept_of_all: _OfFirstRank | None = None

    def forget(self) -> None:
        """Forget the plan: after a save that failed, ranks may have kept different ones."""
        self._kept = self._kept_of_all = None

    # ---- on every rank

    def unchanged(self, items: list[WriteItem], paths: Any) -> UnchangedPlan | None:
        """Return the reference to the kept plan; None if the entries of this rank have changed."""
        kept = self._kept
        if kept is None or kept.group() is not dist.group.WORLD:
            return None
        if kept.items != items or kept.paths != paths:
            return None
        return UnchangedPlan(kept.chosen.save)

    def keep(
        self,
        items: list[WriteItem],
        paths: Any,
        chosen: ChosenItems,
    ) -> None:
        """Keep the plan of this rank.

        Args:
            items: the items that this rank could write.
            paths: paths of keys in a nested dict; None for flat keys.
            chosen: the items of these that it writes.
        """
        self._kept = _OfRank(weakref.ref(dist.group.WORLD), items, paths, chosen)

    def positions(self) -> list[int]:
        """Return the positions of the items that this rank writes, in an unchanged plan."""
        assert self._kept is not None  # the rank has sent an UnchangedPlan
        return self._kept.chosen.positions

    # ---- on the first rank

    def metadata_of(self, plans: Sequence[SavePlan]) -> Metadata | None:
        """Return the metadata of the save before if all ranks have the same plans as then."""
        if self._kept_of_all is None:
            return None
        for plan in plans:
            if plan.planner_data != UnchangedPlan(self._kept_of_all.save):
                return None
        return dataclasses.replace(self._kept_of_all.metadata)

    def whole(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """Return the plans with all entries.

        Raises:
            ValueError: if a rank refers to a plan that this rank does not have.
        """
        found = []
        for rank, plan in enumerate(plans):
            if isinstance(plan.planner_data, UnchangedPlan):
                if self._kept_of_all is None or plan.planner_data.save != self._kept_of_all.save:
                    raise ValueError(f"rank {rank} refers to the plan of another save")
                plan = self._kept_of_all.plans[rank]
            found.append(plan)
        return found

    def keep_all(self, plans: list[SavePlan], metadata: Metadata) -> str:
        """Keep the plans of all ranks, with all entries, and return an identifier of them."""
        self._kept_of_all = _OfFirstRank(uuid.uuid4().hex, plans, dataclasses.replace(metadata))
        return self._kept_of_all.save

# SPDX-License-Identifier: Apache-2.0
"""Plans of a save that later saves of the same structure use again.

A rank whose entries are those of the save before sends the first rank one word instead of all of
them. If all ranks do, nothing is planned, and the first rank describes nothing anew. DCP's own plan
caching is not used: it keeps plans in the class of planners, for all runs of a process, and sends
every rank its entries of the merged plan.
"""

from __future__ import annotations

import dataclasses
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem


@dataclass(frozen=True)
class UnchangedPlan:
    """The word that stands for the entries of a rank if they are those of the save before."""

    save: str
    """Identifier of the plan."""


@dataclass(frozen=True)
class ChosenItems:
    """The positions of the items that a rank writes, in the plan that is kept as ``save``."""

    positions: list[int]
    save: str


@dataclass
class _OfRank:
    """The plan of a rank, which every rank keeps."""

    group: weakref.ref[Any]
    items: list[WriteItem]
    paths: Any
    chosen: ChosenItems


@dataclass
class _OfFirstRank:
    """The plans of all ranks, which the first rank keeps."""

    save: str
    plans: list[SavePlan]
    metadata: Metadata


class PlanReuse:
    """The plan of the save before."""

    def __init__(self) -> None:
        self._own: _OfRank | None = None
        self._all: _OfFirstRank | None = None

    def forget(self) -> None:
        """Forget the plan: after a save that failed, ranks may have kept different ones."""
        self._own = self._all = None

    # ---- on every rank

    def unchanged(self, items: list[WriteItem], paths: Any) -> UnchangedPlan | None:
        """Return what stands for the entries of this rank, None if they are others than before.

        Args:
            items: of this rank.
            paths: key -> path in the nested dict.
        """
        own = self._own
        if own is None or own.group() is not dist.group.WORLD:
            return None
        same = own.items == items and own.paths == paths
        return UnchangedPlan(own.chosen.save) if same else None

    def keep(self, items: list[WriteItem], paths: Any, chosen: ChosenItems) -> None:
        """Keep the plan of this rank."""
        self._own = _OfRank(weakref.ref(dist.group.WORLD), items, paths, chosen)

    def positions(self) -> list[int]:
        """Return the positions of the items that this rank writes, in an unchanged plan."""
        assert self._own is not None  # the rank has said that its plan is unchanged
        return self._own.chosen.positions

    # ---- on the first rank

    def metadata_of(self, plans: Sequence[SavePlan]) -> Metadata | None:
        """Return the metadata of the save before if the plans of all ranks are those of it."""
        if self._all is None:
            return None
        same = UnchangedPlan(self._all.save)
        if any(plan.planner_data != same for plan in plans):
            return None
        return dataclasses.replace(self._all.metadata)

    def whole(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """Return the plans with all entries.

        Raises:
            ValueError: if a rank refers to a plan that this rank does not have.
        """
        found = []
        for rank, plan in enumerate(plans):
            if isinstance(plan.planner_data, UnchangedPlan):
                if self._all is None or plan.planner_data.save != self._all.save:
                    raise ValueError(f"rank {rank} refers to the plan of another save")
                plan = self._all.plans[rank]
            found.append(plan)
        return found

    def keep_all(self, plans: list[SavePlan], metadata: Metadata) -> str:
        """Keep the plans of all ranks, with all entries, and return an identifier of them."""
        self._all = _OfFirstRank(uuid.uuid4().hex, plans, dataclasses.replace(metadata))
        return self._all.save

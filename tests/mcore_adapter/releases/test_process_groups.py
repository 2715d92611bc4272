# SPDX-License-Identifier: Apache-2.0
"""The separate group for all-gathers is found, or made where a release does not create it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megatron.mcore_adapter.releases import process_groups
from tests.support.rank_pool import run_ranks


def groups_of_pairs() -> tuple[list[int], bool, bool]:
    """Job: make the group of this rank's pair, and ask for it again."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    with patch.object(process_groups, "accepts", lambda function, name: False):
        made = process_groups.all_gather_group(None, mine)
        again = process_groups.all_gather_group(None, mine)
    dist.barrier(made)
    return dist.get_process_group_ranks(made), made is again, made is mine


def test_a_group_of_the_same_ranks_is_made_once() -> None:
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert run_ranks(4, groups_of_pairs) == [(pair, True, False) for pair in pairs]


def test_the_group_of_a_collection_comes_first() -> None:
    group: Any = object()
    collection = SimpleNamespace(dp_cp_ag=group)
    assert process_groups.all_gather_group(collection, group) is group

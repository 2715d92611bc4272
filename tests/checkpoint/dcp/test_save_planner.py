# SPDX-License-Identifier: Apache-2.0
"""Plans for what ranks save together."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron.checkpoint.dcp.save_planner import EvenPlanner

Rows = tuple[int, int]


def plans_of(*chunks: Rows) -> list[SavePlan]:
    """Return the plan of each rank for a tensor of four, of which it has (first, number)."""
    plans = []
    for first, number in chunks:
        offset, size = torch.Size([first]), torch.Size([number])
        data = TensorWriteData(
            ChunkStorageMetadata(offset, size), TensorProperties(torch.float32), torch.Size([4])
        )
        item = WriteItem(MetadataIndex("weight", offset), WriteItemType.SHARD, tensor_data=data)
        plans.append(SavePlan([item], planner_data=SimpleNamespace(objects=[], paths=None)))
    return plans


def test_chunks_that_make_up_a_tensor_are_saved() -> None:
    _, metadata = EvenPlanner().create_global_plan(plans_of((0, 1), (1, 3)))
    chunks = metadata.state_dict_metadata["weight"].chunks
    assert [chunk.sizes for chunk in chunks] == [torch.Size([1]), torch.Size([3])]


@pytest.mark.parametrize("second", [(2, 3), (2, 1), (1, 2)], ids=["outside", "gap", "overlap"])
def test_chunks_that_do_not_make_up_a_tensor_are_refused(second: Rows) -> None:
    with pytest.raises(ValueError, match="the ranks do not have each tensor once"):
        EvenPlanner().create_global_plan(plans_of((0, 2), second))

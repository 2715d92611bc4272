# SPDX-License-Identifier: Apache-2.0
"""Differences between what a load asks for and what a file has."""

import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from megatron.mcore_adapter.file_differences import FileDifferences

STORED = {"model.weight": TensorStorageMetadata(TensorProperties(), torch.Size([2, 3]), [])}


def between(*keys: str, rows: int = 2) -> FileDifferences:
    asked = {"model.weight": torch.ones(rows, 3), **dict.fromkeys(keys, 0)}
    return FileDifferences.between(asked, STORED, "in the model")


def test_differences_are_told_by_shape_and_key() -> None:
    assert between("optimizer.step", rows=4).problems() == [
        "other shapes: model.weight: (2, 3) in the file, (4, 3) in the model",
        "not in the file: optimizer.step",
    ]
    assert between("optimizer.step").problems(is_partial=True) == []
    assert between("rng_state.rank_7").concern_random_state
    assert not between("optimizer.step", rows=4).concern_random_state

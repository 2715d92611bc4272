# SPDX-License-Identifier: Apache-2.0
"""Validation on whole datasets: each sample once, also where ranks cannot share them equally.

All ranks must run the same number of microbatches, as they gather weights together. So a dataset is
followed by samples without loss up to the end of the last microbatch of every rank.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset


class WholeDataset(Dataset):
    """The samples of a dataset, followed by copies of its first one whose tokens do not count.

    Args:
        dataset: of samples with a `loss_mask`.
        args: of the run.
        num_ranks: data-parallel ranks, which read different samples.

    Attributes:
        num_microbatches: of each rank, in every pass over a global batch. The last is shorter,
            except in interleaved pipelines, which need full rounds of stages.
    """

    def __init__(self, dataset: Any, args: argparse.Namespace, num_ranks: int) -> None:
        self._dataset = dataset
        stride = args.micro_batch_size * num_ranks
        per_batch = args.global_batch_size // stride
        # Example: 21 samples, 2 ranks, microbatches of 2, global batches of 8: 6 strides of 4, so
        # passes of 2, 2 and 2 microbatches, and 3 samples of padding.
        strides = -(-len(dataset) // stride)
        if args.virtual_pipeline_model_parallel_size:
            strides = -(-strides // per_batch) * per_batch
        whole, rest = divmod(strides, per_batch)
        self.num_microbatches = [per_batch] * whole + [rest] * (rest > 0)
        self._length = strides * stride

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self._dataset):
            return self._dataset[index]
        sample = dict(self._dataset[0])
        return sample | {"loss_mask": torch.zeros_like(sample["loss_mask"])}


def named_sets(args: argparse.Namespace, valid_data: Any) -> dict[str, Any]:
    """Return the validation sets by the names under which their losses are reported."""
    if not args.multiple_validation_sets:
        return {"validation": valid_data}
    return {f"validation-{number}": dataset for number, dataset in enumerate(valid_data)}

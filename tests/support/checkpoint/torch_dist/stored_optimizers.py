# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with the optimizer state that their run had, as written by Megatron-Core."""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core import spelling
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.dcp.chunk import Chunk
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from megatron.checkpoint.torch_dist.optimizer_layouts import OptimizerTensors, read_optimizer
from tests.support.checkpoint.written_by_megatron_core import State, write
from tests.support.pretrain.parity import (
    ALLTOALL,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MLA,
    MOE,
    MOE_SHARED,
    MTP,
    Combination,
)
from tests.support.rank_pool import run_ranks


class File:
    """A checkpoint opened for `read_optimizer`, with parts that a test may change."""

    def __init__(self, folder: Path) -> None:
        self.stored = StoredCheckpoint(next(folder.glob("iter_*")))
        self.common = torch_dist.read_common(self.stored)
        self.weights = {}
        for key in self.stored.tensors:
            if "optimizer." not in key:
                for name, index in spelling.unstacked(key, self.stored.shape(key)):
                    self.weights[name] = self.stored.lazy(key, index)
        self.boxes: list[int] = []
        """Elements of every read."""
        read_chunk = self.stored.read_chunk

        def recording(key: str, chunk: Chunk) -> torch.Tensor:
            self.boxes.append(chunk.numel)
            return read_chunk(key, chunk)

        self.stored.read_chunk = recording

    def read(self) -> OptimizerTensors:
        return read_optimizer(self.stored, self.common, self.weights)

    def without_arguments(self, *names: str) -> "File":
        """Return a copy whose `args` lack some names."""
        changed = copy.copy(self)
        args = {
            name: value for name, value in vars(self.common["args"]).items() if name not in names
        }
        changed.common = {**self.common, "args": argparse.Namespace(**args)}
        return changed


def assert_is(found: OptimizerTensors, weights: dict[str, LazyTensor], expected: State) -> None:
    """Compare bitwise, whole and by rows; without main weights the model's are compared."""
    for slot in ("param", "exp_avg", "exp_avg_sq"):
        main = found.main or weights
        tensors = (
            main
            if slot == "param"
            else {name: slots[slot] for name, slots in found.moments.items()}
        )
        assert set(tensors) >= set(expected[slot])
        assert tensors is weights or set(tensors) == set(expected[slot])
        for name, value in expected[slot].items():
            assert tensors[name].shape == tuple(value.shape) and tensors[name].dtype == value.dtype
            assert torch.equal(tensors[name].read(), value), (slot, name)
            start, stop = len(value) // 3, max(len(value) - 1, 1)
            assert torch.equal(tensors[name].read_rows(start, stop), value[start:stop]), (
                slot,
                name,
            )


DISTRIBUTED = "--bf16 --use-distributed-optimizer"
BUCKETS = f"{DISTRIBUTED} --overlap-grad-reduce --ddp-bucket-size 5000"
ZERO = "dp_zero_gather_scatter"
GATED_SHARED = f"{MOE_SHARED} --moe-shared-expert-gate"

RUNS = {
    "buckets of tp2 dp2": (Combination(4, "tp2", 0, LLAMA, BUCKETS), None),
    "buckets of pp2 dp2 with tied embeddings": (Combination(4, "pp2", 0, GPT2, BUCKETS), None),
    "buckets of ep2 dp2": (Combination(4, "ep2", 0, ALLTOALL, BUCKETS), None),
    "buckets of tp2 ep2 with whole experts": (
        Combination(4, "tp2 sp ep2 etp1", 0, ALLTOALL, DISTRIBUTED),
        None,
    ),
    "buckets of tp2 ep2 etp2": (Combination(4, "tp2 sp ep2 etp2", 0, MOE, DISTRIBUTED), None),
    "buckets of fp16 and experts without an optimizer of their own": (
        Combination(
            2, "", 0, GATED_SHARED, "--fp16 --use-distributed-optimizer --initial-loss-scale 4096"
        ),
        None,
    ),
    "buckets of an uneven pipeline": (
        Combination(
            2, "pp2", 0, LLAMA, f"{DISTRIBUTED} --decoder-first-pipeline-num-layers 1", layers=3
        ),
        None,
    ),
    "buckets of a pipeline with its own layout": (
        Combination(
            2,
            "pp2",
            0,
            LLAMA,
            f"{DISTRIBUTED} --pipeline-model-parallel-layout Et|t*2|t|L",
            layers=4,
        ),
        None,
    ),
    "buckets of predicting layers in pp2": (
        Combination(2, "pp2", 0, f"{LLAMA} {MTP}", DISTRIBUTED),
        None,
    ),
    "buckets of tp2 latent attention": (
        Combination(2, "tp2", 0, f"{MLA} --qk-layernorm", DISTRIBUTED),
        None,
    ),
    "buckets of pp2 ep2 dense and expert layers": (
        Combination(4, "pp2 ep2", 0, DEEPSEEK, DISTRIBUTED, layers=4),
        None,
    ),
    "objects of tp2 dp2": (Combination(4, "tp2", 0, LLAMA, BUCKETS), ZERO),
    # Buckets that end with biases or with 101 rows of embeddings, which are no multiples of the
    # alignment.
    "objects of pp2 vpp2 dp2 with tied embeddings": (
        Combination(
            4, "pp2 vpp2", 0, GPT2, f"{BUCKETS} --ddp-bucket-size 90 --vocab-size 100", layers=4
        ),
        ZERO,
    ),
    "objects of ep2": (Combination(2, "ep2", 0, ALLTOALL, DISTRIBUTED), ZERO),
    "fully reshardable tp2 pp2": (
        Combination(4, "tp2 pp2", 0, LLAMA, f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"),
        None,
    ),
    "not distributed, fp32": (Combination(2, "", 0, GPT2), None),
    "not distributed, bf16, ep2": (Combination(2, "ep2", 0, ALLTOALL, "--bf16"), None),
}


def written(
    run: Combination, folder: Path, layout: str | None = None, job: Callable[..., Any] = write
) -> State:
    """Two steps and a checkpoint; what the optimizer had."""
    return run_ranks(
        run.ranks, job, f"{run.line} --save {folder} --save-interval 2 --train-iters 2", layout
    )[0]

# SPDX-License-Identifier: Apache-2.0
"""Corpora and samples of numbers, and the arguments of short runs that read them."""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron.pretrain.data.corpus import write_corpus
from megatron.pretrain.data.samplers import MicrobatchSampler, build_iterator
from megatron.pretrain.data.tokenizers import NullTokenizer
from tests.support.pretrain.arguments.command_lines import MOCK, parse

NUMBERS = NullTokenizer(100)


@cache
def arguments() -> dict[str, Any]:
    """Return the arguments of a command line, without its data."""
    return vars(parse(MOCK)[0]) | {"mock_data": False, "num_workers": 0}


def namespace(**given: Any) -> argparse.Namespace:
    """Return arguments for ten steps of eight samples, but for what is given."""
    run = {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": 8, "seq_length": 16}
    run |= {"eval_iters": 2, "eval_interval": 5, "create_attention_mask_in_dataloader": False}
    return argparse.Namespace(**{**arguments(), **run, **given})


def write_numbers(prefix: Path, documents: list[list[int]]) -> str:
    source = Path(f"{prefix}.jsonl")
    source.write_text(
        "".join(json.dumps({"text": " ".join(map(str, ids))}) + "\n" for ids in documents)
    )
    write_corpus([source], prefix, NUMBERS)
    return str(prefix)


class NumberedSamples(torch.utils.data.Dataset):
    """Sample i holds the number i, so that a batch tells which samples it was made of."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"tokens": torch.full((1,), index), "loss_mask": torch.ones(1), "dataset_id": 0}


def microbatches(
    dataset: Any, args: argparse.Namespace, consumed: int = 0, rank: int = 0, ranks: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    sampler = MicrobatchSampler(
        num_samples=len(dataset),
        consumed_samples=consumed,
        micro_batch_size=args.micro_batch_size,
        rank=rank,
        num_ranks=ranks,
        shuffle_seed=args.seed if args.dataloader_type == "cyclic" else None,
    )
    return build_iterator(dataset, sampler, args.seed, args.num_workers)

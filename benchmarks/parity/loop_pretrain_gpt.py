# SPDX-License-Identifier: Apache-2.0
"""A program for Megatron-LM's loop on random tokens, started like `pretrain_gpt.py` of a checkout.

A launcher has installed the drop-in: `python -m megatron.mcore_adapter loop_pretrain_gpt.py ...`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.mcore_adapter.megatron_lm import gpt_program


class RandomTokens(Dataset):
    """Samples that follow from their index."""

    def __init__(self, num_samples: int, length: int, vocab_size: int):
        self._num_samples, self._length, self._vocab_size = num_samples, length, vocab_size

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        square = torch.ones(1, self._length, self._length, dtype=torch.bool)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
            "attention_mask": square.triu(diagonal=1),
        }


def build_datasets(args: Any, num_samples: Sequence[int]) -> list[RandomTokens | None]:
    return [
        RandomTokens(each, args.seq_length, args.vocab_size) if each else None
        for each in num_samples
    ]


if __name__ == "__main__":
    gpt_program.run(build_datasets)

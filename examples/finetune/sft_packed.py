# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning by pretrain_gpt.py: whole conversations in a sample, loss on answers only.

A document is a prompt, a line feed, and an answer, in bytes. No attention crosses from one to
another, which needs --transformer-impl local. sft_packed.sh makes data and a model, and runs this.
"""

from pretrain_gpt import main  # first: it prepares for what Megatron-Core says when imported

# isort: split
import sys
from typing import Any

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor
from torch.utils.data import Dataset

END_OF_PROMPT = ord("\n")


class Packs(Dataset):
    """Samples of ``length`` tokens: as many whole conversations as fit, and longer ones cut."""

    def __init__(self, prefix: str, length: int, padding: int):
        self.length, self.padding = length, padding
        self.packs: list[list[Tensor]] = []
        room = 0
        for document in IndexedDataset(prefix):
            conversation = torch.tensor(document.astype("int64"))[: length + 1]
            if room < len(conversation) - 1:
                self.packs.append([])
                room = length
            self.packs[-1].append(conversation)
            room -= len(conversation) - 1  # inputs; each has the next token as its label

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rest = self.length + 1 - sum(len(part) - 1 for part in self.packs[index])
        parts = [*self.packs[index], torch.full((rest,), self.padding)]
        owner = torch.cat([torch.full((len(part) - 1,), n) for n, part in enumerate(parts)])
        answers = torch.cat([(part == END_OF_PROMPT).cumsum(0)[:-1] for part in parts]) > 0
        return {
            "tokens": torch.cat([part[:-1] for part in parts]),
            "labels": torch.cat([part[1:] for part in parts]),
            "position_ids": torch.cat([torch.arange(len(part) - 1) for part in parts]),
            "loss_mask": answers.float(),
            "attention_mask": ~(owner[:, None] == owner).tril()[None],
        }


def build(args: Any, tokenizer: Any, source: Any) -> tuple[Any, Any, Any]:
    (prefix,) = source.prefixes()  # one data set, not a blend
    return Packs(prefix, args.seq_length, tokenizer.eod), None, None


if __name__ == "__main__":
    sys.exit(main(build))

# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle data: documents cut in three and put together so that the middle comes last.

A part of a document becomes, in the order "prefix, suffix, middle" or "suffix, prefix, middle",

    <prefix> prefix <suffix> suffix <middle> middle
    <prefix> <suffix> suffix <middle> prefix middle

(Bavarian et al., Efficient Training of Language Models to Fill in the Middle). The wheel of
Megatron-Core has no such dataset, so this is ours, with the flags of Megatron-LM's. Unlike there, a
sample follows from its number alone: neither workers nor a resumed run change it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron.pretrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillInTheMiddle:
    """The settings of fill-in-the-middle data, with the ids of its tokens."""

    rate: float
    """Probability that a document of a sample is rearranged."""
    suffix_first_rate: float
    """Probability that one that is rearranged begins with its suffix."""
    prefix: int
    middle: int
    suffix: int
    pad: int
    """Fills samples that became shorter; no loss is counted on it."""
    end_of_document: int
    split: int | None = None
    """Token that cuts documents into fragments, of which each may be rearranged."""
    fragment_rate: float = 0.0
    """Probability that a fragment of a document that is rearranged is."""
    not_after: str | None = None
    """Documents or fragments that begin with this text stay as they are."""

    @classmethod
    def of(cls, args: argparse.Namespace, tokenizer: Tokenizer) -> FillInTheMiddle:
        """Take the settings from the arguments of a run.

        Raises:
            ValueError: lists the tokens that the vocabulary does not have.
        """
        tokens = {
            "prefix": args.fim_prefix_token,
            "middle": args.fim_middle_token,
            "suffix": args.fim_suffix_token,
            "pad": args.fim_pad_token,
            "end_of_document": args.fim_eod_token,
        }
        if args.fim_split_sample is not None:
            tokens["split"] = args.fim_split_sample
        ids, problems = {}, []
        for name, token in tokens.items():
            try:
                ids[name] = tokenizer.token_id(token)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("--fim-data: " + "; ".join(problems))
        return cls(
            rate=args.fim_rate,
            suffix_first_rate=args.fim_spm_rate,
            fragment_rate=args.fim_fragment_rate or 0.0,
            not_after=args.fim_no_prefix,
            **ids,
        )

    def rearranged(
        self, sample: np.ndarray, tokenizer: Tokenizer, generator: np.random.Generator
    ) -> np.ndarray:
        """Rearrange the documents of a sample.

        Args:
            sample: token ids of shape ``[length]``.
            tokenizer: makes the text of tokens, which is cut between characters.
            generator: decides.

        Returns:
            As many ids, int64: cut off, or filled with ``pad``.
        """
        parts: list[np.ndarray] = []
        for document, end in _pieces(sample, self.end_of_document):
            parts += [self._document(document, tokenizer, generator), end]
        result = np.concatenate(parts).astype(np.int64)[: len(sample)]
        padding = np.full(len(sample) - len(result), self.pad, dtype=np.int64)
        return np.concatenate([result, padding])

    def _document(
        self, ids: np.ndarray, tokenizer: Tokenizer, generator: np.random.Generator
    ) -> np.ndarray:
        if not len(ids) or generator.random() >= self.rate:
            return ids
        if self.split is None or self.split not in ids:
            return self._in_three(ids, tokenizer, generator)
        parts: list[np.ndarray] = []
        for fragment, end in _pieces(ids, self.split):
            if len(fragment) and generator.random() < self.fragment_rate:
                fragment = self._in_three(fragment, tokenizer, generator)
            parts += [fragment, end]
        return np.concatenate(parts)

    def _in_three(
        self, ids: np.ndarray, tokenizer: Tokenizer, generator: np.random.Generator
    ) -> np.ndarray:
        """Cut the text of some tokens at two places, and put the middle last."""
        text = tokenizer.detokenize(ids.tolist())
        if self.not_after is not None and text.startswith(self.not_after):
            return ids
        first, second = sorted(generator.integers(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            tokenizer.tokenize(part) for part in (text[:first], text[first:second], text[second:])
        )
        if generator.random() < self.suffix_first_rate:
            return np.r_[self.prefix, self.suffix, suffix, self.middle, prefix, middle]
        return np.r_[self.prefix, prefix, self.suffix, suffix, self.middle, middle]


def _pieces(ids: np.ndarray, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the pieces between tokens ``end``, each with the token after it or nothing."""
    start = 0
    for position in np.flatnonzero(ids == end).tolist():
        yield ids[start:position], ids[position : position + 1]
        start = position + 1
    yield ids[start:], ids[:0]


@dataclass
class FillInTheMiddleConfig(GPTDatasetConfig):
    """Megatron-Core's settings of a GPT dataset, with those of its rearrangement."""

    fill_in_the_middle: FillInTheMiddle | None = None


class FillInTheMiddleDataset(GPTDataset):
    """Samples of a GPT dataset, rearranged; its config is a :class:`FillInTheMiddleConfig`."""

    config: FillInTheMiddleConfig

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Return a sample as GPTDataset does, without loss on padding."""
        sample = super().__getitem__(idx)
        assert self.config.fill_in_the_middle is not None
        mask = sample["loss_mask"].clone()
        mask[sample["labels"] == self.config.fill_in_the_middle.pad] = 0.0
        return sample | {"loss_mask": mask}

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """Return the token ids of a sample, rearranged, and what the base class says of it."""
        text, *rest = super()._query_document_sample_shuffle_indices(idx)
        settings = self.config.fill_in_the_middle
        assert settings is not None
        split = self.index_split.value
        generator = np.random.default_rng([self.config.random_seed, split, int(idx)])
        return settings.rearranged(text, self.config.tokenizer, generator), *rest

# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and padded vocabularies with defaults for what a test does not name."""

from argparse import Namespace
from typing import Any

from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    build_tokenizer,
    embedding_rows,
)

BYTES = ByteTokenizer()


def tokenizer_with(
    tokenizer_type: str | None = "NullTokenizer",
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    **settings: Any,
) -> Tokenizer:
    return build_tokenizer(TokenizerChoice(tokenizer_type, tokenizer_model, vocab_size, **settings))


def rows_of_bytes(
    padded_size: int | None = None,
    vocab_size: int | None = None,
    divisible_by: int = 128,
    tensor_size: int = 1,
) -> int:
    """Return the rows of the embedding with ByteTokenizer."""
    arguments = Namespace(
        padded_vocab_size=padded_size,
        vocab_size=vocab_size,
        make_vocab_size_divisible_by=divisible_by,
        tensor_model_parallel_size=tensor_size,
    )
    return embedding_rows(arguments, BYTES)

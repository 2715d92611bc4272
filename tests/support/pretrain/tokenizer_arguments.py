# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and padded vocabularies with defaults for what a test does not name."""

from typing import Any

from megatron.pretrain.data.tokenizer import ByteTokenizer, Tokenizer, padded_vocab_size
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice, build_tokenizer

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
    return padded_vocab_size(
        BYTES,
        padded_size=padded_size,
        vocab_size=vocab_size,
        divisible_by=divisible_by,
        tensor_size=tensor_size,
    )

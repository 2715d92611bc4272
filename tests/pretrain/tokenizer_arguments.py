# SPDX-License-Identifier: Apache-2.0
"""Arguments of tokenizers."""

import argparse
from typing import Any

from megatron.pretrain.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def namespace(**given_arguments: Any) -> argparse.Namespace:
    defaults = dict(
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        vocab_size=None,
        padded_vocab_size=None,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
    )
    return argparse.Namespace(**{**defaults, **given_arguments})

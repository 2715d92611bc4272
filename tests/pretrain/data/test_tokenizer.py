# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and the padded vocabulary."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretrain.data.library_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from tests.support.pretrain.tokenizer_arguments import BYTES, rows_of_bytes, tokenizer_with


@given(st.text())
def test_byte_tokens_are_the_bytes_of_the_text(text: str) -> None:
    ids = BYTES.tokenize(text)
    assert ids.tolist() == list(text.encode())
    assert BYTES.detokenize(np.append(ids, BYTES.eod)) == text


def test_null_tokens_are_the_numbers_in_the_text_and_eod_comes_last() -> None:
    tokenizer = tokenizer_with(vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("3 99\n7").tolist() == [3, 99, 7]
    assert tokenizer.detokenize([3, 99, 100]) == "3 99"
    with pytest.raises(ValueError, match="reads numbers"):
        tokenizer.tokenize("three")
    with pytest.raises(ValueError, match="ids 0 to 100, but the text holds 5 to 101"):
        tokenizer.tokenize("5 101")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "NullTokenizer needs --vocab-size"),
        (
            dict(tokenizer_type=None),
            "expects one of ByteTokenizer, NullTokenizer, HuggingFaceTokenizer, .*, but got None",
        ),
        (dict(tokenizer_type="HuggingFaceTokenizer"), "needs --tokenizer-model"),
        (
            dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="no/such/folder"),
            "there is no folder",
        ),
        (
            dict(tokenizer_type="ByteTokenizer", tokenizer_model="x"),
            "--tokenizer-model is for .*, not for ByteTokenizer: leave it out",
        ),
        (
            dict(tokenizer_type="ByteTokenizer", vocab_size=100),
            "smaller than the vocabulary of ByteTokenizer",
        ),
    ],
)
def test_tokenizer_arguments_that_do_not_fit_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_with(**arguments)


def test_hugging_face_tokenizer_without_transformers_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        HuggingFaceTokenizer(str(tmp_path))


def test_hugging_face_tokenizer_reads_a_local_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "hello": 1, "world": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>"
    ).save_pretrained(tmp_path)

    tokenizer = tokenizer_with("HuggingFaceTokenizer", str(tmp_path))
    assert tokenizer.tokenize(b"hello world").tolist() == [1, 5]
    assert tokenizer.detokenize([1, 5, 0]) == "hello world"
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (6, 0, -1)
    assert tokenizer.ambiguous_pad == -1
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(tmp_path)
    tokenizer = tokenizer_with("HuggingFaceTokenizer", str(tmp_path))
    assert (tokenizer.pad, tokenizer.ambiguous_pad) == (-1, 0)


@pytest.mark.parametrize("name", ["unk_token", "bos_token", None])
def test_padding_that_is_another_special_token_is_none(name: str | None, tmp_path: Path) -> None:
    """As in Megatron-LM: such tokens stand in texts, and their loss counts unless it is told."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2, "hello": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    shared = {name: "<pad>"} if name else {}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", **shared
    ).save_pretrained(tmp_path)
    tokenizer = tokenizer_with("HuggingFaceTokenizer", str(tmp_path))
    assert (tokenizer.pad, tokenizer.ambiguous_pad) == ((-1, 1) if name else (1, -1))


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_padding_of_sentencepiece_that_is_another_token_is_none(pad: int, tmp_path: Path) -> None:
    processor = SimpleNamespace(
        eos_id=lambda: 2, pad_id=lambda: pad, unk_id=lambda: 0, bos_id=lambda: 1
    )
    part = SimpleNamespace(tokenizer=processor, vocab_size=10)
    name = "megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer.SentencePieceTokenizer"
    pytest.importorskip("sentencepiece")
    with patch(name, lambda *args, **settings: part):
        tokenizer = SentencePieceTokenizer(str(tmp_path / "any.model"))
    assert (tokenizer.pad, tokenizer.ambiguous_pad) == ((-1, pad) if pad < 3 else (3, -1))


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        (dict(), 384),
        (dict(divisible_by=1), 257),
        (dict(tensor_size=4), 512),
        (dict(vocab_size=500), 512),
        (dict(padded_size=300), 300),
    ],
    ids=["multiple", "exact", "tensor_parallel", "larger_vocab_size", "override"],
)
def test_vocabulary_is_rounded_up(arguments: dict[str, Any], size: int) -> None:
    assert rows_of_bytes(**arguments) == size


def test_a_padded_vocabulary_that_cannot_hold_the_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the 257 ids"):
        rows_of_bytes(padded_size=256)

# SPDX-License-Identifier: Apache-2.0
"""Tokenizers give the ids of their libraries; the padded vocabulary."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretrain.data.tokenizer_choice import PACKAGES
from megatron.pretrain.data.tokenizers import Tokenizer
from tests.support.pretrain.tokenizer_arguments import BYTES, rows_of_bytes, tokenizer_with
from tests.support.pretrain.training_runs import CORPUS, SIZES, STEPS, error_of
from tests.support.pretrain.vocabularies import (
    TEXT,
    gpt2_bpe,
    hugging_face,
    save_words,
    sentence_piece,
    tiktoken_json,
)

UNICODE = "the Grüße 世界 🙂 </s> end"


def is_ambiguous(tokenizer: Tokenizer) -> bool:
    """Return True if padding is another special token too, as Megatron-Core's datasets look."""
    others = {
        name: number
        for name, number in tokenizer.special_tokens_dict.items()
        if name != "pad_token"
    }
    return tokenizer.pad in others.values()


def settings_of(kind: str, folder: Path) -> dict[str, Any]:
    """Make the files of a type and return the settings that name them."""
    if kind == "GPT2BPETokenizer":
        return dict(zip(("vocab_file", "merge_file"), gpt2_bpe(folder)))
    if kind == "TikTokenizer":
        path = tiktoken_json(folder)
        return {"tokenizer_model": path, "vocab_size": 279, "tiktoken_num_special_tokens": 20}
    make = hugging_face if kind == "HuggingFaceTokenizer" else sentence_piece
    return {"tokenizer_model": make(folder)}


@pytest.mark.parametrize("kind", PACKAGES)
def test_texts_come_back_and_ids_are_in_the_vocabulary(kind: str, tmp_path: Path) -> None:
    settings = settings_of(kind, tmp_path)
    tokenizer = tokenizer_with(kind, **settings)
    ids = tokenizer.tokenize(TEXT.encode())
    assert ids.dtype == np.int32 and 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert 0 <= tokenizer.eod < tokenizer.vocab_size and tokenizer.eod not in ids
    assert tokenizer.pad != tokenizer.eod
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == TEXT
    again = tokenizer_with(kind, **settings)
    assert again.unique_identifiers == tokenizer.unique_identifiers
    assert again.tokenize(TEXT).tolist() == ids.tolist()


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentence_pieces_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    import sentencepiece

    path = sentence_piece(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    tokenizer = tokenizer_with(kind, path)
    assert tokenizer.tokenize(TEXT).tolist() == library.encode(TEXT)
    assert tokenizer.vocab_size == library.get_piece_size() and tokenizer.eod == library.eos_id()


def test_special_tokens_are_added_to_sentence_pieces_when_legacy(tmp_path: Path) -> None:
    path = sentence_piece(tmp_path)
    plain = tokenizer_with("SentencePieceTokenizer", path)
    added = tokenizer_with(
        "SentencePieceTokenizer",
        path,
        tokenizer_special_tokens=["<new>"],
        tokenizer_sentencepiece_legacy=True,
    )
    assert added.vocab_size == plain.vocab_size + 1 and added.eod == plain.eod
    assert plain.vocab_size in added.tokenize("the <new> cat")
    assert added.unique_identifiers != plain.unique_identifiers
    with pytest.raises(ValueError, match="needs --tokenizer-sentencepiece-legacy"):
        tokenizer_with("SentencePieceTokenizer", path, tokenizer_special_tokens=["<new>"])


def test_a_sentence_piece_model_without_end_is_refused(tmp_path: Path) -> None:
    path = sentence_piece(tmp_path, eos_id=-1)
    with pytest.raises(ValueError, match=r"pieces.model: has no token that ends a sequence"):
        tokenizer_with("GPTSentencePieceTokenizer", path)


@pytest.mark.parametrize("text", [TEXT, UNICODE, f"{TEXT}<|endoftext|>{TEXT}"])
def test_gpt2_ids_are_those_of_transformers(text: str, tmp_path: Path) -> None:
    import transformers

    vocab, merges = gpt2_bpe(tmp_path)
    library = transformers.GPT2TokenizerFast(vocab=vocab, merges=merges)
    tokenizer = tokenizer_with("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    ids = tokenizer.tokenize(text).tolist()
    assert ids == library.encode(text)
    assert (tokenizer.eod, tokenizer.vocab_size) == (library.eos_token_id, len(library))
    assert tokenizer.detokenize(ids) == text.replace("<|endoftext|>", "")


def test_gpt2_files_without_end_of_text_are_refused(tmp_path: Path) -> None:
    vocab, merges = gpt2_bpe(tmp_path)
    words = json.loads(Path(vocab).read_text())
    del words["<|endoftext|>"]
    Path(vocab).write_text(json.dumps(words))
    with pytest.raises(ValueError, match=r"has no <\|endoftext\|>"):
        tokenizer_with("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def test_tiktoken_ids_come_after_the_special_ones(tmp_path: Path) -> None:
    settings = settings_of("TikTokenizer", tmp_path)
    tokenizer = tokenizer_with("TikTokenizer", **settings)
    # "the" is number 257 in the file; </s> is the third special token.
    assert tokenizer.tokenize("the</s>").tolist() == [20 + 257, 2]
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (2, 4, 279)
    assert tokenizer.detokenize(tokenizer.tokenize(UNICODE)) == UNICODE.replace("</s>", "")


def test_the_pattern_of_tiktoken_decides_where_text_is_cut(tmp_path: Path) -> None:
    settings = settings_of("TikTokenizer", tmp_path)
    first, second = (
        tokenizer_with("TikTokenizer", **settings, tiktoken_pattern=pattern)
        for pattern in ("v1", "v2")
    )
    # v2 begins a new word at a capital letter, so that "tH" is not found across it.
    assert (len(first.tokenize("tHe")), len(second.tokenize("tHe"))) == (2, 3)
    assert first.unique_identifiers != second.unique_identifiers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(vocab_size=280), "has 259 tokens, .* of 280: give --vocab-size 279"),
        (dict(vocab_size=None), "of 131072: give --vocab-size 279"),
        (dict(vocab_size=20), "of 20: give"),
        (dict(tiktoken_num_special_tokens=6), "must be at least 7"),
        (dict(tokenizer_special_tokens=["<unk>", "a"]), "lacks <s> </s>"),
    ],
)
def test_numbers_of_a_tiktoken_vocabulary_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_with("TikTokenizer", **(settings_of("TikTokenizer", tmp_path) | settings))


def test_hugging_face_special_tokens_are_put_around_texts_on_request(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path)
    plain = tokenizer_with("HuggingFaceTokenizer", folder)
    around = tokenizer_with(
        "HuggingFaceTokenizer", folder, tokenizer_hf_include_special_tokens=True
    )
    assert around.tokenize("the cat").tolist() == [1, *plain.tokenize("the cat")]


@pytest.mark.parametrize("kind", PACKAGES)
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2]])
def test_damaged_files_are_one_message_with_the_name(
    kind: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    settings = settings_of(kind, tmp_path)
    path = Path(settings.get("vocab_file") or settings["tokenizer_model"])
    target = path / "tokenizer.json" if path.is_dir() else path
    target.write_bytes(damage(target.read_bytes()))
    with pytest.raises(ValueError, match="can read: ") as caught:
        tokenizer_with(kind, **settings)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_missing_library_is_one_line_with_the_extra(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(kind, tmp_path)
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    with pytest.raises(ValueError, match=rf"{kind} needs the package {PACKAGES[kind]}: pip") as one:
        tokenizer_with(kind, **settings)
    assert "\n" not in str(one.value) and "the extra [" in str(one.value)


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


def test_hugging_face_tokenizer_reads_a_local_folder(tmp_path: Path) -> None:
    save_words(tmp_path, {"<eos>": 0, "hello": 1, "world": 5}, unk="<eos>", eos="<eos>")
    tokenizer = tokenizer_with("HuggingFaceTokenizer", str(tmp_path))
    assert tokenizer.tokenize(b"hello world").tolist() == [1, 5]
    assert tokenizer.detokenize([1, 5, 0]) == "hello world"
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (6, 0, -1)


@pytest.mark.parametrize("name", ["eos_token", "unk_token", "bos_token", None])
def test_padding_that_is_another_special_token_is_known(name: str | None, tmp_path: Path) -> None:
    """As in Megatron-LM: such tokens stand in texts, and their loss counts unless it is told."""
    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2, "hello": 3}
    shared = {name: "<pad>"} if name else {}
    save_words(tmp_path, words, unk="<unk>", eos="<eos>", pad_token="<pad>", **shared)
    tokenizer = tokenizer_with("HuggingFaceTokenizer", str(tmp_path))
    assert tokenizer.pad == 1 and is_ambiguous(tokenizer) == (name is not None)


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_padding_of_sentencepiece_that_is_another_token_is_known(pad: int, tmp_path: Path) -> None:
    processor = SimpleNamespace(
        eos_id=lambda: 2, pad_id=lambda: pad, unk_id=lambda: 0, bos_id=lambda: 1
    )
    part = SimpleNamespace(
        tokenizer=processor, vocab_size=10, text_to_ids=lambda text: [], ids_to_text=str
    )
    (tmp_path / "any.model").touch()
    name = "megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer.SentencePieceTokenizer"
    pytest.importorskip("sentencepiece")
    with patch(name, lambda *args, **settings: part):
        tokenizer = tokenizer_with("SentencePieceTokenizer", str(tmp_path / "any.model"))
    assert tokenizer.pad == pad and is_ambiguous(tokenizer) == (pad < 3)


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


@pytest.mark.exhaustive
def test_a_damaged_tokenizer_is_one_message_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "damaged.model").write_bytes(b"no model")
    flags = f"--tokenizer-type Llama2Tokenizer --tokenizer-model {tmp_path}/damaged.model"
    command = f"{SIZES} {STEPS} --data-path {CORPUS} {flags}"
    error = error_of(command)
    assert "\n" not in error
    path = f"{tmp_path}/damaged.model"
    assert error.startswith(f"ValueError: {path}: no model that sentencepiece can")

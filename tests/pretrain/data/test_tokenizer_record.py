# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that wrote data is recorded beside it, and a run uses it and no other."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.pretrain.data.corpus import write_corpus
from megatron.pretrain.data.tokenizer_choice import PACKAGES, TokenizerChoice
from megatron.pretrain.data.tokenizer_record import (
    check_records,
    read_record,
    record_path,
    record_text,
)
from megatron.pretrain.data.tokenizers import build_tokenizer
from tests.pretrain.data.test_tokenizers import settings_of
from tests.support.pretrain.arguments.command_lines import SMALL, parse, problems
from tests.support.pretrain.vocabularies import TEXT, sentence_piece

LINE = SMALL


def write(prefix: Path, kind: str, **settings: Any) -> TokenizerChoice:
    """Write a dataset and its record as tools/preprocess_data.py does."""
    choice = TokenizerChoice(kind, **settings)
    tokenizer = build_tokenizer(choice)
    source = prefix.with_suffix(".txt")
    source.write_text("1 2 3" if kind == "NullTokenizer" else TEXT)
    record = record_text(prefix, choice, tokenizer)
    write_corpus([source], prefix, tokenizer, progress=False, record=record)
    return choice


@pytest.mark.parametrize("kind", ["ByteTokenizer", *PACKAGES])
def test_a_run_without_flags_uses_the_tokenizer_that_wrote_its_data(
    kind: str, tmp_path: Path
) -> None:
    settings = {} if kind == "ByteTokenizer" else settings_of(kind, tmp_path)
    choice = write(tmp_path / "corpus", kind, **settings)
    args, notes = parse(f"{LINE} --data-path {tmp_path}/corpus")
    taken = TokenizerChoice.of(args)
    assert taken.tokenizer_type == kind
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        assert getattr(taken, name) == getattr(choice, name)
    assert taken.vocab_size == choice.vocab_size
    assert taken.tiktoken_num_special_tokens == choice.tiktoken_num_special_tokens
    assert f"tokenizer: {kind}, as {tmp_path}/corpus.tokenizer.json records" in notes
    check_records([f"{tmp_path}/corpus"], taken, build_tokenizer(taken))


def test_data_and_tokenizer_move_together(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "elsewhere" / "there"
    here.mkdir()
    write(here / "corpus", "Llama2Tokenizer", tokenizer_model=sentence_piece(here))
    there.parent.mkdir()
    shutil.move(here, there)
    args, _ = parse(f"{LINE} --data-path 0.3 {there}/corpus 0.7 {there}/corpus")
    assert Path(args.tokenizer_model).resolve() == there / "pieces.model"


def test_another_tokenizer_than_that_of_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    model = sentence_piece(tmp_path)
    other = sentence_piece(tmp_path / "other", symbols=("<mark>",))
    write(tmp_path / "corpus", "Llama2Tokenizer", tokenizer_model=model)
    same = TokenizerChoice("SentencePieceTokenizer", tokenizer_model=model)
    check_records([f"{tmp_path}/corpus"], same, build_tokenizer(same))  # other name, same ids
    for choice in (TokenizerChoice("Llama2Tokenizer", other), TokenizerChoice("ByteTokenizer")):
        with pytest.raises(ValueError, match="is not that of the data") as caught:
            check_records([f"{tmp_path}/corpus"], choice, build_tokenizer(choice))
        assert f"{tmp_path}/corpus: written with Llama2Tokenizer" in str(caught.value)
        assert "Leave out the flags of the tokenizer" in str(caught.value)


def test_what_the_command_line_says_stays(tmp_path: Path) -> None:
    write(tmp_path / "corpus", "NullTokenizer", vocab_size=100)
    line = f"{LINE} --data-path {tmp_path}/corpus"
    assert parse(line)[0].vocab_size == 100
    given, _ = parse(f"{line} --tokenizer-type NullTokenizer --vocab-size 120")
    assert given.vocab_size == 120
    other, notes = parse(f"{line} --tokenizer-type ByteTokenizer")
    assert (other.tokenizer_type, other.vocab_size) == ("ByteTokenizer", None)
    assert not any(note.startswith("tokenizer: ") for note in notes)


def test_data_of_different_tokenizers_cannot_be_blended(tmp_path: Path) -> None:
    write(tmp_path / "one", "NullTokenizer", vocab_size=100)
    write(tmp_path / "two", "ByteTokenizer")
    (problem,) = problems(f"{LINE} --data-path {tmp_path}/one {tmp_path}/two")
    assert "different tokenizers" in problem and "one.tokenizer.json says NullTok" in problem


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"tokenizer_type": "Evil", "settings": {}, "identity": {}}',
        '{"tokenizer_type": "ByteTokenizer", "identity": {}, "settings": {"trust_remote_code": 1}}',
        '{"tokenizer_type": "NullTokenizer", "settings": {"vocab_size": "9"}, "identity": {}}',
    ],
)
def test_a_damaged_record_is_named_with_the_way_out(content: str, tmp_path: Path) -> None:
    write(tmp_path / "corpus", "ByteTokenizer")
    record_path(tmp_path / "corpus").write_text(content)
    found = problems(f"{LINE} --data-path {tmp_path}/corpus")
    assert found[0].startswith(f"{tmp_path}/corpus.tokenizer.json: no record of a tokenizer")
    assert "remove it" in found[0]


def test_new_data_never_has_the_record_of_the_old(tmp_path: Path) -> None:
    choice = write(tmp_path / "corpus", "ByteTokenizer")
    assert json.loads(record_path(tmp_path / "corpus").read_text())["settings"] == {}
    write_corpus(
        [tmp_path / "corpus.txt"], tmp_path / "corpus", build_tokenizer(choice), progress=False
    )
    assert read_record(tmp_path / "corpus") is None


def test_a_dataset_is_never_there_without_the_record_of_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "corpus"
    write(prefix, "NullTokenizer", vocab_size=9)
    types: list[str] = []

    def look() -> None:
        """Note the recorded tokenizer of the dataset, as a reader would find it after a kill."""
        if prefix.with_suffix(".idx").exists():
            types.append(json.loads(record_path(prefix).read_text())["tokenizer_type"])

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **settings: Any) -> Any:
            look()
            result = change(*arguments, **settings)
            look()
            return result

        return changed

    monkeypatch.setattr(os, "replace", watched(os.replace))
    monkeypatch.setattr(Path, "unlink", watched(Path.unlink))
    write(prefix, "ByteTokenizer")
    assert types[0] == "NullTokenizer" and types[-1] == "ByteTokenizer"

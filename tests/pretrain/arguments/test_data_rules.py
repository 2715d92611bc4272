# SPDX-License-Identifier: Apache-2.0
"""Rules of data and tokenizer: flags of blends, and the choice of a tokenizer."""

from pathlib import Path

import pytest

from tests.support.pretrain.arguments.command_lines import MOCK, SMALL, parse, problems
from tests.support.pretrain.vocabularies import gpt2_bpe


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    for name in "abc":
        for suffix in (".idx", ".bin"):
            (tmp_path / f"{name}{suffix}").touch()
    return [str(tmp_path / name) for name in "abc"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("--mock-data --vocab-size 100", ["several data sets", "weights of data sets"]),
        ("--data-path {0}", ["several data sets", "weights of data sets"]),
        ("--data-path {0} {1}", ["weights of data sets"]),
        ("--data-path 0.3 {0} 0.7 {1}", []),
        ("--train-data-path {0} --valid-data-path 1 {1} 2 {2}", []),
    ],
)
def test_flags_of_blends_say_where_they_change_nothing(
    data: str, told: list[str], prefixes: list[str]
) -> None:
    flags = "--num-dataset-builder-threads 2 --mid-level-dataset-surplus 0.1"
    _, notes = parse(f"{SMALL} {data.format(*prefixes)} {flags}")
    found = [note for note in notes if note.split(":")[0] in flags]
    assert [note.split("no effect ")[1] for note in found] == [
        f"without {each}; can be left out" for each in told
    ]


def test_vocabulary_and_merges_alone_choose_gpt2(prefixes: list[str], tmp_path: Path) -> None:
    vocab, merges = gpt2_bpe(tmp_path)
    files = f"--vocab-file {vocab} --merge-file {merges}"
    args, _ = parse(f"{SMALL} --data-path {prefixes[0]} {files}")
    assert args.tokenizer_type == "GPT2BPETokenizer"
    missing = problems(f"{SMALL} --data-path {prefixes[0]} {files}s")
    assert missing == [f"--merge-file {merges}s: no such file"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--tokenizer-type SentencePieceTokenizer", "SentencePieceTokenizer needs"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model x", "--tokenizer-model x: no such"),
        ("--tokenizer-type TikTokenizer", "TikTokenizer needs --tokenizer-model"),
        ("--tokenizer-type GPT2BPETokenizer --merge-file x", "GPT2BPETokenizer needs --vocab-file"),
        ("--tiktoken-pattern v1", "--tiktoken-pattern is for TikTokenizer, not for NullTokenizer"),
        ("--num-dataset-builder-threads 0", "--num-dataset-builder-threads must be at least 1"),
        ("--mid-level-dataset-surplus -1", "--mid-level-dataset-surplus must be at least 0"),
    ],
)
def test_settings_of_a_tokenizer_that_do_not_fit_are_refused(flags: str, problem: str) -> None:
    assert any(problem in found for found in problems(f"{MOCK} {flags}"))

# SPDX-License-Identifier: Apache-2.0
"""Rules of data and tokenizer: files that name the data, and the choice of a tokenizer."""

import json
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


def test_a_file_stands_for_the_words_of_data_path(prefixes: list[str], tmp_path: Path) -> None:
    path = tmp_path / "blend.txt"
    path.write_text(f"0.3 {prefixes[0]}\n0.7 {prefixes[1]}\n")
    args, _ = parse(f"{SMALL} --data-args-path {path} --split 8,1,1")
    assert args.data_path == ["0.3", prefixes[0], "0.7", prefixes[1]]
    assert (args.split, args.tokenizer_type) == ("8,1,1", "ByteTokenizer")


@pytest.mark.parametrize("as_text", [False, True], ids=["lists", "texts"])
def test_a_file_stands_for_the_paths_of_the_splits(
    as_text: bool, prefixes: list[str], tmp_path: Path
) -> None:
    paths = {"train": [0.3, prefixes[0], 0.7, prefixes[1]], "valid": [prefixes[2]], "test": None}
    if as_text:
        paths = {key: " ".join(map(str, words or [])) for key, words in paths.items()}
    path = tmp_path / "splits.json"
    path.write_text(json.dumps(paths))
    args, _ = parse(f"{SMALL} --per-split-data-args-path {path}")
    assert args.train_data_path == ["0.3", prefixes[0], "0.7", prefixes[1]]
    assert (args.valid_data_path, args.test_data_path) == ([prefixes[2]], None)


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


def test_files_of_data_paths_that_do_not_fit_are_refused(
    prefixes: list[str], tmp_path: Path
) -> None:
    blend, splits = tmp_path / "blend.txt", tmp_path / "splits.json"
    gone = f"--data-args-path {tmp_path}/gone"
    assert problems(f"{SMALL} {gone}")[0].startswith(f"{gone}: cannot be read: ")
    blend.write_text(f"{tmp_path}/none")
    flag = f"--data-args-path {blend}"
    assert problems(f"{SMALL} {flag}") == [
        f"{flag}: {tmp_path}/none.idx and {tmp_path}/none.bin not found"
    ]
    assert any(
        "--data-path and --data-args-path exclude each other" in problem
        for problem in problems(f"{SMALL} {flag} --data-path {prefixes[0]}")
    )
    blend.write_text(" \n")
    assert f"{flag}: is empty" in problems(f"{SMALL} {flag}")
    flag = f"--per-split-data-args-path {splits}"
    for text, problem in (
        ("{", "no JSON: "),
        ("[]", "expects an object with the keys train, valid, test, but got a list"),
        ('{"train": []}', "expects an object with the keys train, valid, test, but got train"),
        ('{"train": 3, "valid": [], "test": []}', "train must be a text or a list, but is 3"),
        ('{"train": [], "valid": ["x"], "test": []}', "x.idx and x.bin not found"),
    ):
        splits.write_text(text)
        assert any(found.startswith(f"{flag}: {problem}") for found in problems(f"{SMALL} {flag}"))


def test_vocabulary_and_merges_alone_choose_gpt2(prefixes: list[str], tmp_path: Path) -> None:
    vocab, merges = gpt2_bpe(tmp_path)
    files = f"--vocab-file {vocab} --merge-file {merges}"
    args, _ = parse(f"{SMALL} --data-path {prefixes[0]} {files}")
    assert args.tokenizer_type == "GPT2BPETokenizer"
    _, notes = parse(f"{SMALL} --data-path {prefixes[0]} {files} --legacy-tokenizer")
    assert any(note.startswith("--legacy-tokenizer: changes no id") for note in notes)
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
        ("--num-dataset-builder-threads 0", "--num-dataset-builder-threads: at least 1"),
        ("--mid-level-dataset-surplus -1", "--mid-level-dataset-surplus: at least 0"),
        (
            "--tokenizer-type SentencePieceTokenizer --tokenizer-model x --legacy-tokenizer",
            "use GPTSentencePieceTokenizer",
        ),
        (
            "--tokenizer-type Llama2Tokenizer --tokenizer-model x --legacy-tokenizer",
            "begins every text with <s>",
        ),
        (
            "--tokenizer-type TikTokenizer --tokenizer-model x --legacy-tokenizer",
            "reads special tokens in a text as plain text",
        ),
    ],
)
def test_settings_of_a_tokenizer_that_do_not_fit_are_refused(flags: str, problem: str) -> None:
    assert any(problem in found for found in problems(f"{MOCK} {flags}"))

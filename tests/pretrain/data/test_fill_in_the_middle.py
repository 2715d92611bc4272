# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle data: documents come back when their parts are put in order again."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.pretrain.data.corpus import write_corpus
from megatron.pretrain.data.fill_in_the_middle import FillInTheMiddle
from megatron.pretrain.data.gpt_datasets import build_datasets
from megatron.pretrain.data.tokenizer import ByteTokenizer, Tokenizer
from tests.pretrain.data.test_gpt_datasets import namespace
from tests.support.pretrain.arguments.command_lines import MOCK, problems
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.tokenizer_arguments import tokenizer_with
from tests.support.pretrain.training_runs import NO_DROPOUT, SIZES, STEPS, train
from tests.support.pretrain.vocabularies import TEXT, gpt2_bpe
from tests.support.rank_pool import run_ranks

PREFIX, MIDDLE, SUFFIX, PAD, EOD, SPLIT = range(257, 263)
SETTINGS = FillInTheMiddle(
    rate=1.0, suffix_first_rate=0.0, prefix=PREFIX, middle=MIDDLE, suffix=SUFFIX, pad=PAD,
    end_of_document=EOD,
)  # fmt: skip


def ids_of(text: str) -> list[int]:
    """Return bytes, with | for the end of a document and / for the end of a fragment."""
    return [{"|": EOD, "/": SPLIT}.get(letter, ord(letter)) for letter in text]


def rearrange(text: str, settings: FillInTheMiddle, length: int = 0, seed: int = 1) -> list[int]:
    ids = np.array(ids_of(text) + [PAD] * length)
    return settings.rearranged(ids, ByteTokenizer(), np.random.default_rng(seed)).tolist()


def in_order(ids: Iterable[int]) -> str:
    """Put prefix, middle and suffix of one document in order again.

    Where the suffix comes first, the prefix stands before the middle, after the same token.
    """
    parts: dict[int, str] = {PREFIX: "", MIDDLE: "", SUFFIX: ""}
    at = PREFIX
    for number in ids:
        if number in parts:
            at = number
        elif number != PAD:
            parts[at] += chr(number)
    return parts[PREFIX] + parts[MIDDLE] + parts[SUFFIX]


@pytest.mark.parametrize("suffix_first", [0.0, 1.0], ids=["prefix_first", "suffix_first"])
def test_a_document_has_its_middle_last(suffix_first: float) -> None:
    settings = replace(SETTINGS, suffix_first_rate=suffix_first)
    found = set()
    for seed in range(30):
        # With room for the three tokens that are added.
        ids = settings.rearranged(
            np.array(ids_of("abcdefgh") + [EOD] * 4), ByteTokenizer(), np.random.default_rng(seed)
        ).tolist()
        document = ids[: ids.index(EOD)]
        assert sorted(each for each in document if each > 256) == [PREFIX, MIDDLE, SUFFIX]
        assert in_order(document) == "abcdefgh"
        assert (document[1] == SUFFIX) or not suffix_first
        found.add(tuple(document))
    assert len(found) > 5  # with the suffix first only the second cut shows


def test_samples_keep_their_length() -> None:
    text = "abc|defgh||ij"
    for seed in range(20):
        ids = rearrange(text, SETTINGS, seed=seed)
        assert len(ids) == len(text) and ids[0] == PREFIX
    assert rearrange(text, replace(SETTINGS, rate=0.0)) == ids_of(text)


def test_a_rate_is_the_part_of_documents_that_change() -> None:
    changed = 0
    for seed in range(300):
        changed += PREFIX in rearrange("abcdef", replace(SETTINGS, rate=0.3), seed=seed)
    assert 60 < changed < 120


def test_fragments_are_rearranged_one_by_one() -> None:
    settings = replace(SETTINGS, split=SPLIT, fragment_rate=1.0)
    ids = rearrange("abcd/efgh/ij|", settings, 20)
    pieces: list[list[int]] = [[]]
    for number in ids[: ids.index(EOD)]:
        if number == SPLIT:
            pieces.append([])
        else:
            pieces[-1].append(number)
    assert [in_order(piece) for piece in pieces] == ["abcd", "efgh", "ij"]
    assert all(piece.count(MIDDLE) == 1 for piece in pieces)
    assert rearrange("ab/cd", replace(settings, fragment_rate=0.0)) == ids_of("ab/cd")


def test_text_after_a_certain_beginning_stays() -> None:
    settings = replace(SETTINGS, not_after="#!")
    ids = rearrange("#!ab|cdef", settings)
    assert ids[:6] == [*ids_of("#!ab|"), PREFIX]


@pytest.fixture(scope="module")
def text_corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer, str]:
    """Documents in a byte-level BPE; the flags and settings that name its files."""
    folder = tmp_path_factory.mktemp("middle")
    vocab, merges = gpt2_bpe(folder)
    tokenizer = tokenizer_with("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"{number} {TEXT}")
    prefix = str(folder / "corpus")
    write_corpus(sorted(folder.glob("*.txt"))[:30], prefix, tokenizer)
    return prefix, tokenizer, f"--vocab-file {vocab} --merge-file {merges}"


FLAGS: dict[str, Any] = dict(
    fim_rate=0.5,
    fim_spm_rate=0.5,
    fim_split_sample=None,
    fim_fragment_rate=None,
    fim_no_prefix=None,
    fim_prefix_token="<fim_prefix>",
    fim_middle_token="<fim_middle>",
    fim_suffix_token="<fim_suffix>",
    fim_pad_token="<fim_pad>",
    fim_eod_token="<|endoftext|>",
)


def test_samples_are_rearranged_always_in_the_same_way(
    text_corpus: tuple[str, Tokenizer, str],
) -> None:
    prefix, tokenizer, _ = text_corpus
    sources = dict(data_path=[prefix], split="1,0,0", seq_length=64)
    plain = build_datasets(namespace(**sources), tokenizer)[0]
    first, again = (
        build_datasets(namespace(**sources, **FLAGS, fim_data=True), tokenizer)[0] for _ in range(2)
    )
    middle, pad = tokenizer.token_id("<fim_middle>"), tokenizer.token_id("<fim_pad>")
    changed = padded = 0
    for number in reversed(range(len(first))):
        sample = first[number]
        assert sample["tokens"].tolist() == again[number]["tokens"].tolist()
        assert sample["tokens"].shape == plain[number]["tokens"].shape
        changed += middle in sample["tokens"]
        is_pad = sample["labels"] == pad
        padded += int(is_pad.sum())
        assert sample["loss_mask"].tolist() == (~is_pad).float().tolist()
    assert len(first) == len(plain) > changed > len(plain) // 4


def test_loss_is_not_counted_on_padding(text_corpus: tuple[str, Tokenizer, str]) -> None:
    prefix, tokenizer, _ = text_corpus
    sources = dict(data_path=[prefix], split="1,0,0", seq_length=64)
    # A token of the text in the place of that of padding.
    flags = FLAGS | dict(fim_pad_token="t", fim_rate=0.0)
    sample = build_datasets(namespace(**sources, **flags, fim_data=True), tokenizer)[0][0]
    is_pad = sample["labels"] == tokenizer.token_id("t")
    assert is_pad.any() and sample["loss_mask"].tolist() == (~is_pad).float().tolist()


def test_a_vocabulary_without_the_tokens_is_refused(
    text_corpus: tuple[str, Tokenizer, str],
) -> None:
    flags = FLAGS | dict(fim_middle_token="<mid>", fim_split_sample="<file>", fim_fragment_rate=0.5)
    arguments = namespace(data_path=[text_corpus[0]], split="1,0,0", fim_data=True, **flags)
    with pytest.raises(ValueError, match=r"--fim-data: .* no token '<mid>'; .* no token '<file>'"):
        build_datasets(arguments, text_corpus[1])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--fim-data --fim-rate 2", "--fim-rate must be from 0 to 1, got 2"),
        ("--fim-data", "--fim-data needs text: give --data-path"),
        ("--fim-data --fim-split-sample x", "--fim-split-sample needs --fim-fragment-rate"),
        ("--fim-pad-token x", "--fim-pad-token needs --fim-data"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: str, problem: str) -> None:
    assert any(problem in found for found in problems(f"{MOCK} {flags}"))


def test_a_run_trains_on_it_and_resumes_exactly(
    text_corpus: tuple[str, Tokenizer, str], tmp_path: Path
) -> None:
    prefix, _, files = text_corpus
    line = f"{SIZES} {STEPS} {NO_DROPOUT} --data-path {prefix} --split 1,0,0 {files} {FSDP}"
    line += " --train-iters 4 --eval-iters 0 --make-vocab-size-divisible-by 2 --num-workers 0"
    middle = f"{line} --fim-data --fim-rate 0.9"
    saved = f"{middle} --save {tmp_path}/run --save-interval 2"
    plain, straight, _, resumed = run_ranks(
        2,
        train,
        line,
        middle,
        f"{saved} --exit-interval 2",
        f"{saved} --load {tmp_path}/run",
    )[0]
    assert straight.losses[1:] != plain.losses[1:]
    assert resumed.losses == straight.losses[2:]

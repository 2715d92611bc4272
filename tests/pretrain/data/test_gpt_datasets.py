# SPDX-License-Identifier: Apache-2.0
"""Datasets from the command line, and the order of their microbatches."""

import logging
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.mcore_adapter.run.errors import RunError
from megatron.pretrain.data import gpt_datasets as data_module
from megatron.pretrain.data.corpus import standard_library_corpus
from megatron.pretrain.data.gpt_datasets import build_datasets, find_data, wanted_samples
from megatron.pretrain.data.splits import parse_blend
from megatron.pretrain.data.tokenizers import ByteTokenizer
from tests.support.pretrain.number_corpora import (
    NUMBERS,
    NumberedSamples,
    microbatches,
    namespace,
    write_numbers,
)
from tests.support.rank_pool import run_ranks

BYTES = ByteTokenizer()


def numbers_in(dataset: Any) -> set[int]:
    found: set[int] = set()
    for number in range(len(dataset)):
        found |= set(map(int, dataset[number]["tokens"]))
    return found - {NUMBERS.eod}


@pytest.mark.parametrize(
    ("arguments", "samples"),
    [
        (dict(), (80, 48, 16)),
        (dict(train_iters=None, train_samples=96), (96, 48, 16)),
        (dict(eval_interval=None), (80, 0, 16)),
        (dict(eval_iters=0), (80, 0, 0)),
        (dict(train_iters=0), (0, 16, 16)),
    ],
    ids=["iterations", "samples", "no_interval", "no_evaluation", "no_training"],
)
def test_samples_wanted_follow_from_the_length_of_the_run(
    arguments: dict[str, Any], samples: tuple[int, ...]
) -> None:
    assert wanted_samples(namespace(**arguments)) == samples


def test_samples_are_the_tokens_of_the_corpus_and_labels_come_one_later(tmp_path: Path) -> None:
    prefix = write_numbers(tmp_path / "one", [list(range(99))])
    train, valid, test = build_datasets(namespace(data_path=[prefix], split="1,0,0"), NUMBERS)
    assert (valid, test) == (None, None)
    stream = [*range(99), NUMBERS.eod]
    for i in range(len(train)):
        sample = train[i]
        start = stream.index(sample["tokens"][0])
        wrapped = stream * 2
        assert sample["tokens"].tolist() == wrapped[start : start + 16]
        assert sample["labels"].tolist() == wrapped[start + 1 : start + 17]


def test_a_split_cuts_the_corpus_by_document(corpus: str) -> None:
    train, valid, test = build_datasets(namespace(data_path=[corpus], split="80,10,10"), NUMBERS)
    assert numbers_in(train) == set(range(40))
    assert numbers_in(valid) == set(range(40, 45))
    assert numbers_in(test) == set(range(45, 50))
    assert len(train) >= 80 and len(valid) >= 48 and len(test) >= 16


def test_each_split_may_have_its_own_path(tmp_path: Path, corpus: str) -> None:
    other = write_numbers(tmp_path / "other", [[99] * 40])
    arguments = namespace(train_data_path=[corpus], valid_data_path=[other])
    train, valid, test = build_datasets(arguments, NUMBERS)
    assert numbers_in(train) == set(range(50))
    assert numbers_in(valid) == {99}
    assert test is None


def test_the_documents_of_each_split_are_told(tmp_path: Path, corpus: str) -> None:
    other = write_numbers(tmp_path / "other", [[99] * 9] * 10)
    blend = find_data(namespace(data_path=["0.3", corpus, "0.7", other], split="8,2,0"), NUMBERS)
    assert blend.lines == [
        f"training: 40 of 50 documents of {corpus}, 1,640 tokens, weight 0.3",
        f"training: 8 of 10 documents of {other}, 80 tokens, weight 0.7",
        f"validation: 10 of 50 documents of {corpus}, 410 tokens, weight 0.3",
        f"validation: 2 of 10 documents of {other}, 20 tokens, weight 0.7",
    ]
    each = find_data(namespace(train_data_path=[corpus] * 5, valid_data_path=[other]), NUMBERS)
    assert each.lines == [
        "training: 250 documents of 5 data sets, 10,250 tokens",
        f"validation: 10 of 10 documents of {other}, 100 tokens",
    ]
    assert find_data(namespace(mock_data=True), NUMBERS).lines == []


@pytest.mark.usefixtures("one_rank")
def test_weights_blend_datasets(tmp_path: Path) -> None:
    prefixes = [write_numbers(tmp_path / str(token), [[token] * 100] * 20) for token in (1, 2)]
    arguments = namespace(data_path=["0.75", prefixes[0], "0.25", prefixes[1]], split="1,0,0")
    train, _, _ = build_datasets(arguments, NUMBERS)
    iterator = microbatches(train, arguments)
    tokens = torch.cat([batch["tokens"] for batch in islice(iterator, 40)])
    share = (tokens == 1).sum() / ((tokens == 1).sum() + (tokens == 2).sum())
    assert 0.7 < share < 0.8


def test_index_caches_go_where_they_are_told(tmp_path: Path, corpus: str) -> None:
    cache = tmp_path / "cache"
    build_datasets(namespace(data_path=[corpus], data_cache_path=str(cache)), NUMBERS)
    assert any(cache.glob("*GPTDataset-train-sample_index.npy"))
    assert not Path(corpus).exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("tokenizer", [BYTES, NUMBERS], ids=["bytes", "null"])
def test_mock_data_needs_no_files(tokenizer: Any) -> None:
    arguments = namespace(mock_data=True, split="99,1,0")
    train, valid, test = build_datasets(arguments, tokenizer)
    assert test is None
    assert len(train) > 50 * len(valid)
    batch = next(microbatches(train, arguments))
    assert batch["tokens"].shape == (2, 16)
    assert batch["tokens"].max() < tokenizer.vocab_size


def test_nothing_is_built_for_a_run_of_no_iterations() -> None:
    assert build_datasets(namespace(train_iters=0, eval_iters=0), BYTES) == (None, None, None)


def test_batches_hold_what_a_model_needs(corpus: str) -> None:
    arguments = namespace(
        data_path=[corpus],
        create_attention_mask_in_dataloader=True,
        reset_attention_mask=True,
        reset_position_ids=True,
        eod_mask_loss=True,
    )
    train, _, _ = build_datasets(arguments, NUMBERS)
    iterator = microbatches(train, arguments)
    batch = next(batch for batch in iterator if (batch["tokens"][0, 2:10] == NUMBERS.eod).any())
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "tokens": ((2, 16), torch.int64),
        "labels": ((2, 16), torch.int64),
        "loss_mask": ((2, 16), torch.float32),
        "position_ids": ((2, 16), torch.int64),
        "attention_mask": ((2, 1, 16, 16), torch.bool),
    }
    end = batch["tokens"][0].tolist().index(NUMBERS.eod)
    assert batch["loss_mask"][0, end] == 0
    assert batch["position_ids"][0, end + 1] == 0
    assert batch["attention_mask"][0, 0, end + 1, : end + 1].all()
    assert not batch["attention_mask"][0, 0, end + 1, end + 1]


def test_the_default_corpus_is_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    for i in range(40):
        (library / f"m{i}.py").write_text(f"# module {i}\n" * 20)
    monkeypatch.setattr(
        data_module,
        "standard_library_corpus",
        lambda directory, tokenizer: standard_library_corpus(directory, tokenizer, library=library),
    )
    monkeypatch.chdir(tmp_path)
    train, _, _ = build_datasets(namespace(), BYTES)
    assert "module" in BYTES.detokenize(train[0]["tokens"]) + BYTES.detokenize(train[1]["tokens"])
    assert len(list((tmp_path / "data").glob("python_stdlib_*.bin"))) == 1
    with pytest.raises(ValueError, match="NullTokenizer reads numbers"):
        build_datasets(namespace(), NUMBERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(data_path=["nowhere"]),
            "no dataset at nowhere .*expects nowhere.bin and nowhere.idx",
        ),
        (dict(mock_data=True, split="9x9"), "--split expects up to three weights"),
        (dict(mock_data=True, split="0,1,1"), "leaves nothing to train on"),
    ],
)
def test_missing_data_and_splits_of_nothing_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_datasets(namespace(**arguments), BYTES)


def test_a_corpus_too_small_to_split_is_refused_and_an_empty_test_split_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_numbers(tmp_path / "tiny", [[1] * 20] * 10)
    with pytest.raises(
        ValueError, match=r"validation split of .*tiny is empty: it gets 0 of 10 documents"
    ):
        build_datasets(namespace(data_path=[prefix]), NUMBERS)
    with caplog.at_level(logging.WARNING):
        train, valid, test = build_datasets(namespace(data_path=[prefix], split="80,20,1"), NUMBERS)
    assert train is not None and valid is not None and test is None
    assert "the test split" in caplog.text
    unused = namespace(data_path=[prefix], eval_iters=0)
    assert [part is None for part in build_datasets(unused, NUMBERS)] == [False, True, True]


def test_data_paths_are_prefixes_or_pairs_of_weight_and_prefix() -> None:
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["3", "a", "0.5", "b "]) == (["a", "b"], [3.0, 0.5])
    for wrong in (["3", "a", "b", "c"], ["0", "a"], ["-1", "a", "1", "b"], ["nan", "a"]):
        with pytest.raises(ValueError, match="positive weight before every prefix"):
            parse_blend(wrong)


def samples_read(
    num_samples: int, count: int, *, consumed: int = 0, rank: int = 0, ranks: int = 1, **given: Any
) -> list[int]:
    arguments = namespace(**given)
    iterator = microbatches(NumberedSamples(num_samples), arguments, consumed, rank, ranks)
    batches = list(islice(iterator, count // arguments.micro_batch_size))
    assert all(set(batch) == {"tokens", "loss_mask"} for batch in batches)
    return [int(token) for token in chain.from_iterable(batch["tokens"] for batch in batches)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(kind: str, ranks: int) -> None:
    whole = samples_read(100, 96, dataloader_type=kind)
    per_rank = [
        samples_read(100, 96 // ranks, rank=r, ranks=ranks, dataloader_type=kind)
        for r in range(ranks)
    ]
    share = 8 // ranks
    for step in range(12):
        ours = slice(step * share, (step + 1) * share)
        batch = [*chain.from_iterable(samples[ours] for samples in per_rank)]
        assert sorted(batch) == sorted(whole[step * 8 : step * 8 + 8])


def test_microbatches_take_turns_over_the_ranks() -> None:
    assert samples_read(16, 6, rank=1, ranks=2, dataloader_type="single") == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("workers", [0, 2], ids=["no_workers", "two_workers"])
def test_a_resumed_iterator_goes_on_where_the_first_one_stopped(kind: str, workers: int) -> None:
    # 60 samples read from 20: the borders between epochs fall inside microbatches of 3.
    num_samples = 20 if kind == "cyclic" else 64
    options = dict(dataloader_type=kind, micro_batch_size=3)
    whole = samples_read(num_samples, 60, **options)
    for consumed in (3, 21, 42):
        resumed = samples_read(
            num_samples, 60 - consumed, consumed=consumed, num_workers=workers, **options
        )
        assert resumed == whole[consumed:]


def test_cyclic_reads_every_sample_once_per_epoch_in_an_order_of_its_own() -> None:
    read = samples_read(24, 72, dataloader_type="cyclic")
    epochs = [read[0:24], read[24:48], read[48:72]]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert read == samples_read(24, 72, dataloader_type="cyclic")
    assert read != samples_read(24, 72, dataloader_type="cyclic", seed=1)


@pytest.mark.parametrize("workers", [0, 1], ids=["no_workers", "worker"])
def test_reading_leaves_the_global_random_state_alone(workers: int) -> None:
    before = torch.get_rng_state()
    samples_read(8, 8, dataloader_type="cyclic", num_workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_single_pass_ends_with_an_explanation_and_the_same_number_of_batches_on_every_rank() -> (
    None
):
    for rank in range(2):
        iterator = microbatches(NumberedSamples(11), namespace(), consumed=2, rank=rank, ranks=2)
        assert len(list(islice(iterator, 2))) == 2
        with pytest.raises(
            RuntimeError, match="used up: the dataset has 11 samples and this run began after 2"
        ):
            next(iterator)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        samples_read(num_samples=0, count=8)


def build_on_rank(folder: str, prefix: str) -> list[list[list[int]]]:
    """Job: the tokens of every sample of every split."""
    # The folder of the default corpus is a file: only rank 0 tries to write there, both must report
    # it.
    with pytest.raises(OSError, match="blocked"):
        build_datasets(namespace(data_cache_path=f"{folder}/blocked"), BYTES)
    arguments = namespace(data_path=[prefix], data_cache_path=f"{folder}/cache", split="80,10,10")
    return tokens_of(build_datasets(arguments, NUMBERS))


def tokens_of(datasets: Any) -> list[list[list[int]]]:
    return [[sample["tokens"].tolist() for sample in dataset] for dataset in datasets]


def test_all_ranks_get_the_same_datasets_and_the_same_errors(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "blocked").touch()
    on_rank0, on_rank1 = run_ranks(2, build_on_rank, str(tmp_path), corpus)
    alone = tokens_of(build_datasets(namespace(data_path=[corpus], split="80,10,10"), NUMBERS))
    assert all(alone) and alone == on_rank0 == on_rank1


def test_functions_that_are_not_compiled_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="functions are not compiled: install its wheel"):
        build_datasets(namespace(mock_data=True), NUMBERS)

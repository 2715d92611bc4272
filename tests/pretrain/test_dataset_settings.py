# SPDX-License-Identifier: Apache-2.0
"""Settings of Megatron-Core's dataset builder change the datasets that are built."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.pretrain.data.gpt_datasets import build_datasets
from megatron.pretrain.data.tokenizers import NullTokenizer
from tests.support.pretrain.number_corpora import NUMBERS, namespace, write_numbers


@pytest.mark.parametrize("surplus", [0.0, 0.5])
@pytest.mark.usefixtures("one_rank")
def test_weighted_data_sets_have_a_surplus_of_samples(
    surplus: float, tmp_path: Path, corpus: str
) -> None:
    other = write_numbers(tmp_path / "other", [[60] * 40] * 50)
    arguments = namespace(
        data_path=["0.5", corpus, "0.5", other],
        split="1,0,0",
        train_iters=100,
        mid_level_dataset_surplus=surplus,
    )
    train, _, _ = build_datasets(arguments, NUMBERS)
    assert [part.num_samples for part in train.datasets] == [int(400 * (1 + surplus))] * 2


@pytest.mark.usefixtures("one_rank")
def test_data_sets_of_a_blend_are_indexed_by_threads(tmp_path: Path, corpus: str) -> None:
    paths = [corpus, write_numbers(tmp_path / "other", [[60] * 40] * 50)]
    found = []
    for threads in (1, 2):
        arguments = namespace(
            data_path=paths,
            split="1,0,0",
            num_dataset_builder_threads=threads,
        )
        with patch(
            "megatron.core.datasets.blended_megatron_dataset_builder.ThreadPoolExecutor",
            wraps=ThreadPoolExecutor,
        ) as pool:
            train, _, _ = build_datasets(arguments, NUMBERS)
        assert pool.call_args.kwargs == {"max_workers": threads}
        found.append([train[number]["tokens"].tolist() for number in range(len(train))])
    assert found[0] == found[1]


def test_padding_that_shares_its_id_is_masked_only_on_request(tmp_path: Path) -> None:
    shared = NullTokenizer(100)
    shared.pad = shared.eod
    prefix = write_numbers(tmp_path / "short", [[1] * 7] * 30)
    for allowed in (False, True):
        arguments = namespace(
            data_path=[prefix], split="1,0,0", allow_ambiguous_pad_tokens=allowed, train_iters=2
        )
        with pytest.warns(UserWarning, match="pad token id in the tokenizer collides"):
            train, _, _ = build_datasets(arguments, shared)
        masked = (train[0]["loss_mask"] == 0).any()
        assert masked == allowed


def test_mapped_and_read_files_give_the_same_samples(corpus: str) -> None:
    found = []
    for mapped in (True, False):
        arguments = namespace(data_path=[corpus], split="1,0,0", mmap_bin_files=mapped)
        train, _, _ = build_datasets(arguments, NUMBERS)
        reader = type(train.dataset.bin_reader).__name__
        assert ("MMap" in reader) == mapped
        found.append([train[number]["tokens"].tolist() for number in range(len(train))])
    assert found[0] == found[1]

# SPDX-License-Identifier: Apache-2.0
"""Caches of sample positions are found by name: those of other data are refused."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from megatron.pretrain.data import dataset_files
from megatron.pretrain.data.dataset_files import check_samples
from megatron.pretrain.data.gpt_datasets import build_datasets
from tests.support.pairwise import pairwise
from tests.support.pretrain.number_corpora import NUMBERS, namespace, write_numbers


def test_index_caches_of_other_data_of_the_same_name_are_refused(tmp_path: Path) -> None:
    arguments = namespace(
        data_path=[str(tmp_path / "corpus")], split="1,0,0", data_cache_path=str(tmp_path / "cache")
    )
    documents = [[1] * (20 + number) for number in range(30)]
    write_numbers(tmp_path / "corpus", documents)
    build_datasets(arguments, NUMBERS)
    write_numbers(tmp_path / "corpus", [[2] * len(document) for document in documents])
    build_datasets(arguments, NUMBERS)  # other text of the same lengths
    for other in (documents[1:], [*documents, [1] * 20], [[1] * 50, *documents[1:]]):
        write_numbers(tmp_path / "corpus", other)
        with pytest.raises(ValueError, match=f"cache of {tmp_path}/corpus in {tmp_path}/cache is"):
            build_datasets(arguments, NUMBERS)


@pytest.mark.parametrize(
    ("name", "keep", "folder"),
    pairwise(name=["document", "sample", "shuffle"], keep=[0, 100, -8], folder=["cache", None]),
)
def test_an_index_cache_that_is_cut_off_is_named(
    name: str, keep: int, folder: str | None, tmp_path: Path
) -> None:
    arguments = namespace(
        data_path=[str(tmp_path / "corpus")],
        split="1,0,0",
        data_cache_path=folder and str(tmp_path / folder),
    )
    caches = tmp_path / (folder or "corpus/cache/GPTDataset_indices")
    write_numbers(tmp_path / "corpus", [[1] * 20] * 30)
    build_datasets(arguments, NUMBERS)
    (file,) = caches.glob(f"*train-{name}_index.npy")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{caches} are cut off .*{file.name}; remove"):
        build_datasets(arguments, NUMBERS)


def test_data_that_is_written_anew_has_a_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = namespace(data_path=["corpus"], split="1,0,0")
    for length in (20, 30):
        write_numbers(tmp_path / "corpus", [[1] * length] * 30)
        train, _, _ = build_datasets(arguments, NUMBERS)
        assert train.dataset.sequence_lengths[0] == length + 1


def test_a_cache_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    prefix = write_numbers(tmp_path / "corpus", [[1] * 20] * 30)
    Path(prefix).write_text("a file where the caches of the data would be")
    with pytest.raises(OSError, match=r"corpus/cache cannot be made .* give --data-cache-path"):
        build_datasets(namespace(data_path=[prefix], split="1,0,0"), NUMBERS)


@pytest.mark.seldom("7")
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_no_change_of_an_index_cache_goes_unnoticed(block: int, tmp_path: Path) -> None:
    prefix = write_numbers(tmp_path / "corpus", [[1] * (5 + 3 * number) for number in range(30)])
    arguments = namespace(data_path=[prefix], split="80,20,0", train_samples=300)
    train, _, _ = build_datasets(arguments, NUMBERS)
    lengths, split = train.dataset.sequence_lengths, train.indices
    cached = (train.document_index, train.sample_index, train.shuffle_index)
    assert len(cached[0]) > len(split)  # several epochs

    def check(documents: np.ndarray, samples: np.ndarray, order: np.ndarray) -> None:
        check_samples(lengths, split, documents, samples, order, arguments.seq_length)

    with patch.object(dataset_files, "BLOCK", block):
        check(*cached)
        for number in range(len(cached[1])):
            for column, change in ((0, 1), (0, -1), (1, 1), (1, -1), (1, -30)):
                samples = cached[1].copy()
                samples[number, column] += change
                with pytest.raises(ValueError, match=r"its|sample"):
                    check(cached[0], samples, cached[2])
        for number in range(len(cached[0]) - 1):
            documents = cached[0].copy()
            documents[number] = (documents[number] + 1) % 30
            with pytest.raises(ValueError, match=r"its|documents"):
                check(documents, *cached[1:])
        for wrong in (len(cached[1]) - 1, 2**31):
            order = cached[2].copy()
            order[3] = wrong
            with pytest.raises(ValueError, match="samples that it does not have"):
                check(*cached[:2], order)

# SPDX-License-Identifier: Apache-2.0
"""The recipes of fine-tuning: they begin where the pretraining ended, and losses fall.

Losses do not depend on how the work is divided: over ranks, sequences or experts.
"""

import runpy
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.examples.conftest import Shell, repository_in
from tests.examples.test_scripts import losses
from tests.support.pretrain.training_runs import NO_DROPOUT, SIZES, assert_close, build
from tests.support.rank_pool import run_ranks
from tests.support.warm_programs import ROOT

RECIPES = ROOT / "examples" / "finetune"
SHORT = ["--train-iters", "8", "--log-interval", "1", "--num-workers", "0"]


@pytest.fixture(scope="module")
def workplace(commands: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Make a folder in which the recipes share the text of their pretraining."""
    return Shell(repository_in(tmp_path_factory.mktemp("finetune")), commands)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "flags", "num_ranks"),
    [
        ("sft_packed", "", "1"),
        ("long_context", "--context-parallel-size 1", "2"),
        ("experts", "--expert-model-parallel-size 1", "2"),
    ],
    ids=["sft_packed", "long_context", "experts"],
)
def test_a_recipe_goes_on_from_the_pretrained_model_however_it_is_divided(
    recipe: str, flags: str, num_ranks: str, workplace: Shell
) -> None:
    command = ["bash", f"examples/finetune/{recipe}.sh", *SHORT]
    first = workplace.run(*command, BASE_ITERS="20")
    more = ("--exit-interval", "3", *flags.split())
    again = workplace.run(*command, *more, NPROC_PER_NODE=num_ranks)
    assert first.returncode == again.returncode == 0, first.stdout + again.stdout
    pretraining, _, fine_tuning = first.stdout.partition("saved checkpoint of iteration 20 to")
    before, found = list(losses(pretraining).values()), list(losses(fine_tuning).values())
    assert "loaded the weights of checkpoints/" in fine_tuning
    assert len(found) == 8 and abs(found[0] - before[-1]) < 0.3 < before[0] - before[-1]
    assert mean(found[-2:]) < mean(found[:2]) - 0.05
    assert_close(list(losses(again.stdout).values()), found[:3], 1e-5)


# ---- samples of the supervised fine-tuning


def packs_of(documents: list[list[int]], folder: Path, length: int) -> Any:
    builder = IndexedDatasetBuilder(str(folder / "some.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(str(folder / "some.idx"))
    names = runpy.run_path(str(RECIPES / "sft_packed.py"))
    return names["Packs"](str(folder / "some"), length, 9)


def test_recipes_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in RECIPES.iterdir()}
    assert len(lengths) >= 5 and max(lengths.values()) <= 60, lengths


def test_a_sample_has_whole_conversations_and_masks_prompts(tmp_path: Path) -> None:
    packs = packs_of([[1, 10, 2, 3], [4, 5, 10, 6], [7, 10, 8, 8], [0] * 20], tmp_path, 8)
    first, second, cut = packs
    assert len(packs) == 3
    assert first["tokens"].tolist() == [1, 10, 2, 4, 5, 10, 9, 9]
    assert first["labels"].tolist() == [10, 2, 3, 5, 10, 6, 9, 9]
    assert first["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1, 0, 0]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert first["attention_mask"][0, 4].tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert second["labels"].tolist() == [10, 8, 8] + [9] * 5
    assert cut["labels"].tolist() == [0] * 8 and not cut["loss_mask"].any()


def losses_of_packs(documents: list[list[int]], folder: str, line: str) -> list[list[float]]:
    """Job: the losses of the tokens of a pack, and of its conversations, each alone in a sample."""
    model = build(line).model[0]
    found = []
    for several in (documents, *([each] for each in documents)):
        sample = packs_of(several, Path(folder), 32)[0]
        names = ("tokens", "position_ids", "attention_mask", "labels")
        with torch.no_grad():
            output = model(
                *(sample[name][None] for name in names[:3]), labels=sample["labels"][None]
            )
        found.append(output[0, : sum(len(each) - 1 for each in several)].tolist())
    return found


def test_a_conversation_has_the_same_losses_in_a_pack_and_alone(tmp_path: Path) -> None:
    documents = [[1, 10, 2, 3], [4, 5, 10, 6, 7, 8], [7, 10, 8]]
    line = f"{SIZES} {NO_DROPOUT} --mock-data --vocab-size 99 --use-megatron-fsdp --lr 1e-3"
    line += " --train-iters 1 --position-embedding-type rope"
    ((pack, *alone),) = run_ranks(1, losses_of_packs, documents, str(tmp_path), line)
    assert_close(pack, [*chain(*alone)], 1e-5)

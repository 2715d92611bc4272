# SPDX-License-Identifier: Apache-2.0
"""--full-validation reads every sample of every validation set once, on any number of ranks."""

import json
from pathlib import Path

import pytest

from megatron.pretrain.data.samplers import WholeDataset
from tests.support.pretrain.arguments.command_lines import MOCK, problems
from tests.support.pretrain.number_corpora import (
    NUMBERS,
    NumberedSamples,
    microbatches,
    namespace,
    write_numbers,
)
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import (
    CORPUS,
    NO_DROPOUT,
    SIZES,
    STEPS,
    assert_close,
    error_of,
    train,
    trained,
)
from tests.support.rank_pool import run_ranks


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
@pytest.mark.parametrize("length", [1, 7, 8, 21])
@pytest.mark.parametrize(
    ("num_ranks", "stages", "passes"),
    [
        (1, None, {1: [1], 7: [4], 8: [4], 21: [4, 4, 3]}),
        (2, None, {1: [1], 21: [2, 2, 2]}),
        (2, 2, {1: [2], 21: [2, 2, 2]}),
    ],
    ids=["one", "two", "interleaved"],
)
def test_every_sample_counts_once(
    num_ranks: int,
    stages: int | None,
    passes: dict[int, list[int]],
    length: int,
    dataloader_type: str,
) -> None:
    args = namespace(
        dataloader_type=dataloader_type,
        data_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=stages,
    )
    whole = WholeDataset(NumberedSamples(length), args)
    assert whole.num_microbatches == passes.get(length, whole.num_microbatches)
    counted: list[int] = []
    for rank in range(num_ranks):
        iterator = microbatches(whole, args, rank=rank, ranks=num_ranks)
        for _ in range(sum(whole.num_microbatches)):
            batch = next(iterator)
            counted += batch["tokens"][batch["loss_mask"] == 1].tolist()
    assert sorted(counted) == list(range(length))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two data sets of 21 and 5 samples of 32 tokens."""
    folder = tmp_path_factory.mktemp("sets")
    counting = [[(3 * start + step) % 99 for step in range(48)] for start in range(14)]
    return (
        write_numbers(folder / "counting", counting),
        write_numbers(folder / "constant", [[7] * 42] * 4),
    )


def line(paths: str, flags: str = "") -> str:
    return (
        f"{SIZES} {STEPS} {NO_DROPOUT} --train-data-path {CORPUS} --valid-data-path {paths}"
        " --tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 1"
        f" --num-workers 0 --eval-iters 0 --train-iters 4 --eval-interval 2"
        f" --full-validation {flags}"
    )


MANY = "--multiple-validation-sets"


@pytest.mark.exhaustive
def test_losses_of_whole_sets_are_the_same_on_any_number_of_ranks(sets: tuple[str, str]) -> None:
    whole = line(" ".join(sets), MANY)
    (reference,) = run_ranks(1, train, f"{whole} --micro-batch-size 1")[0]
    assert list(reference.evaluations) == ["validation-0", "validation-1"]
    assert f"validation-0: 21 samples of {sets[0]}" in reference.lines
    assert f"validation-1: 5 samples of {sets[1]}" in reference.lines
    for ranks, flags in ((2, FSDP), (4, FSDP)):
        (record,) = run_ranks(ranks, train, f"{whole} {flags}")[0]
        assert [iteration for iteration, _ in record.evaluations["validation-1"]] == [2, 4]
        for name in reference.evaluations:
            assert_close(record.evaluated(name), reference.evaluated(name), 1e-5)


@pytest.mark.exhaustive
def test_losses_of_whole_sets_are_those_of_fewer_ranks_in_interleaved_pipelines(
    sets: tuple[str, str],
) -> None:
    stages = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    stages += " --num-layers 4"
    whole = line(" ".join(sets), f"{MANY} {stages}")
    # Stages have seeds of their own, so weights are those of other runs with as many stages.
    (reference,) = trained(whole)
    (record,) = run_ranks(4, train, f"{whole} {FSDP}")[0]
    for name in ("validation-0", "validation-1"):
        assert_close(record.evaluated(name), reference.evaluated(name), 1e-5)


@pytest.mark.exhaustive
def test_each_of_several_sets_has_the_loss_that_it_has_alone(sets: tuple[str, str]) -> None:
    first, second = sets
    both, one, other, blended = trained(
        line(f"{first} {second}", MANY), line(first), line(second), line(f"{first} {second}")
    )
    assert both.evaluated("validation-0") == one.evaluated("validation")
    assert both.evaluated("validation-1") == other.evaluated("validation")
    # All samples have as many tokens: the loss of both is the mean by their 21 and 5 samples.
    means = [
        (21 * a + 5 * b) / 26
        for a, b in zip(one.evaluated("validation"), other.evaluated("validation"))
    ]
    assert_close(blended.evaluated("validation"), means, 1e-6)


@pytest.mark.exhaustive
def test_a_resumed_run_has_the_losses_of_one_that_did_not_stop(
    sets: tuple[str, str], tmp_path: Path
) -> None:
    whole = line(
        " ".join(sets), f"{MANY} {FSDP} --log-interval 1 --tensorboard-dir {tmp_path}/logs"
    )
    saved = f"{whole} --save {tmp_path}/run --save-interval 2"
    straight, _, resumed, evaluated = trained(
        whole,
        f"{saved} --exit-interval 2",
        f"{saved} --load {tmp_path}/run",
        f"{whole} --load {tmp_path}/run --skip-train",
    )
    for name in ("validation-0", "validation-1"):
        assert resumed.evaluated(name) == straight.evaluated(name)[1:]
        assert evaluated.evaluated(name) == straight.evaluated(name)[1:]
    entries = [
        json.loads(text) for text in (tmp_path / "run/losses.jsonl").read_text().splitlines()
    ]
    kept = [entry["validation-1"] for entry in entries if "validation-1" in entry]
    assert kept == straight.evaluated("validation-1")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert {"lm loss validation-0", "lm loss validation-1"} <= set(events.Tags()["scalars"])


def test_validation_data_that_cannot_be_read_once_is_refused(
    sets: tuple[str, str], tmp_path: Path
) -> None:
    weighted = f"{MOCK} --full-validation --eval-interval 1".replace("--mock-data", "")
    found = problems(
        f"{weighted} --train-data-path {sets[0]} --valid-data-path 1 {sets[0]} 2 {sets[1]}"
    )
    assert found == [
        "--valid-data-path: --full-validation reads every sample once, so data sets have no"
        " weights: leave them out"
    ]
    found = problems(f"{weighted} --data-path {sets[0]} --multiple-validation-sets")
    assert found == ["--multiple-validation-sets needs --valid-data-path"]
    from megatron.pretrain.data.gpt_datasets import build_datasets

    short = write_numbers(tmp_path / "short", [[1] * 9])
    arguments = namespace(train_data_path=[sets[0]], valid_data_path=[short], full_validation=True)
    with pytest.raises(ValueError, match="short has 10 tokens, but one sample of --full-valid"):
        build_datasets(arguments, NUMBERS)


@pytest.mark.exhaustive
def test_a_damaged_tokenizer_is_one_message_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "damaged.model").write_bytes(b"no model")
    flags = f"--tokenizer-type Llama2Tokenizer --tokenizer-model {tmp_path}/damaged.model"
    command = f"{SIZES} {STEPS} --data-path {CORPUS} {flags}"
    error = error_of(command)
    assert "\n" not in error
    path = f"{tmp_path}/damaged.model"
    assert error.startswith(f"ValueError: {path}: no model that sentencepiece can")

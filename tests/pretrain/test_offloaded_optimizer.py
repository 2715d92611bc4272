# SPDX-License-Identifier: Apache-2.0
"""`--optimizer-cpu-offload` trains with the bits of a run that offloads nothing."""

from pathlib import Path

import pytest

from megatron.fsdp.backends.host_memory import HostMemory
from tests.support.fsdp.reference import Ranks
from tests.support.pretrain.arguments.command_lines import MOCK, parse, problems
from tests.support.pretrain.parity import LLAMA, MOE, OPTIM_OUTSIDE, Combination
from tests.support.pretrain.training_runs import Record, build, train, write_counting_corpus

RUN = "--train-iters 4 --lr-decay-iters 20 --eval-interval 2 --eval-iters 1"
OVERLAPPED = f"{RUN} --overlap-grad-reduce --overlap-param-gather"
OFFLOAD = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
PART = f"{OFFLOAD} --optimizer-offload-fraction 0.5 --use-torch-optimizer-for-cpu-offload"
ZERO3 = Combination(2, "", 3, LLAMA, OVERLAPPED)
RUNS = {
    "zero3 in part": (ZERO3, PART),
    "zero0": (Combination(2, "", 0, LLAMA, RUN), f"{OFFLOAD} --no-pin-cpu-grads"),
    "zero1 bf16": (Combination(2, "", 1, LLAMA, f"{OVERLAPPED} --bf16"), OFFLOAD),
    "zero2 fp16": (Combination(2, "", 2, LLAMA, f"{RUN} --fp16"), PART),
    "per token": (Combination(2, "", 3, LLAMA, f"{RUN} --calculate-per-token-loss"), OFFLOAD),
    "experts": (Combination(2, "ep2", 2, MOE, RUN), PART),
    "hybrid": (Combination(4, "inst2", 3, LLAMA, RUN, OPTIM_OUTSIDE), OFFLOAD),
    "tp2": (Combination(2, "tp2", 3, LLAMA, RUN), OFFLOAD),
}


def assert_same_bits(record: Record, expected: Record) -> None:
    assert record.losses == expected.losses
    assert record.evaluations == expected.evaluations
    for column in ("grad-norm", "params-norm"):
        assert record.column(column) == expected.column(column)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_bits_of_one_without_offload(ranks: Ranks, name: str) -> None:
    write_counting_corpus()
    combination, flags = RUNS[name]
    combination = combination.with_few_microbatches()
    for plain, offloaded in ranks(
        combination.ranks, train, combination.ours, f"{combination.ours} {flags}"
    ):
        assert_same_bits(offloaded, plain)


def shares(line: str) -> list[float]:
    """Return the share of the elements of each model chunk that is offloaded."""
    found = []
    for chunk in build(line).model:
        groups = chunk.module.groups
        away = [group for group in groups if isinstance(group.memory, HostMemory)]
        total = sum(group.layout.numel for group in groups)
        found.append(sum(group.layout.numel for group in away) / total)
    return found


def test_flags_choose_what_is_offloaded(ranks: Ranks) -> None:
    write_counting_corpus()
    assert ranks(2, shares, ZERO3.ours) == [[0.0]] * 2
    assert ranks(2, shares, f"{ZERO3.ours} {OFFLOAD}") == [[1.0]] * 2
    for [share] in ranks(2, shares, f"{ZERO3.ours} {PART}"):
        assert 0.5 <= share < 1.0


@pytest.mark.exhaustive
def test_a_checkpoint_resumes_without_offload_and_with_it(ranks: Ranks, tmp_path: Path) -> None:
    write_counting_corpus()
    saving = f"{ZERO3.ours} --save {tmp_path} --save-interval 2 --no-save-rng --no-load-rng"
    resumed = f"{ZERO3.ours} --load {tmp_path} --ckpt-step 2 --no-load-rng"
    for whole, plain, offloaded in ranks(
        2, train, f"{saving} {OFFLOAD}", resumed, f"{resumed} {OFFLOAD}"
    ):
        assert plain.losses == offloaded.losses == whole.losses[2:]


FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
REFUSED = {
    "--optimizer-cpu-offload": "--optimizer-cpu-offload needs --use-megatron-fsdp",
    "--optimizer-offload-fraction 0.5": "needs --optimizer-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d": "needs --optimizer-cpu-offload",
    f"{FSDP} --optimizer-cpu-offload --optimizer-offload-fraction 1.5": "must be from 0 to 1",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_wrong_flags_are_refused(flags: str) -> None:
    assert any(REFUSED[flags] in problem for problem in problems(f"{MOCK} {flags}"))


def test_where_transformer_engine_is_installed_offload_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = "megatron.pretrain.arguments.machine_rules"
    line = f"{MOCK} {FSDP} --optimizer-cpu-offload"
    assert parse(line)[0].optimizer_cpu_offload
    monkeypatch.setattr(f"{rules}.USING_PYTORCH_OPTIMIZER", False)
    assert any("kernels of Transformer Engine" in problem for problem in problems(line))

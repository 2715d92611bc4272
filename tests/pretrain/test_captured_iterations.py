# SPDX-License-Identifier: Apache-2.0
"""Captured iterations have the bits of a run without graphs; what is not captured is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.mcore_adapter.captured_iterations import captures_iterations
from tests.support.fsdp.reference import Ranks
from tests.support.pretrain.arguments.command_lines import MOCK, problems
from tests.support.pretrain.captured_runs import give_another_size, run_on_the_model
from tests.support.pretrain.parity import LLAMA, RECOMPUTED, Combination
from tests.support.pretrain.training_runs import train, write_counting_corpus

WITHOUT_CHECKS = "--no-check-for-nan-in-loss-and-grad"
RUN = (
    f"{WITHOUT_CHECKS} --train-iters 4 --lr-decay-iters 20 --eval-interval 2 --eval-iters 3"
    " --overlap-grad-reduce"
)
GATHERS = f"{RUN} --overlap-param-gather"
ROWS = {
    "zero3": Combination(2, "", 3, LLAMA, GATHERS),
    "zero0": Combination(2, "", 0, LLAMA, RUN),
    "zero1 bf16": Combination(2, "", 1, LLAMA, f"{GATHERS} --bf16"),
    "tp2": Combination(2, "tp2", 3, LLAMA, RUN),
    "cp2 recomputed": Combination(2, "cp2", 3, LLAMA, f"{GATHERS} {RECOMPUTED}"),
}
LINES = {name: row.with_few_microbatches().ours for name, row in ROWS.items()}
LINES["ddp"] = ROWS["zero0"].with_few_microbatches().line
# Both graphs are captured while Python knows the weights of the last step as gathered: the third
# step follows an evaluation, and the third pass of that one follows two others.
REPLAYS = 2 + 3 * 3 - 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LINES)
def test_iterations_have_the_bits_of_a_run_without_graphs(ranks: Ranks, name: str) -> None:
    write_counting_corpus()
    plain = ranks(2, train, LINES[name])
    captured = ranks(2, run_on_the_model, LINES[name])
    for [expected], (record, num_replays, reports) in zip(plain, captured, strict=True):
        assert not reports, "\n".join(reports)
        assert num_replays == REPLAYS
        assert record.losses == expected.losses
        assert record.column("grad-norm") == expected.column("grad-norm")
        assert record.column("params-norm") == expected.column("params-norm")
        assert record.evaluations == expected.evaluations


def test_a_microbatch_of_another_size_is_an_error(ranks: Ranks) -> None:
    (message,) = ranks(1, give_another_size)
    assert message == (
        "tokens has shape (1, 4), but the graph of an iteration was captured with (2, 4): sizes"
        " must not change"
    )


GPU = {"cuda": True}
WHOLE = "--cuda-graph-impl local --cuda-graph-scope full_iteration"
REFUSED = {
    "--fp16": "does not go with --fp16: loss scales",
    "--timing-log-level 1": "does not go with --timing-log-level: timers wait",
    "--calculate-per-token-loss": "does not go with --calculate-per-token-loss: Megatron-Core",
    "--num-experts 4": "does not go with --num-experts: experts read",
    "--skip-train": "does not go with --skip-train: steps without",
    "--mtp-num-layers 1": "does not go with --mtp-num-layers: multi-token",
    "--fp8-format hybrid": "does not go with --fp8-format: FP8",
    "--fp4-format e2m1": "does not go with --fp4-format: FP4",
    "--pipeline-model-parallel-size 2": "does not go with --pipeline-model-parallel-size: Mega",
    "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather": (
        "does not go with --overlap-param-gather without --use-megatron-fsdp"
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_is_not_captured_is_refused_with_the_reason(flags: str) -> None:
    found = problems(f"{MOCK} {WHOLE} {WITHOUT_CHECKS} {flags}", **GPU)
    assert any(each.startswith(f"--cuda-graph-impl local {REFUSED[flags]}") for each in found)


def test_all_problems_of_a_captured_run_are_told_at_once() -> None:
    found = problems(f"{MOCK} {WHOLE} --timing-log-level 1 --cuda-graph-warmup-steps 1")
    starts = (
        "--cuda-graph-impl local: CUDA graphs need GPUs",
        "--cuda-graph-impl local does not go with --timing-log-level: ",
        f"--cuda-graph-impl local needs {WITHOUT_CHECKS}: the check reads losses on the host",
        "--cuda-graph-warmup-steps must be at least 2, got 1",
    )
    assert len(found) == len(starts)
    assert all(any(each.startswith(start) for each in found) for start in starts)


@pytest.mark.parametrize("flags", ["local", "transformer_engine", "local --cuda-graph-scope attn"])
@pytest.mark.parametrize("fsdp", ["", "--use-megatron-fsdp"], ids=["ddp", "fsdp"])
def test_graphs_of_layers_are_refused_with_the_reason(flags: str, fsdp: str) -> None:
    found = problems(f"{MOCK} {fsdp} --cuda-graph-impl {flags}", **GPU)
    (problem,) = [each for each in found if each.startswith("--cuda-graph-impl")]
    assert "past the hooks that gather their weights" in problem


def test_the_wrapper_refuses_graphs_of_layers_too() -> None:
    config: Any = SimpleNamespace(cuda_graph_impl="local", cuda_graph_scope=["attn"])
    with pytest.raises(ValueError, match="past the hooks that gather their weights"):
        captures_iterations(config)
    config.cuda_graph_scope = ["full_iteration"]
    assert captures_iterations(config)

# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that Transformer Engine computes after the backward of a layer, with FSDP."""

from typing import Any
from unittest.mock import patch

import pytest

from tests.support.mcore_adapter.fused_training import train_fused
from tests.support.pretrain.parity import ALLTOALL, LEVELS, Combination
from tests.support.pretrain.training_runs import build
from tests.support.rank_pool import run_ranks
from tests.support.transformer_engine.training import LAYERS, Run, runner, train
from tools import transformer_engine_on_cpu

NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 3, 3, 2
MODEL = (
    f"{LAYERS} --num-layers {NUM_LAYERS} --global-batch-size 12 --train-iters {NUM_STEPS}"
    " --num-experts 4 --disable-bias-linear --expert-model-parallel-size 2"
    " --moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights"
)
GROUPED = "--moe-grouped-gemm"
OVERLAPPED = "--overlap-moe-expert-parallel-comm"
DELAYED = f"{OVERLAPPED} --delay-wgrad-compute"

Results = tuple[list[dict[str, Any]], int]


def results(*command_lines: str, fused: bool = False) -> list[Results]:
    """Job: train; return what steps report, and how many weight gradients were computed late."""
    transformer_engine_on_cpu.use()
    from transformer_engine.pytorch.module._common import WeightGradStore

    pop, found = WeightGradStore.pop, []
    for line in command_lines:
        with patch.object(WeightGradStore, "pop", autospec=True, side_effect=pop) as late:
            record, products = train_fused(line) if fused else (*train(line), 0)
        assert fused == (products > 0)
        found.append((record.steps, late.call_count))
    return found


@pytest.fixture(scope="module", params=[2])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that trains with each of some flags; it returns a rank's results."""

    def run_lines(*flags: str, level: int = 3, fused: bool = False) -> list[Results]:
        sharded = f"--use-megatron-fsdp --data-parallel-sharding-strategy {LEVELS[level]}"
        return runner(request.param, f"{MODEL} {sharded}")(*flags, job=results, fused=fused)

    return run_lines


four_ranks = pytest.mark.parametrize("run", [4], indirect=True)


def num_products(of_a_layer: int) -> int:
    """Return how many weight gradients a run computes, with so many weights in a layer."""
    return NUM_STEPS * NUM_MICROBATCHES * NUM_LAYERS * of_a_layer


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("level", "fused"),
    [(0, True), (2, False), (3, True)],
    ids=["0-fused", "2-autograd", "3-fused"],
)
def test_late_weight_gradients_have_the_bits_of_the_plain_schedule(
    run: Run, level: int, fused: bool
) -> None:
    plain, delayed = run(GROUPED, f"{GROUPED} {DELAYED}", level=level, fused=fused)
    assert plain[0] == delayed[0]
    assert (plain[1], delayed[1]) == (0, num_products(4))


OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
RECOMPUTED = "--recompute-granularity selective --recompute-modules moe_act layernorm"
MODELS = {
    "experts-one-by-one": (f"--grad-reduce-in-bf16 {OVERLAP}", 6),
    "shared-experts": (f"{GROUPED} --moe-shared-expert-intermediate-size 32 {RECOMPUTED}", 6),
    "dense-layers-with-bias": (f"{GROUPED} --moe-layer-freq ([0]*1+[1]*2) --add-qkv-bias", 4),
    "fp8": (f"{GROUPED} --fp8-format hybrid --fp8-param-gather --fp8-recipe tensorwise", 4),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ("experts-one-by-one", False),
        ("shared-experts", True),
        ("dense-layers-with-bias", False),
        ("fp8", True),
    ],
)
def test_late_weight_gradients_of_other_models_have_the_same_bits(
    run: Run, model: str, fused: bool
) -> None:
    flags, of_a_layer = MODELS[model]
    overlapped, delayed = run(f"{flags} {OVERLAPPED}", f"{flags} {DELAYED}", fused=fused)
    assert overlapped[0] == delayed[0]
    assert (overlapped[1], delayed[1]) == (0, num_products(of_a_layer))


@pytest.mark.exhaustive
@four_ranks
@pytest.mark.parametrize(
    "axes",
    [
        "--global-batch-size 24",
        "--global-batch-size 16 --num-layers 4 --pipeline-model-parallel-size 2"
        " --num-virtual-stages-per-pipeline-rank 2",
    ],
    ids=["dp2", "vpp2"],
)
def test_late_weight_gradients_have_the_same_bits_on_four_ranks(run: Run, axes: str) -> None:
    overlapped, delayed = run(*(f"{GROUPED} {axes} {each}" for each in (OVERLAPPED, DELAYED)))
    assert overlapped[0] == delayed[0]
    assert overlapped[1] == 0 < delayed[1]


def refusal_of_units_inside_of_layers() -> str:
    """Job: build a model whose layers have units inside, for late weight gradients."""
    flags = Combination(2, "ep2", 3, ALLTOALL, f"--bf16 {OVERLAPPED}").ours
    overrides = ("delay_wgrad_compute", "megatron_fsdp_enable_fine_grained_param_gather")
    with pytest.raises(NotImplementedError) as caught:
        build(flags, **dict.fromkeys(overrides, True))
    return str(caught.value)


def test_units_inside_of_layers_are_refused() -> None:
    for message in run_ranks(2, refusal_of_units_inside_of_layers):
        assert "delay_wgrad_compute with units inside of layers: their gradients" in message
        assert "leave out enable_fine_grained_param_gather" in message

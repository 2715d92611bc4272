# SPDX-License-Identifier: Apache-2.0
"""Training in FP8 and FP4 with Transformer Engine's layers, against Megatron-Core's own DDP.

Losses are compared bit by bit: the kernels and the values they get are the same. Ranks with other
microbatches find other scales, so that numbers of ranks differ.
"""

from __future__ import annotations

import functools

import pytest

from tests.support.mcore_adapter.fused_training import train_fused
from tests.support.pretrain.parity import LLAMA, RECOMPUTED
from tests.support.pretrain.training_runs import Record
from tests.support.transformer_engine.ranks import ranks
from tests.support.transformer_engine.training import (
    FP8,
    LAYERS,
    STORED,
    Run,
    runner,
    train,
)

SHORT = "--train-iters 3"
"""The second step has weights that were quantized after an update, the third scales of two."""
FSDP = "--use-megatron-fsdp"
DDP = "--use-distributed-optimizer"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-grouped-gemm --expert-model-parallel-size 2"
DISPATCHED = f"{EXPERTS} --moe-token-dispatcher-type alltoall"


@pytest.fixture(scope="module", params=[2])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that trains on ranks with Transformer Engine; it returns the records."""
    return runner(request.param, f"{LAYERS} {SHORT}")


four_ranks = pytest.mark.parametrize("run", [4], indirect=True)


def assert_same(record: Record, reference: Record) -> None:
    """Compare losses bit by bit; norms are sums over parts of other sizes."""
    assert record.losses == reference.losses
    assert record.column("grad-norm") == pytest.approx(reference.column("grad-norm"), rel=1e-4)


@functools.cache
def losses_in_bf16() -> list[float]:
    """Return the losses of a run on two ranks without FP8."""
    return ranks(2)(train, f"{LAYERS} {SHORT} {FSDP}")[-1][0].losses


STRATEGIES = {
    "delayed": ("optim", "optim_grads_params"),
    "tensorwise": ("optim", "optim_grads", "optim_grads_params"),
    "blockwise": ("optim", "optim_grads", "optim_grads_params"),
    "mxfp8": ("optim_grads", "optim_grads_params"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", STRATEGIES)
def test_strategies_train_as_the_ddp_of_megatron_core(run: Run, recipe: str) -> None:
    chosen = f"--fp8-recipe {recipe}"
    needs = "--reuse-grad-buf-for-mxfp8-param-ag" if recipe == "mxfp8" else ""
    ddp, computed, *stored = run(
        f"{DDP} {STORED} {chosen} {needs}",
        f"{FSDP} {FP8} {chosen}",
        *(
            f"{FSDP} {STORED} {chosen} --data-parallel-sharding-strategy {strategy}"
            for strategy in STRATEGIES[recipe]
        ),
    )
    for record in (computed, *stored):
        assert_same(record, ddp)
    plain = losses_in_bf16()
    assert ddp.losses != plain
    assert ddp.losses == pytest.approx(plain, rel=2e-3)


TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
MODELS = {
    "llama": LLAMA,
    "experts": f"{DISPATCHED} --fp8-recipe tensorwise",
    "recipe": "--fp8-margin 1 --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
    " --fp8-format e4m3 --no-fp8-wgrad",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_models_train_as_the_ddp_of_megatron_core(run: Run, model: str) -> None:
    sharded, ddp = run(f"{FSDP} {STORED} {MODELS[model]}", f"{DDP} {STORED} {MODELS[model]}")
    assert_same(sharded, ddp)


OUTER = "--num-distributed-optimizer-instances 2"


@pytest.mark.exhaustive
@four_ranks
def test_four_ranks_train_alike_with_an_outer_axis(run: Run) -> None:
    flags = f"{FSDP} {STORED} --fp8-recipe mxfp8"
    outer = (OUTER, f"{OUTER} --outer-dp-sharding-strategy optim")
    flat, replicated, sharded = run(flags, *(f"{flags} {each}" for each in outer))
    assert_same(replicated, flat)
    assert_same(sharded, flat)


@pytest.mark.exhaustive
@four_ranks
@pytest.mark.parametrize("axes", [TENSOR_PARALLEL, PIPELINE, DISPATCHED], ids=["tp", "pp", "ep"])
def test_four_ranks_train_as_the_ddp_of_megatron_core(run: Run, axes: str) -> None:
    sharded, ddp = run(f"{FSDP} {STORED} {axes}", f"{DDP} {STORED} {axes}")
    assert_same(sharded, ddp)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [1], indirect=True)
def test_a_single_rank_trains_as_the_ddp_of_megatron_core(run: Run) -> None:
    sharded, ddp = run(f"{FSDP} {STORED}", f"{DDP} {STORED}")
    assert_same(sharded, ddp)


@pytest.mark.exhaustive
def test_recomputed_layers_and_fused_weight_gradients_change_nothing(run: Run) -> None:
    flags = f"{FSDP} {STORED} --fp8-recipe tensorwise"
    plain, recomputed = run(flags, f"{flags} {RECOMPUTED}")
    assert_same(recomputed, plain)
    fused, products = run(f"{flags} {RECOMPUTED} --overlap-grad-reduce", job=train_fused)
    assert_same(fused, plain)
    assert products >= 3 * 2 * 4  # steps, layers and their matrices


@pytest.mark.exhaustive
def test_layers_in_bf16_train_as_without_fp8(run: Run) -> None:
    flags = f"{FSDP} {STORED} --fp8-recipe tensorwise --first-last-layers-bf16"
    plain, all_of_them, first, last = run(
        FSDP,
        flags,
        f"{flags} --num-layers-at-end-in-bf16 0",
        f"{flags} --num-layers-at-start-in-bf16 0",
    )
    assert_same(all_of_them, plain)
    assert len({tuple(record.losses) for record in (plain, first, last)}) == 3


@pytest.mark.exhaustive
def test_padded_tokens_of_experts_change_little(run: Run) -> None:
    # Losses differ from the fourth step on.
    flags = f"{FSDP} {STORED} {DISPATCHED} --train-iters 4"
    plain, padded = run(flags, f"{flags} --moe-router-padding-for-quantization")
    assert padded.losses == pytest.approx(plain.losses, rel=1e-3)
    assert padded.losses != plain.losses


@pytest.mark.exhaustive
def test_fp4_computes_as_with_the_ddp_of_megatron_core(run: Run) -> None:
    ddp, sharded = run(f"{DDP} --fp4-format e2m1", f"{FSDP} --fp4-format e2m1")
    assert_same(sharded, ddp)
    assert ddp.losses != losses_in_bf16()

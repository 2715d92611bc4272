# SPDX-License-Identifier: Apache-2.0
"""Runs under every pair of features give the numbers of Megatron-Core's DDP.

`benchmarks/parity/table.py` has more combinations.
"""

from itertools import pairwise

import pytest

from benchmarks.parity.table import COVERING, PER_TOKEN
from tests.support.pretrain.parity import (
    GPT2,
    LLAMA,
    MOE,
    OPTIM_OUTSIDE,
    SHORT,
    TIED,
    Combination,
    measure,
    runs_of,
)
from tests.support.pretrain.training_runs import assert_same_run, trained

STEPS = 3
"""The second uses weights that the first has changed, the third an optimizer with state."""

ROWS = {row.name: row for row in sorted(COVERING, key=lambda row: (row.ranks, row.layout))}
"""Rows of one layout follow each other and share its process groups."""


@pytest.mark.always(
    "4 ranks, pp2 vpp2, level 3, llama, overlap-grad-reduce, overlap-param-gather",
    "2 ranks, dp, level 3, mtp",
)
@pytest.mark.parametrize("name", ROWS)
def test_losses_and_norms_are_those_of_megatron_cores_data_parallelism(name: str) -> None:
    assert not measure(ROWS[name].with_few_microbatches(), STEPS).problems(ROWS[name])


EVALUATED = f"{SHORT} --eval-iters 1 --eval-interval 1 --overlap-grad-reduce"
FP16 = "--train-iters 6 --fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 1"

OF_EMBEDDINGS = "--embedding-data-parallel-sharding-strategy optim"

FEATURES = {
    "evaluation_pp2": Combination(2, "pp2", 3, LLAMA, EVALUATED),
    "evaluation_vpp2": Combination(2, "pp2 vpp2", 3, LLAMA, EVALUATED, layers=4),
    # Both sum gradients in float32: DDP's sums in float16 overflow where those of FSDP do not.
    "fp16": Combination(2, "dp", 3, GPT2, f"{FP16} --accumulate-allreduce-grads-in-fp32"),
    "fp16_tp2": Combination(2, "tp2", 3, LLAMA, FP16),
    "fp16_pp2": Combination(2, "pp2", 3, LLAMA, FP16),
    "decoupled_lr_pp2": Combination(
        2, "pp2", 3, LLAMA, f"{SHORT} --decoupled-lr 2e-2 --decoupled-min-lr 1e-3"
    ),
    "clip_grad_hybrid": Combination(
        4, "inst2", 3, LLAMA, f"{SHORT} --clip-grad 0.1", OPTIM_OUTSIDE
    ),
    "statistics_tp2_zero0": Combination(4, "tp2", 0, LLAMA, SHORT),
    "statistics_pp2_tied": Combination(2, "pp2", 3, TIED, SHORT),
    "statistics_ep2_zero0": Combination(2, "ep2", 0, MOE, SHORT),
    "embeddings_pp2_tied": Combination(2, "pp2", 3, TIED, SHORT, OF_EMBEDDINGS),
    "embeddings_vpp2": Combination(2, "pp2 vpp2", 3, LLAMA, SHORT, OF_EMBEDDINGS, layers=4),
    "embeddings_hybrid": Combination(
        4, "inst2", 3, LLAMA, SHORT, f"{OPTIM_OUTSIDE} {OF_EMBEDDINGS}"
    ),
    "per_token_loss_cp2": Combination(2, "cp2", 3, LLAMA, f"{SHORT} {PER_TOKEN}"),
    "per_token_loss_tp2_sp": Combination(2, "tp2 sp", 3, LLAMA, f"{SHORT} {PER_TOKEN}"),
}


@pytest.mark.always("statistics_pp2_tied")
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_the_numbers_of_ddp(feature: str) -> None:
    combination = FEATURES[feature].with_few_microbatches()
    ddp, fsdp = runs_of(combination)
    low = FP16 in combination.flags
    assert_same_run(fsdp, ddp, loss=1e-2 if low else 1e-5, norm=1e-2 if low else 1e-5)
    if low:
        assert any(ddp.column("skipped")) and not all(ddp.column("skipped"))
        assert any(later > earlier for earlier, later in pairwise(ddp.column("loss-scale")))
    else:
        assert fsdp.column("num-zeros") == ddp.column("num-zeros")
    if EVALUATED in combination.flags:
        assert [len(losses) for losses in ddp.evaluations.values()] == [3, 1]


@pytest.mark.exhaustive
def test_how_weights_are_gathered_does_not_change_a_number() -> None:
    row = Combination(
        2, "dp", 3, LLAMA, f"{SHORT} --overlap-grad-reduce", fsdp="--overlap-param-gather"
    )
    line = row.with_few_microbatches().ours
    flags = ("--megatron-fsdp-enable-fine-grained-param-gather", "--create-all-gather-group")
    plain, *others = trained(line, *(f"{line} {flag}" for flag in flags))
    for other in others:
        # Weights lie in other places, so sums over them have other roundings.
        assert_same_run(other, plain, loss=1e-6, norm=1e-6)

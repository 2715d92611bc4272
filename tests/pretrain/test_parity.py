# SPDX-License-Identifier: Apache-2.0
"""A part of the table of combinations that has every axis, strategy and model in it; ``python -m tests.pretrain.parity`` runs all."""

import pytest

from tests.pretrain.parity import TABLE, measure

COVERING = (
    "4 ranks, tp2, level 0, llama",
    "4 ranks, tp2 sp, level 3, llama",
    "2 ranks, pp2, level 3, gpt2",
    "4 ranks, pp2, level 0, gpt2",
    "4 ranks, pp2 vpp2, level 1, llama, overlap-grad-reduce",
    "4 ranks, pp2 vpp2, level 3, llama, overlap-grad-reduce, overlap-param-gather",
    "4 ranks, cp2, level 3, llama",
    "4 ranks, ep2, level 2, moe shared",
    "4 ranks, ep2, level 3, moe bias",
    "4 ranks, tp2 sp ep2 etp2, level 3, moe",
    "4 ranks, inst2, level 1, llama",
    "4 ranks, inst2 ep2, level 3, moe alltoall, outer-dp-sharding-strategy optim",
    "4 ranks, tp2, level 3, mla qk-layernorm",
    "4 ranks, pp2, level 3, mtp",
    "4 ranks, pp2, level 3, gpt2, bf16",
    "4 ranks, ep2, level 3, moe alltoall, calculate-per-token-loss",
    "8 ranks, tp2 sp pp2 ep2 etp1, level 3, deepseek mtp",
)
STEPS = 3
"""The second begins with weights that the first has changed, the third with an optimizer whose state the second has used."""
ROWS = {row.name: row for row in TABLE}


def test_the_table_is_large_and_its_rows_have_names_of_their_own():
    assert len(ROWS) == len(TABLE) >= 40


@pytest.mark.parametrize("name", COVERING)
def test_losses_and_norms_are_those_of_megatron_cores_data_parallelism(name):
    assert not measure(ROWS[name], STEPS).problems(ROWS[name])

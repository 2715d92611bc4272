# SPDX-License-Identifier: Apache-2.0
"""Gradients that tensor-parallel ranks sum or average are those of DDP."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron.pretrain import loop
from tests.support.pretrain.parity import DEEPSEEK, GPT2, MLA, Combination
from tests.support.pretrain.training_runs import name_of, pretrain
from tests.support.rank_pool import run_ranks

ONE_STEP = "--train-iters 1"


def final_gradients(command_line: str) -> dict[str, torch.Tensor]:
    """Job: return the first step's final gradients of this rank, alone on its data axis."""
    gradients: dict[str, torch.Tensor] = {}
    forward_backward = loop.forward_backward

    def record(run: loop.TrainingRun, *args: Any, **kwargs: Any) -> Any:
        result = forward_backward(run, *args, **kwargs)
        for chunk in run.model:
            for name, parameter in chunk.named_parameters():
                own = (
                    parameter.grad.to_local()
                    if isinstance(parameter, DTensor)
                    else parameter.main_grad
                )
                gradients[name_of(name)] = own.flatten().clone()
        return result

    with patch.object(loop, "forward_backward", record):
        pretrain(f"{command_line} {ONE_STEP}")
    return gradients


SUMMED = {
    "norms_tp2_sp": (Combination(2, "tp2 sp", 3, GPT2), "layernorm"),
    "router_and_norms_tp2_sp_ep2": (
        Combination(2, "tp2 sp ep2 etp1", 3, DEEPSEEK, layers=4),
        "router.weight",
    ),
    "compressed_queries_tp2": (
        Combination(2, "tp2", 3, f"{MLA} --qk-layernorm"),
        "q_layernorm.weight",
    ),
}


@pytest.mark.always("norms_tp2_sp")
@pytest.mark.parametrize("case", SUMMED)
def test_gradients_that_tensor_ranks_sum_or_average_are_those_of_ddp(case: str) -> None:
    combination, trap = SUMMED[case]
    combination = combination.with_few_microbatches()
    theirs = run_ranks(combination.ranks, final_gradients, combination.reference)
    ours = run_ranks(combination.ranks, final_gradients, combination.ours)
    for gradients, expected in zip(ours, theirs):
        # Experts have local names without FSDP, global ones with it.
        shared = [name for name in expected if "local_experts" not in name]
        assert any(trap in name for name in shared)
        for name in shared:
            bound = 1e-5 * float(expected[name].abs().max()) + 1e-9
            torch.testing.assert_close(
                gradients[name], expected[name], rtol=1e-5, atol=bound, msg=f"{case}: {name}"
            )

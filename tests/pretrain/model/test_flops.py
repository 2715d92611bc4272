# SPDX-License-Identifier: Apache-2.0
"""The number of operations is what torch counts in a forward and backward."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.pretrain.model.flops import attention_multiply_adds, training_flops
from tests.support.pretrain.parity import DEEPSEEK, GPT2, LLAMA, MLA, MOE_SHARED, MTP, Combination
from tests.support.pretrain.training_runs import build
from tests.support.rank_pool import run_ranks


def counted_and_expected(line: str) -> tuple[float, float]:
    """Job: operations of one sequence, by torch and by the formula."""
    run = build(line)
    args = run.args
    tokens = torch.arange(args.seq_length + 1)[None] % 90
    mask = torch.ones(1, 1, args.seq_length, args.seq_length).triu(1).bool()
    with FlopCounterMode(display=False) as counter:
        output = run.model[0](
            tokens[:, :-1],
            torch.arange(args.seq_length)[None],
            mask,
            labels=tokens[:, 1:].contiguous(),
        )
        output.sum().backward()
    expected = training_flops(args, 1)
    # The layers for CPU compute both halves of the scores, also the one that is masked.
    args.seq_length *= 2
    twice = attention_multiply_adds(args)
    args.seq_length //= 2
    masked = (twice - attention_multiply_adds(args)) * (
        args.num_layers + (args.mtp_num_layers or 0)
    )
    return counter.get_total_flops(), expected + 6 * masked * args.seq_length


@pytest.mark.always("gpt2", "mtp")
@pytest.mark.parametrize(
    "model",
    [GPT2, LLAMA, MOE_SHARED, MLA, f"{LLAMA} {MTP}", DEEPSEEK],
    ids=["gpt2", "llama", "moe", "mla", "mtp", "deepseek"],
)
def test_torch_counts_as_many(model: str) -> None:
    line = Combination(1, "dp", 3, model, layers=4).line
    counted, expected = run_ranks(1, counted_and_expected, line)[0]
    assert counted == pytest.approx(expected, rel=0.01)

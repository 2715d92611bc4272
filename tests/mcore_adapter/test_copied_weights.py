# SPDX-License-Identifier: Apache-2.0
"""Weights of which several ranks have copies stay equal."""

import itertools

import pytest
import torch

from tests.support.pretrain.parity import GPT2, MOE_BIAS, TIED, Combination
from tests.support.pretrain.training_runs import name_of, pretrain_with
from tests.support.rank_pool import run_ranks


def final_weights(command_line: str) -> dict[str, tuple[bool, torch.Tensor]]:
    """Job: train; return this rank's weights and whether tensor parallelism divides them."""
    _, model = pretrain_with(command_line)
    parameters = itertools.chain.from_iterable(chunk.named_parameters() for chunk in model)
    return {
        name_of(name): (
            getattr(parameter, "tensor_model_parallel", False),
            parameter.to_local().detach(),
        )
        for name, parameter in parameters
    }


@pytest.mark.always("no_shard")
@pytest.mark.parametrize("level", [0, 3], ids=["no_shard", "optim_grads_params"])
def test_both_copies_of_a_tied_embedding_stay_equal(level: int) -> None:
    name = "embedding.word_embeddings.weight"
    combination = Combination(4, "pp2", level, TIED, "--train-iters 3").with_few_microbatches()
    first, second, *last_stage = run_ranks(4, final_weights, combination.ours)
    for on_first, on_last in zip((first, second), last_stage):
        assert on_first.keys() & on_last.keys() == {name}
        assert on_first[name][1].numel() and torch.equal(on_first[name][1], on_last[name][1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["tp2", "tp2 sp"])
def test_what_tensor_ranks_have_copies_of_stays_equal(layout: str) -> None:
    combination = Combination(2, layout, 3, GPT2, "--train-iters 3").with_few_microbatches()
    first, second = run_ranks(2, final_weights, combination.ours)
    copies = {name for name, (is_divided, _) in first.items() if not is_divided}
    assert {"decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc2.bias"} <= copies
    for name, (is_divided, weight) in first.items():
        assert torch.equal(weight, second[name][1]) is not is_divided, name


def expert_bias_of(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the routers' biases by name."""
    buffers = itertools.chain.from_iterable(chunk.named_buffers() for chunk in model)
    return {name_of(name): buffer.clone() for name, buffer in buffers if "expert_bias" in name}


def final_expert_bias(*command_lines: str) -> list[dict[str, torch.Tensor]]:
    """Job: the routers' biases after each run."""
    models = [pretrain_with(command_line)[1] for command_line in command_lines]
    return [expert_bias_of(model) for model in models]


@pytest.mark.exhaustive
def test_the_routers_bias_is_the_same_on_all_ranks_and_with_ddp() -> None:
    combination = Combination(2, "ep2", 3, MOE_BIAS, "--train-iters 3").with_few_microbatches()
    (theirs, ours), (_, of_other_rank) = run_ranks(
        2, final_expert_bias, combination.reference, combination.ours
    )
    assert len(ours) == 2 and all(bias.any() for bias in ours.values())
    for name, bias in ours.items():
        assert torch.equal(bias, theirs[name]) and torch.equal(bias, of_other_rank[name])

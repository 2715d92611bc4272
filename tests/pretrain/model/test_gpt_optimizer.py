# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run: its groups, and the weight decay and rate of every parameter."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.optimizer import DistributedOptimizer

from megatron.pretrain.model.gpt_model import build_model
from megatron.pretrain.model.gpt_optimizer import build_optimizer
from tests.support.pretrain.parity import LLAMA, Combination
from tests.support.pretrain.saved_runs import FSDP, SIX
from tests.support.pretrain.training_runs import SMALL, build, name_of, prepare, train, trained
from tests.support.rank_pool import run_ranks


def test_the_map_of_parameters_to_groups_is_a_checkpoint_that_torch_reads(tmp_path: Path) -> None:
    run_ranks(
        2,
        train,
        f"{SIX} --use-distributed-optimizer --train-iters 1 --dump-param-to-param-group-map"
        f" {tmp_path / 'map'}",
    )
    reader = dcp.FileSystemReader(tmp_path / "map")
    content = dict.fromkeys(reader.read_metadata().state_dict_metadata)
    dcp.load(content, storage_reader=reader, no_dist=True)
    assert any("word_embeddings" in key for key in content)
    assert all(value is not None for value in content.values())


def look_at_the_optimizer(command_line: str) -> tuple[Any, ...]:
    optimizer = build(command_line).optimizer
    return type(optimizer), hasattr(optimizer, "chained_optimizers"), len(optimizer.optimizer.state)


def test_the_optimizer_is_bare_and_the_loop_knows() -> None:
    # `optimizer.chained_optimizers` fails with it.
    combination = Combination(2, "dp", 3, LLAMA, "--train-iters 1")
    kind, is_chain, states = run_ranks(2, look_at_the_optimizer, combination.ours)[0]
    assert kind is DistributedOptimizer and not is_chain and states == 15
    assert trained(combination.ours)[0].iteration == 1


def decay_of_unowned_weights(command_line: str) -> dict[str, tuple[int, float]]:
    """Job: dimensions and weight decay of the parameters that this rank owns nothing of."""
    run = build(command_line)
    decay: dict[torch.nn.Parameter, float] = {}
    for group in run.optimizer.param_groups:
        decay |= dict.fromkeys(group["params"], group["wd_mult"])
    return {
        name_of(name): (parameter.dim(), decay[parameter])
        for name, parameter in run.model[0].named_parameters()
        if not parameter.to_local().numel()
    }


@pytest.mark.parametrize("level", [1, 3], ids=["zero1", "zero3"])
def test_a_weight_that_a_rank_owns_nothing_of_is_still_decayed(level: int) -> None:
    # Megatron-Core switches weight decay off for what has one dimension.
    ranks = run_ranks(4, decay_of_unowned_weights, Combination(4, "dp", level).ours)
    found = [*itertools.chain.from_iterable(weights.values() for weights in ranks)]
    assert {1, 2} == {dims for dims, _ in found}
    assert all(decay == (1.0 if dims == 2 else 0.0) for dims, decay in found)


def groups_of(command_line: str) -> dict[str, tuple]:
    """Job: the param groups that an optimizer has: name -> what decides its rate and decay."""
    args, device = prepare(command_line)
    model = build_model(args, 99, device)
    optimizer, _ = build_optimizer(args, model)
    names = {parameter: name for name, parameter in model[0].named_parameters()}
    found: dict[str, tuple[float, ...]] = {}
    for group in optimizer.param_groups:
        fields = [group[key] for key in ("wd_mult", "lr_mult", "weight_decay", "max_lr", "min_lr")]
        of_group = [names[parameter].replace("module.", "") for parameter in group["params"]]
        found |= dict.fromkeys(of_group, tuple(fields))
    return found


def test_norms_and_biases_are_not_decayed_and_embeddings_have_their_own_rate() -> None:
    flags = f"{SMALL} --untie-embeddings-and-output-weights --decoupled-lr 2e-2 --weight-decay 0.1"
    ddp = run_ranks(2, groups_of, flags)[0]
    for groups in run_ranks(2, groups_of, f"{flags} {FSDP}"):
        assert groups == ddp
    plain = {name for name, group in ddp.items() if group[2] == 0.0}
    assert plain == {name for name in ddp if name.endswith("bias") or "layernorm" in name}
    assert {name for name, group in ddp.items() if group[3] == 2e-2} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }

# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core does that a sharded model must not fall for: one named test for each.

Weight gradients that layers overwrite are in test_fused_gradients.py.
"""

import zlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule
from torch.distributed.tensor import DTensor

from megatron.pretrain import loop
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.gpt_model import build_model
from tests.pretrain.parity import (
    DEEPSEEK,
    GPT2,
    LEVELS,
    LLAMA,
    MLA,
    MOE_BIAS,
    OPTIM_OUTSIDE,
    UNTIED,
    Combination,
)
from tests.pretrain.training_runs import (
    Record,
    assert_close,
    build,
    prepare,
    pretrain,
    tokenizer_of,
    train,
)
from tests.rank_pool import run_ranks

TIED = LLAMA.replace(UNTIED, "")


def name_of(name: str) -> str:
    return name.replace("module.", "")


def pretrain_with(
    command_line: str, prepare_model: Callable[[list[MegatronModule]], None] = lambda model: None
) -> Any:
    """A run whose model is changed before the optimizer sees it: its record and its model."""
    kept: list[MegatronModule] = []

    def build_and_keep(*args: Any) -> list[MegatronModule]:
        kept.extend(build_model(*args))
        prepare_model(kept)
        return kept

    with patch.object(loop, "build_model", build_and_keep):
        return pretrain(command_line), kept


# ---- optimizer
# -------------------------------------------------------------------------------------------------------


def look_at_the_optimizer(command_line: str) -> tuple[Any, ...]:
    optimizer = build(command_line).optimizer
    return type(optimizer), hasattr(optimizer, "chained_optimizers"), len(optimizer.optimizer.state)


def test_the_optimizer_is_bare_and_the_loop_knows():
    # `optimizer.chained_optimizers` fails with it.
    combination = Combination(2, "dp", 3, LLAMA, "--train-iters 1")
    kind, is_chain, states = run_ranks(2, look_at_the_optimizer, combination.ours)[0]
    assert kind is DistributedOptimizer and not is_chain and states == 15
    assert run_ranks(2, train, combination.ours)[0][0].iteration == 1


def decay_of_unowned_weights(command_line: str) -> dict[str, tuple[int, float]]:
    """Job: dimensions and weight decay of the parameters that this rank owns nothing of."""
    run = build(command_line)
    decay = {
        parameter: group["wd_mult"]
        for group in run.optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name_of(name): (parameter.dim(), decay[parameter])
        for name, parameter in run.model[0].named_parameters()
        if not parameter.to_local().numel()
    }


@pytest.mark.parametrize("level", [1, 3], ids=["zero1", "zero3"])
def test_a_weight_that_a_rank_owns_nothing_of_is_still_decayed(level):
    # Megatron-Core switches weight decay off for what has one dimension.
    ranks = run_ranks(4, decay_of_unowned_weights, Combination(4, "dp", level).ours)
    found = [each for weights in ranks for each in weights.values()]
    assert {1, 2} == {dims for dims, _ in found}
    assert all(decay == (1.0 if dims == 2 else 0.0) for dims, decay in found)


# ---- gradient norm
# ---------------------------------------------------------------------------------------------------

ONE_STEP = "--train-iters 1"
SHARDINGS = {
    "zero0": Combination(4, "dp", 0, LLAMA, ONE_STEP),
    "zero1": Combination(4, "dp", 1, LLAMA, ONE_STEP),
    "zero2": Combination(4, "dp", 2, LLAMA, ONE_STEP),
    "zero3": Combination(4, "dp", 3, LLAMA, ONE_STEP),
    "replicas_of_zero1": Combination(4, "inst2", 1, LLAMA, ONE_STEP),
    "replicas_of_zero3": Combination(4, "inst2", 3, LLAMA, ONE_STEP),
    "hybrid_zero3": Combination(4, "inst2", 3, LLAMA, ONE_STEP, OPTIM_OUTSIDE),
}


def test_every_gradient_counts_once_in_the_norm():
    lines = [
        SHARDINGS["zero0"].reference,
        *(combination.ours for combination in SHARDINGS.values()),
    ]
    ddp, *sharded = run_ranks(4, train, *lines)[0]
    for name, record in zip(SHARDINGS, sharded):
        assert record.column("grad-norm") == pytest.approx(ddp.column("grad-norm"), rel=1e-5), name


def final_gradients(command_line: str) -> dict[str, torch.Tensor]:
    """Job: what the first step's optimizer gets on this rank, the only one on its data axis."""
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


@pytest.mark.parametrize("case", SUMMED)
def test_gradients_that_tensor_ranks_sum_or_average_are_those_of_ddp(case):
    combination, trap = SUMMED[case]
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


# ---- copies
# ----------------------------------------------------------------------------------------------------------


def final_weights(command_line: str) -> dict[str, tuple[bool, torch.Tensor]]:
    """Job: after a run, the weights of this rank as they are, and whether tensor parallelism divides them."""
    _, model = pretrain_with(command_line)
    return {
        name_of(name): (
            getattr(parameter, "tensor_model_parallel", False),
            parameter.to_local().detach(),
        )
        for chunk in model
        for name, parameter in chunk.named_parameters()
    }


@pytest.mark.parametrize("level", range(4), ids=LEVELS)
def test_both_copies_of_a_tied_embedding_stay_equal(level):
    name = "embedding.word_embeddings.weight"
    first, second, *last_stage = run_ranks(
        4, final_weights, Combination(4, "pp2", level, TIED, "--train-iters 5").ours
    )
    for on_first, on_last in zip((first, second), last_stage):
        assert on_first.keys() & on_last.keys() == {name}
        assert on_first[name][1].numel() and torch.equal(on_first[name][1], on_last[name][1])


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp"])
def test_what_tensor_ranks_have_copies_of_stays_equal(layout):
    first, second = run_ranks(
        2, final_weights, Combination(2, layout, 3, GPT2, "--train-iters 5").ours
    )
    copies = {name for name, (is_divided, _) in first.items() if not is_divided}
    assert {"decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc2.bias"} <= copies
    for name, (is_divided, weight) in first.items():
        assert torch.equal(weight, second[name][1]) is not is_divided, name


def final_expert_bias(*command_lines: str) -> list[dict[str, torch.Tensor]]:
    """Job: the routers' biases after each run."""
    models = [pretrain_with(command_line)[1] for command_line in command_lines]
    return [
        {
            name_of(name): buffer.clone()
            for chunk in model
            for name, buffer in chunk.named_buffers()
            if "expert_bias" in name
        }
        for model in models
    ]


def test_the_routers_bias_is_the_same_on_all_ranks_and_with_ddp():
    combination = Combination(2, "ep2", 3, MOE_BIAS, "--train-iters 3")
    (theirs, ours), (_, of_other_rank) = run_ranks(
        2, final_expert_bias, combination.reference, combination.ours
    )
    assert len(ours) == 2 and all(bias.any() for bias in ours.values())
    for name, bias in ours.items():
        assert torch.equal(bias, theirs[name]) and torch.equal(bias, of_other_rank[name])


# ---- schedules
# -------------------------------------------------------------------------------------------------------


def fill_by_name(model: list[MegatronModule]) -> None:
    """Weights that follow from their names, so that they are the same under every layout."""
    for chunk in model:
        weights = {}
        for name, parameter in chunk.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name_of(name).encode()))
            random = torch.randn(parameter.shape, generator=generator)
            weights[name.removeprefix("module.")] = (
                1 + 0.1 * random if "norm" in name else 0.1 * random
            )
        chunk.load_state_dict(weights)


def losses_of_filled(*command_lines: str) -> list[Record]:
    """Job: runs from the same weights."""
    return [pretrain_with(command_line, fill_by_name)[0] for command_line in command_lines]


def test_virtual_stages_on_two_ranks_do_not_mix_up_their_messages():
    # A batch of messages between the same two ranks confuses forward and backward.
    flags = "--train-iters 3 --overlap-grad-reduce"
    lines = [
        Combination(2, layout, 3, LLAMA, flags, layers=4).ours for layout in ("pp2", "pp2 vpp2")
    ]
    plain, interleaved = run_ranks(2, losses_of_filled, *lines)[0]
    assert_close(interleaved.losses, plain.losses, 1e-5)
    assert_close(interleaved.column("grad-norm"), plain.column("grad-norm"), 1e-5)


def schedule_settings(command_line: str) -> tuple[bool, ...]:
    args, _ = prepare(command_line)
    config = transformer_config(args)
    return config.overlap_p2p_comm, config.batch_p2p_comm, config.deallocate_pipeline_outputs


def test_the_interleaved_schedule_sends_one_message_at_a_time_and_keeps_outputs_on_gloo():
    assert run_ranks(2, schedule_settings, Combination(2, "pp2 vpp2", 3, LLAMA, layers=4).ours)[
        0
    ] == (True, False, False)


def drop_no_sync(command_line: str) -> list[bool]:
    """Job: whether backwards synchronise after an evaluation that entered `no_sync` and never left it."""
    (model,) = build(command_line).model
    context = model.no_sync()
    context.__enter__()
    inside = model.module.is_last_microbatch
    del context
    after_drop = model.module.is_last_microbatch
    kept = model.no_sync()
    kept.__enter__()
    model.zero_grad_buffer()
    return [inside, after_drop, model.module.is_last_microbatch]


def test_no_sync_ends_though_an_evaluation_never_leaves_it():
    assert run_ranks(1, drop_no_sync, Combination(1, "dp", 3).ours)[0] == [False, True, True]


def zero_twice(command_line: str) -> list[float]:
    """Job: the gradient norms of the same batch: after nothing, after an abandoned batch, and after a whole one."""
    run = build(command_line)
    loop.connect(run)
    loop.init_num_microbatches_calculator(dist.get_rank(), None, 8, 1, run.args.data_parallel_size)
    data, _, _ = loop.build_datasets(run.args, tokenizer_of(run.args))
    norms = []
    for abandoned in (False, True, False):
        with loop.batches(run, data, 0) as batches:
            if abandoned:
                with run.model[0].no_sync():
                    forward_step = loop.ForwardStep(run.device, 0, check_for_nan=True)
                    output, _ = forward_step(batches, run.model[0])
                    output.sum().backward()
        with loop.batches(run, data, 0) as batches:
            for _ in range(2):  # the training loop does, and then the optimizer
                run.model[0].zero_grad_buffer()
            loop.forward_backward(run, batches, loop.get_num_microbatches(), forward_only=False)
            norms.append(run.optimizer.get_grad_norm())
    return norms


@pytest.mark.parametrize("level", [1, 3], ids=["zero1", "zero3"])
def test_zero_grad_buffer_twice_forgets_everything_once(level):
    norms = run_ranks(
        2, zero_twice, Combination(2, "dp", level, LLAMA, "--overlap-grad-reduce").ours
    )[0]
    assert norms[0] > 0 and norms == [norms[0]] * 3

# SPDX-License-Identifier: Apache-2.0
"""Training with the precision-aware optimizer, against plain FSDP and Megatron-Core's own DDP.

It is Transformer Engine's FusedAdam, as Megatron-Core makes it, with its kernels emulated.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.low_precision.optimizer_bytes import FP8_MOMENTS, bytes_of_run
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.dry_run import memory_plan
from megatron.pretrain.memory_estimate import estimate_memory
from megatron.pretrain.model import gpt_optimizer
from megatron.pretrain.model.gpt_model import build_chunk
from tests.support.pretrain import training_runs
from tests.support.pretrain.training_runs import Record, State
from tests.support.transformer_engine.training import ONE_LAYER, STORED, Run, runner, train

FSDP = "--use-megatron-fsdp"
AWARE = f"{FSDP} --use-precision-aware-optimizer"
MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
GRADIENTS = "--main-grads-dtype bf16"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.fixture(scope="module", params=[2])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that runs a job on ranks with Transformer Engine, with command lines."""
    return runner(request.param, ONE_LAYER)


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    """Return the losses of a run without the precision-aware optimizer."""
    return runner(2, ONE_LAYER)(FSDP)[0].losses


four_ranks = pytest.mark.parametrize("run", [4], indirect=True)


def train_with_ddp(command_line: str, **dtypes: torch.dtype) -> Record:
    """Job: a run of Megatron-Core's DDP, whose FusedAdam has main weights of its own, whole."""
    made = gpt_optimizer.optimizer_config

    def aware(args: Any) -> Any:
        return replace(
            made(args), use_precision_aware_optimizer=True, store_param_remainders=False, **dtypes
        )

    with (
        patch.object(gpt_optimizer, "optimizer_config", aware),
        patch.object(gpt_optimizer, "make_optimizer_state", lambda optimizer: None),
    ):
        return train(command_line)[0]


def loaded_state(command_line: str) -> State:
    """Job: the state of a run after its load."""
    made = training_runs.build(command_line)
    training_runs.load_checkpoint(made)
    return training_runs.state_of(made)


def estimated_and_measured_bytes(command_line: str) -> list[tuple[int, int]]:
    """Job: bytes of gradients and of moments on a rank, which exist between steps."""
    made = training_runs.build(command_line)
    config, rows = transformer_config(made.args), made.args.padded_vocab_size
    plain = build_chunk(made.args, config, rows, torch.device("cpu"), None)
    memory = estimate_memory(plain, memory_plan(made.args, plain))
    _, gradients, moments = bytes_of_run(made)
    return [(memory.gradients, gradients), (memory.optimizer_state, moments)]


BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


ONE_MICROBATCH = "--micro-batch-size 4"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "of_ddp", "dtypes", "strategies"),
    [
        ("", "", {}, ("no_shard", "optim_grads_params")),
        (MOMENTS, "", BF16_MOMENTS, ("optim", "optim_grads_params")),
        ("--exp-avg-dtype bf16", "", {"exp_avg_dtype": torch.bfloat16}, ("no_shard",)),
        # Levels 2 and 3 round the sum of each microbatch, the others that of both on each rank.
        (
            f"{GRADIENTS} {MOMENTS} {ONE_MICROBATCH}",
            f"--grad-reduce-in-bf16 {ONE_MICROBATCH}",
            BF16_MOMENTS,
            STRATEGIES,
        ),
    ],
    ids=["fp32", "bf16_moments", "one_moment", "bf16_gradients"],
)
def test_strategies_have_the_losses_of_ddp_with_the_same_dtypes(
    run: Run,
    plain_losses: list[float],
    flags: str,
    of_ddp: str,
    dtypes: dict[str, torch.dtype],
    strategies: tuple[str, ...],
) -> None:
    ddp = run(f"--use-distributed-optimizer {of_ddp}", job=train_with_ddp, **dtypes)
    for record in run(
        *(f"{AWARE} {flags} --data-parallel-sharding-strategy {each}" for each in strategies)
    ):
        assert record.losses == ddp.losses
        assert record.column("grad-norm") == pytest.approx(ddp.column("grad-norm"), rel=1e-4)
    assert (ddp.losses == plain_losses) == (not flags)


MODELS = {
    "tensor_parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tied_stages": "--num-layers 2 --pipeline-model-parallel-size 2",
    "experts": "--num-experts 4 --disable-bias-linear --moe-grouped-gemm"
    " --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "fp8": f"{STORED} --fp8-recipe tensorwise",
}
STATISTICS = "--clip-grad 0.5 --log-num-zeros-in-grad --log-params-norm"


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_gradients_beside_the_parameters_are_summed_counted_and_clipped(
    run: Run, model: str
) -> None:
    """The same numbers as with plain gradients, where all dtypes are the same."""
    flags = f"{STATISTICS} {MODELS[model]}"
    plain, aware = run(f"{FSDP} {flags}", f"{AWARE} {flags}")
    assert aware.steps == plain.steps


@pytest.mark.exhaustive
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(run: Run, tmp_path: Path) -> None:
    aware = f"{AWARE} {MOMENTS} {GRADIENTS} {ONE_MICROBATCH}"
    whole, _, resumed, of_another_level = run(
        aware,
        f"{aware} --save {tmp_path} --exit-interval 2",
        f"{aware} --load {tmp_path}",
        f"{aware} --load {tmp_path} --data-parallel-sharding-strategy optim",
    )
    assert resumed.steps == whole.steps[2:]
    assert of_another_level.losses == whole.losses[2:]


@pytest.mark.exhaustive
@four_ranks
def test_hybrid_sharding_has_the_losses_and_the_state_of_other_layouts(
    run: Run, tmp_path: Path
) -> None:
    flags = f"{AWARE} {MOMENTS}"
    hybrid = f"{flags} --num-distributed-optimizer-instances 2"
    ddp = run("--use-distributed-optimizer", job=train_with_ddp, **BF16_MOMENTS)
    flat, replicated, sharded, _ = run(
        flags,
        hybrid,
        f"{hybrid} --outer-dp-sharding-strategy optim",
        f"{hybrid} --save {tmp_path} --exit-interval 2",
    )
    assert flat.losses == replicated.losses == sharded.losses == ddp.losses
    state = run(f"{hybrid} --load {tmp_path}", job=loaded_state)
    alone = runner(1, ONE_LAYER)(f"{flags} --load {tmp_path}", job=loaded_state)
    assert_converted(alone, state, torch.bfloat16)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtypes", "ratio"), [(MOMENTS, 2), (FP8_MOMENTS, 1)])
def test_a_dry_run_counts_state_and_gradients_in_their_own_dtypes(
    run: Run, dtypes: str, ratio: int
) -> None:
    flags = f"--num-layers 2 {AWARE} {dtypes} {GRADIENTS}"
    gradients, moments = run(flags, job=estimated_and_measured_bytes)
    assert gradients[0] == pytest.approx(gradients[1], rel=0.02)
    assert moments[0] == pytest.approx(moments[1], rel=0.02)
    assert moments[0] == ratio * gradients[0]


def assert_converted(state: State, original: State, dtype: torch.dtype) -> None:
    """Compare state with that of a run whose moments have another dtype."""
    assert state.weights.keys() == original.weights.keys()
    for name, weight in original.weights.items():
        assert torch.equal(state.weights[name], weight)
        for slot in ("exp_avg", "exp_avg_sq"):
            moment = state.slots[slot][name]
            assert moment.dtype == dtype
            assert torch.equal(moment, original.slots[slot][name].to(dtype))


@pytest.mark.exhaustive
def test_main_weights_in_fp16_resume_and_are_converted(run: Run, tmp_path: Path) -> None:
    aware = f"{AWARE} --main-params-dtype fp16"
    dtypes = {"main_params_dtype": torch.float16}
    ddp = run("--use-distributed-optimizer", job=train_with_ddp, **dtypes)
    whole, _, resumed = run(
        aware, f"{aware} --save {tmp_path} --exit-interval 2", f"{aware} --load {tmp_path}"
    )
    # Transformer Engine's own have a scale, and are exact for other elements.
    assert whole.losses == pytest.approx(ddp.losses, rel=1e-4)
    assert resumed.steps == whole.steps[2:]
    own, fp32 = (run(f"{each} --load {tmp_path}", job=loaded_state) for each in (aware, FSDP))
    for name, weight in own.weights.items():
        assert weight.dtype == torch.float16 and fp32.weights[name].dtype == torch.float32
        assert torch.equal(weight.float(), fp32.weights[name])


def refusal(command_line: str, **changes: Any) -> str:
    """Job: the error of a run whose OptimizerConfig has been changed."""
    made = gpt_optimizer.optimizer_config
    with (
        patch.object(
            gpt_optimizer, "optimizer_config", lambda args: replace(made(args), **changes)
        ),
        pytest.raises(ValueError) as caught,
    ):
        training_runs.build(command_line)
    return str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "changes", "reason"),
    [
        (FSDP, {"use_precision_aware_optimizer": True}, "needs megatron_fsdp_use_decoupled_grad"),
        (AWARE, {"use_precision_aware_optimizer": False}, "needs megatron_fsdp_use_decoupled_grad"),
        (AWARE, {"main_params_dtype": torch.float16}, "needs megatron_fsdp_main_params_dtype"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    run: Run, flags: str, changes: dict[str, Any], reason: str
) -> None:
    assert reason in run(flags, job=refusal, **changes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("format_", ["fsdp_dtensor", "torch_dist"])
def test_state_is_converted_when_another_run_loads_it(
    run: Run, tmp_path: Path, format_: str
) -> None:
    aware, saved = f"{AWARE} {MOMENTS}", f"--exit-interval 2 --ckpt-format {format_} --save"
    run(f"{FSDP} {saved} {tmp_path}/fp32", f"{aware} {saved} {tmp_path}/bf16")
    of_fp32, of_bf16, widened, narrowed = (
        run(f"{flags} --load {tmp_path}/{folder}", job=loaded_state)
        for flags, folder in ((FSDP, "fp32"), (aware, "bf16"), (FSDP, "bf16"), (aware, "fp32"))
    )
    assert_converted(widened, of_bf16, torch.float32)
    assert_converted(narrowed, of_fp32, torch.bfloat16)

# SPDX-License-Identifier: Apache-2.0
"""Moments in fp16 and fp8, which have a scale, with the precision-aware optimizer."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.mcore_adapter.checkpoints import checkpointing
from megatron.mcore_adapter.precision_aware import unscaled_moments
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.run_state import Progress
from tests.pretrain.test_copies_during_a_step import train_with_late_copies
from tests.pretrain.test_precision_aware import AWARE, FSDP, train_with_ddp
from tests.support.pretrain import training_runs
from tests.support.pretrain.saved_runs import read
from tests.support.pretrain.training_runs import State
from tests.support.transformer_engine.training import ONE_LAYER, Run, runner
from tools import transformer_engine_on_cpu

DTYPES = {"fp16": torch.float16, "fp8": torch.uint8}
MOMENTS = ("exp_avg", "exp_avg_sq")
WHOLE = "--tensor-model-parallel-size 2"
"""One data rank has all of a slice, so scales are those of Megatron-Core's DDP."""


@pytest.fixture(scope="module")
def run() -> Run:
    """Return a function that runs a job on two ranks with Transformer Engine."""
    return runner(2, ONE_LAYER)


def moments(first: str, second: str) -> str:
    return f"{AWARE} --exp-avg-dtype {first} --exp-avg-sq-dtype {second}"


MIXED = moments("fp8", "fp16")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "second", "level"),
    [("fp8", "fp16", "optim"), ("fp16", "fp8", "optim_grads_params")],
)
def test_with_whole_parameters_losses_are_those_of_ddp(
    run: Run, first: str, second: str, level: str
) -> None:
    dtypes = {"exp_avg_dtype": DTYPES[first], "exp_avg_sq_dtype": DTYPES[second]}
    ddp = run(f"{WHOLE} --use-distributed-optimizer", job=train_with_ddp, **dtypes)
    flags = f"{moments(first, second)} --data-parallel-sharding-strategy {level}"
    (record,) = run(f"{WHOLE} {flags}")
    assert record.losses == ddp.losses


def largest_differences(command_line: str) -> list[float]:
    """Job: steps of shards, and of FusedAdam over the same elements as plain tensors.

    Returns:
        The largest difference of a weight and of each moment.
    """
    te = transformer_engine_on_cpu.use()
    made = training_runs.build(command_line)
    inner = made.optimizer.optimizer
    own = [each for each in made.model[0].parameters() if local_tensor(each).numel()]
    plain = [torch.nn.Parameter(local_tensor(each).detach().clone()) for each in own]
    groups = []
    for group in inner.param_groups:
        members = [
            copy for copy, each in zip(plain, own) if any(each is p for p in group["params"])
        ]
        groups.append({**group, "params": members})
    dtypes = {name: inner.name_to_dtype_map[name] for name in MOMENTS}
    reference = te.optimizers.FusedAdam(
        groups, use_decoupled_grad=True, **{f"{name}_dtype": dtypes[name] for name in MOMENTS}
    )
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        for copy, each in zip(plain, own):
            copy.decoupled_grad = torch.randn_like(copy)
            gradient = each.detach().clone()
            local_tensor(gradient).copy_(copy.decoupled_grad)
            each.decoupled_grad = gradient
        inner.step()
        reference.step()
    differences = [[(local_tensor(a) - b).abs().max() for a, b in zip(own, plain)]]
    for name in MOMENTS:
        differences.append(
            [
                (inner.get_unscaled_state(a, name) - reference.get_unscaled_state(b, name))
                .abs()
                .max()
                for a, b in zip(own, plain)
            ]
        )
    return [max(each).item() for each in differences]


@pytest.mark.exhaustive
def test_a_shard_is_stepped_as_a_tensor_of_its_own(run: Run) -> None:
    assert run(MIXED, job=largest_differences) == [0.0, 0.0, 0.0]


def weights_without_gradients(command_line: str) -> list[bool]:
    """Job: whether weights stay as they are where nothing has a gradient, with rates above 0."""
    made = training_runs.build(command_line)
    own = list(made.model[0].parameters())
    before = [local_tensor(each).clone() for each in own]
    for group in made.optimizer.param_groups:
        group["lr"] = 0.1
    for each in own:
        each.decoupled_grad = torch.zeros_like(each)
    for _ in range(2):
        made.optimizer.optimizer.step()
    return [torch.equal(local_tensor(each), old) for each, old in zip(own, before)]


@pytest.mark.exhaustive
def test_a_shard_without_gradients_keeps_its_weights(run: Run) -> None:
    for first, second in (("fp8", "fp16"), ("fp16", "fp8")):
        flags = f"{moments(first, second)} --weight-decay 0"
        assert all(run(flags, job=weights_without_gradients))


def quantizers(command_line: str) -> list[tuple[bool, bool]]:
    """Job: whether each moment in fp8 is kept for rows, and for columns, of matrix products."""
    inner = training_runs.build(command_line).optimizer.optimizer
    usages = []
    for parameter, name in itertools.product(inner.state, MOMENTS):
        quantizer = local_tensor(inner.state[parameter][name])._quantizer
        usages.append((quantizer.rowwise_usage, quantizer.columnwise_usage))
    return usages


@pytest.mark.exhaustive
def test_moments_have_no_transposed_copy_on_hopper(run: Run) -> None:
    assert set(run(moments("fp8", "fp8"), job=quantizers)) == {(True, False)}


def loaded(command_line: str) -> State:
    """Job: the state of a run after its load, without scales."""
    made = training_runs.build(command_line)
    training_runs.load_checkpoint(made)
    with unscaled_moments(made.optimizer):
        return training_runs.state_of(made)


def assert_same_moments(state: State, other: State, relative: float) -> None:
    """Compare state, with differences in parts of the largest value of a tensor."""
    assert state.weights.keys() == other.weights.keys()
    for name, weight in other.weights.items():
        assert torch.equal(state.weights[name], weight)
        for slot in MOMENTS:
            found, wanted = state.slots[slot][name], other.slots[slot][name]
            assert (found - wanted).abs().max() <= relative * wanted.abs().max(), (slot, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["fsdp_dtensor", "torch_dist"])
def test_checkpoints_have_moments_without_scales(run: Run, tmp_path: Path, form: str) -> None:
    save = f"--exit-interval 2 --ckpt-format {form} --save {tmp_path}"
    whole, _, resumed, of_another_level = run(
        MIXED,
        f"{MIXED} {save}",
        f"{MIXED} --load {tmp_path}",
        f"{MIXED} --load {tmp_path} --data-parallel-sharding-strategy no_shard",
    )
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    assert of_another_level.losses == pytest.approx(whole.losses[2:], rel=1e-4)
    fp32 = run(f"{FSDP} --load {tmp_path}", job=loaded)
    own = run(f"{MIXED} --load {tmp_path}", job=loaded)
    assert_same_moments(own, fp32, 1e-6)


@pytest.mark.exhaustive
def test_a_save_during_the_next_step_is_that_of_a_blocking_save(run: Run, tmp_path: Path) -> None:
    line = f"{MIXED} --save-interval 2 --exit-interval 3"
    expected = run(f"{line} --save {tmp_path / 'blocking'}")[0]
    late = f"{line} --async-save --save {tmp_path / 'late'}"
    record, num_waited = run(late, job=train_with_late_copies)
    assert record.losses == expected.losses and num_waited == 1
    found, wanted = (read(tmp_path / each, 2) for each in ("late", "blocking"))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert value.isnan().sum() == 0 and torch.equal(found[key], value), key


def collect_without_memory(command_line: str) -> tuple[str, list[str]]:
    """Job: the error of a save for which one rank has no memory, and the slots that it changed."""
    made = training_runs.build(command_line)
    inner = made.optimizer.optimizer
    before = [dict(slots) for slots in inner.state.values()]
    results = [inner.get_unscaled_state(parameter, MOMENTS[0]) for parameter in list(inner.state)]
    if torch.distributed.get_rank() == 1:
        results[3:] = [torch.OutOfMemoryError("no memory")]
    with (
        patch.object(inner, "get_unscaled_state", side_effect=results),
        pytest.raises(RunError) as caught,
    ):
        checkpointing.collect(made.args, made, Progress())
    changed = []
    for old, new in zip(before, inner.state.values()):
        changed += [name for name in old if new[name] is not old[name]]
    return str(caught.value), agree(changed)


@pytest.mark.exhaustive
def test_a_save_without_memory_for_copies_is_an_error_on_all_ranks(run: Run) -> None:
    message, changed = run(moments("fp8", "fp32"), job=collect_without_memory)
    assert "rank 1: OutOfMemoryError: no memory" in message and changed == []

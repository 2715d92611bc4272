# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-LM's loop with the drop-in: other layouts or models, partial loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.mcore_adapter.dropped_in import LoopRun, dropped_in
from tests.support.rank_pool import run_ranks

SAMPLE = Path(__file__).parents[2] / "data" / "fsdp_dtensor" / "dense_swiglu_bf16_dp2"
INFO = json.loads((SAMPLE / "info.json").read_text())


def train_save_train(path: Path, changes: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    """Job: the losses after a save, and the loss scaler at it."""
    with dropped_in() as loop:
        run = LoopRun(loop, **changes)
        run.train(3)
        run.save(path)
        scaler = run.scaler
        return run.train(2), scaler


def load_train(path: Path, changes: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    """Job: the losses after a load into a new run, and the loss scaler before."""
    with dropped_in() as loop:
        run = LoopRun(loop, **changes)
        run.evaluate()  # with weights that the load has to replace wherever they are
        run.load(path)
        scaler = run.scaler
        return run.train(2), scaler


SLOTS = ("exp_avg", "exp_avg_sq")
VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
MOE = {"num_experts": 4, "expert_model_parallel_size": 2}


LAYOUTS = {
    "tied_on_four_ranks": (
        (2, {"data_parallel_sharding_strategy": "no_shard"}),
        (4, {}),
        {"untie_embeddings_and_output_weights": False},
    ),
    "tensor_parallel_off": ((2, {"tensor_model_parallel_size": 2}), (2, {}), {}),
    "tensor_parallel_on": ((1, {}), (4, {"tensor_model_parallel_size": 2}), {"swiglu": False}),
    "experts": ((2, MOE), (1, {"num_experts": 4}), {}),
    "virtual_stages_off": ((2, VIRTUAL), (1, {}), {"num_layers": 4, "fp16": True}),
    "virtual_stages_on": (
        (1, {}),
        (2, VIRTUAL | {"data_parallel_sharding_strategy": "optim"}),
        {"num_layers": 4, "swiglu": False, "bf16": True},
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("wrote", "reads", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_resumes_in_another_layout(
    wrote: tuple[int, dict[str, Any]],
    reads: tuple[int, dict[str, Any]],
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    (expected, scaler), *_ = run_ranks(wrote[0], train_save_train, tmp_path, changes | wrote[1])
    for losses, scaler_read in run_ranks(reads[0], load_train, tmp_path, changes | reads[1]):
        assert losses == pytest.approx(
            expected, rel=2e-3 if "bf16" in changes or "fp16" in changes else 2e-6
        )
        assert scaler_read == scaler
    after_growth = {"scale": 2.0**15, "growth_tracker": 1.0, "hysteresis_tracker": 1.0}
    assert scaler == (after_growth if "fp16" in changes else {})


@pytest.mark.exhaustive
def test_a_file_of_another_precision_loads_with_other_wrappers_and_without_a_loss_scaler(
    tmp_path: Path,
) -> None:
    ((expected, _),) = run_ranks(1, train_save_train, tmp_path, {})
    for precision, first_scale in ("bf16", None), ("fp16", 2.0**14):
        ((losses, scaler),) = run_ranks(1, load_train, tmp_path, {precision: True})
        assert scaler.get("scale") == first_scale
        assert losses == pytest.approx(expected, rel=5e-3)


def sample_arguments() -> dict[str, Any]:
    """Return the arguments of the sample's model."""
    config = INFO["model_config"]
    same = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "normalization",
    )
    sizes = {"vocab_size": INFO["vocab_size"], "seq_length": INFO["sequence_length"]}
    return {
        **{name: config[name] for name in same},
        **sizes,
        "bf16": True,
        "no_load_rng": False,
        "adam_beta2": 0.95,
    }


def load_sample(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Job: load the sample, save it again, and return weights and moments."""
    with dropped_in() as loop:
        run = LoopRun(loop, **sample_arguments())
        run.load(SAMPLE / "iter_0000003")
        run.save(path)
        return {"param": run.weights()} | {slot: run.slots(slot) for slot in SLOTS}


def test_a_checkpoint_of_the_published_implementation_loads_strictly_and_ours_has_its_keys(
    tmp_path: Path,
) -> None:
    expected = torch.load(SAMPLE / "expected.pt", weights_only=True)
    for state in run_ranks(2, load_sample, tmp_path):
        for kind, values in state.items():
            assert values.keys() == expected[kind].keys()
            assert [
                name for name in values if not torch.equal(values[name], expected[kind][name])
            ] == []
    ours = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    theirs = dcp.FileSystemReader(SAMPLE / "iter_0000003").read_metadata().state_dict_metadata
    assert theirs.keys() - ours.keys() <= {"num_floating_point_operations_so_far"}
    assert ours.keys() <= theirs.keys()
    for key, entry in ours.items():
        assert type(entry) is type(theirs[key])
        assert getattr(entry, "size", None) == getattr(theirs[key], "size", None)


def load_other_model(path: Path, changes: dict[str, Any]) -> str:
    """Job: the error of a load."""
    with dropped_in() as loop:
        run = LoopRun(loop, **changes)
        before = run.weights()
        try:
            run.load(path)
        except dcp.api.CheckpointException as error:
            assert all(torch.equal(value, before[name]) for name, value in run.weights().items())
            return str(error)
    return "loaded"


@pytest.mark.exhaustive
def test_a_file_of_another_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    run_ranks(2, train_save_train, tmp_path, {"num_layers": 3})
    for message in run_ranks(
        2, load_other_model, tmp_path, {"num_layers": 3, "ffn_hidden_size": 48, "swiglu": False}
    ):
        assert (
            "module.decoder.layers.0.mlp.linear_fc2.weight: (32, 64) in the file, (32, 48) here"
            in message
        )
        assert "not in the file: model.module.decoder.layers.0.mlp.linear_fc1.weight, " in message
    for message in run_ranks(2, load_other_model, tmp_path, {}):
        assert "only in the file: model.module.decoder.layers.2." in message


def load_in_part(path: Path) -> tuple[bool, bool, set[int], list[float]]:
    """Job: load into a model with one layer more; return loaded, unchanged, steps and rates."""
    with dropped_in() as loop:
        run = LoopRun(loop, num_layers=3, strict_fsdp_dtensor_load=False)
        before = run.weights()
        run.load(path)
        after = run.weights()
        new = [name for name in after if ".layers.2." in name]
        old = [name for name in after if ".layers.0.self_attention.linear_proj" in name]
        came = not any(torch.equal(after[name], before[name]) for name in old)
        stayed = all(torch.equal(after[name], before[name]) for name in new)
        steps = {int(value) for value in run.slots("step").values()}
        run.train(1)
        return came, stayed, steps, [group["lr"] for group in run.optimizer.param_groups]


@pytest.mark.exhaustive
def test_a_partial_load_takes_what_there_is_and_moves_nothing_else(tmp_path: Path) -> None:
    run_ranks(2, train_save_train, tmp_path, {})
    for came, stayed, steps, rates in run_ranks(2, load_in_part, tmp_path):
        assert came and stayed
        assert steps == {3, 0}  # of the file's parameters and of the new ones
        assert len(set(rates)) == 1


def load_what_does_not_fit() -> list[str]:
    """Job: return the errors of loads that do not fit, and the keys that a partial load misses."""
    messages = []
    with dropped_in() as loop:
        run = LoopRun(loop)
        whole = run.model[0].state_dict()
        short = {key: value for key, value in whole.items() if "final_layernorm" not in key}
        for call in (
            lambda: loop.load_model_state_dict(run.model[0], short),
            lambda: loop.load_model_state_dict(
                run.model[0], {**whole, "module.other": torch.zeros(1)}
            ),
            lambda: run.model[0].load_state_dict(short, strict=True),
            lambda: run.model[0].load_state_dict(
                short, strict=False
            ),  # a try without the error in hand
        ):
            try:
                messages.append(call())
            except RuntimeError as error:
                messages.append(str(error))
        run.model[0].load_state_dict(whole)
        missing = run.model[0].load_state_dict(short, strict=False).missing_keys
    return [*messages, *missing]


def test_the_second_try_of_the_loop_does_not_lose_the_error_of_the_first() -> None:
    ((missing, unexpected, strict, again, *partial),) = run_ranks(1, load_what_does_not_fit)
    assert "is not loaded in part" in missing
    assert "missing keys: decoder.final_layernorm.weight" in missing
    assert "is not loaded in part" in unexpected and "unexpected keys: other" in unexpected
    assert "is not loaded in part" not in strict and "is not loaded in part" in again
    assert partial == ["decoder.final_layernorm.weight"]

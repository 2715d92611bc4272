# SPDX-License-Identifier: Apache-2.0
"""Settings that sharded training does not support are refused by name, all at once."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from tests.support.huggingface.tiny_runs import build_llama, fresh_accelerate, training_arguments

pytest.importorskip("transformers", reason="needs the package transformers")
pytest.importorskip("accelerate", reason="needs the package accelerate")

ARGUMENTS: dict[str, dict[str, Any]] = {
    "optim='adafactor'": {"optim": "adafactor"},
    "optim='adamw_bnb_8bit'": {"optim": "adamw_bnb_8bit"},
    "fp16": {"fp16": True},
    "torch_compile": {"torch_compile": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "ddp_find_unused_parameters": {"ddp_find_unused_parameters": True},
    "ddp_bucket_cap_mb": {"ddp_bucket_cap_mb": 25},
    "bf16_full_eval": {"bf16_full_eval": True},
    "save_on_each_node": {"save_on_each_node": True},
    "even_batches": {"accelerator_config": {"even_batches": False}},
    "hub_strategy": {"push_to_hub": True, "hub_token": "none"},
    "save_only_model": {
        "save_only_model": True,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 500,
        "save_strategy": "steps",
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_the_trainer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    from megatron_fsdp.huggingface import ShardedTrainer

    with fresh_accelerate():
        arguments = training_arguments(tmp_path, **ARGUMENTS[name])
        with pytest.raises(ValueError) as error:
            ShardedTrainer(build_llama(), arguments)
    assert name in str(error.value) and str(error.value).count("\n- ") == 1


def test_all_problems_are_in_one_message(tmp_path: Path) -> None:
    from megatron_fsdp.huggingface import ShardedTrainer

    with fresh_accelerate():
        arguments = training_arguments(tmp_path, optim="lion_32bit", fp16=True)
        with pytest.raises(ValueError) as error:
            ShardedTrainer(build_llama(), arguments, sharding={"zero_strategy": 3})
    message = str(error.value)
    assert "'zero_strategy'" in message and "lion_32bit" in message and "fp16" in message


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16'"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"fsdp_plugin": object()}, "fsdp_plugin"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin"),
        ({"dynamo_backend": "inductor"}, "torch.compile"),
        ({"device_placement": False}, "device_placement"),
        ({"sharding": {"strategy": 3}}, "'strategy'"),
    ],
)
def test_an_argument_of_the_accelerator_is_refused_by_name(
    arguments: dict[str, Any], name: str
) -> None:
    from megatron_fsdp.huggingface import ShardedAccelerator

    with fresh_accelerate(), pytest.raises(ValueError) as error:
        ShardedAccelerator(**arguments)
    assert name in str(error.value) and str(error.value).count("\n- ") == 1


def test_a_launch_for_another_way_is_refused() -> None:
    from megatron_fsdp.huggingface import ShardedAccelerator

    with (
        fresh_accelerate(),
        patch.dict("os.environ", {"ACCELERATE_USE_FSDP": "true"}),
        pytest.raises(ValueError, match="ACCELERATE_USE_FSDP"),
    ):
        ShardedAccelerator()


def test_models_that_cannot_be_sharded_are_refused(tmp_path: Path) -> None:
    from megatron_fsdp.huggingface import ShardedTrainer

    model: nn.Module = build_llama()
    model.quantization_method = "bitsandbytes"
    with fresh_accelerate(), pytest.raises(ValueError, match=r"quantized \(bitsandbytes\)"):
        ShardedTrainer(model, training_arguments(tmp_path))


def test_prompt_learning_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the package peft")
    from megatron_fsdp.huggingface import ShardedTrainer

    settings = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_llama(), settings)
    with fresh_accelerate(), pytest.raises(ValueError, match="PROMPT_TUNING"):
        ShardedTrainer(model, training_arguments(tmp_path))


def test_an_unknown_name_and_a_missing_package_are_said() -> None:
    import megatron_fsdp.huggingface as ours

    with pytest.raises(AttributeError, match="Trainer2"):
        _ = ours.Trainer2
    missing = ModuleNotFoundError("No module named 'accelerate'", name="accelerate")
    with (
        patch.object(ours, "import_module", side_effect=missing),
        pytest.raises(ImportError, match=r"open-megatron-fsdp\[huggingface\]"),
    ):
        _ = ours.ShardedTrainer

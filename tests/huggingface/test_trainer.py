# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer over sharded models does what it does with DistributedDataParallel."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fsdp.reference import Ranks
from tests.support.huggingface.tiny_runs import (
    LENGTH,
    Sequences,
    build_llama,
    build_lora,
    build_t5,
    fresh_accelerate,
    largest_difference,
    training_arguments,
    values,
    whole_weights,
)

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytest.importorskip("accelerate", reason="needs the package accelerate")

TOLERANCE = 2e-6
"""Of float32 losses near 4, and weights near 1, after six steps; DDP adds in another order."""

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (3, {}),
    "accumulated": (0, {"gradient_accumulation_steps": 3, "max_steps": 3, "max_grad_norm": 0.3}),
    "bf16": (1, {"bf16": True}),
    "sgd": (2, {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "recomputed": (3, {"gradient_checkpointing": True, "label_smoothing_factor": 0.1}),
    "adagrad": (1, {"optim": "adagrad", "weight_decay": 0.1}),
    "rmsprop": (0, {"optim": "rmsprop", "learning_rate": 1e-3}),
    "unfused": (
        2,
        {
            "optim": "adamw_torch",
            "lr_scheduler_type": "constant_with_warmup",
            "gradient_accumulation_steps": 2,
        },
    ),
}
"""Levels and settings."""


def compare_with_ddp(folder: Path, level: int, build: Any, settings: dict[str, Any]) -> list[float]:
    """Train with DDP and sharded; compare losses, norms, learning rates, evaluation, weights."""
    from megatron_fsdp.huggingface import ShardedTrainer

    runs = []
    settings = {"max_steps": 4, **settings}
    for kind, more in ((transformers.Trainer, {}), (ShardedTrainer, {"sharding": {}})):
        with fresh_accelerate():
            if more:
                more = {"sharding": {"zero_dp_strategy": level}}
            args = training_arguments(folder, **settings)
            data = Sequences()
            trainer = kind(build(), args, train_dataset=data, eval_dataset=data, **more)
            trainer.train()
            metrics = trainer.evaluate()
            logged = [values(trainer, name) for name in ("loss", "grad_norm", "learning_rate")]
            runs.append((*logged, metrics["eval_loss"], whole_weights(trainer.model_wrapped)))
    expected, actual = runs
    # bf16 rounds the same values alike; what differs is float32 sums in another order.
    tolerance = 2e-3 if settings.get("bf16") else TOLERANCE
    for before, after in zip(expected[:4], actual[:4]):
        torch.testing.assert_close(
            torch.tensor(after), torch.tensor(before), rtol=tolerance, atol=tolerance
        )
    assert largest_difference(actual[4], expected[4]) < 10 * tolerance
    return actual[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_ddp(ranks: Ranks, tmp_path: Path, case: str) -> None:
    level, settings = CASES[case]
    losses = ranks(2, compare_with_ddp, tmp_path, level, build_llama, settings)[0]
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", [2, 3])
def test_lora_trains_as_with_ddp(ranks: Ranks, tmp_path: Path, level: int) -> None:
    pytest.importorskip("peft", reason="needs the package peft")
    losses = ranks(2, compare_lora_with_ddp, tmp_path, level)[0]
    assert losses[-1] < losses[0]


def compare_lora_with_ddp(folder: Path, level: int) -> list[float]:
    """Compare adapters only, since files of adapters leave the base out."""
    from megatron_fsdp.huggingface import ShardedTrainer

    runs = []
    for kind, more in ((transformers.Trainer, {}), (ShardedTrainer, {"sharding": {}})):
        with fresh_accelerate():
            args = training_arguments(folder)
            trainer = kind(build_lora(), args, train_dataset=Sequences(), **more)
            trainer.train()
            weights = whole_weights(trainer.model_wrapped)
            adapters = {key: value for key, value in weights.items() if "lora_" in key}
            runs.append((values(trainer, "loss"), adapters))
    (expected, weights), (actual, sharded) = runs
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), rtol=TOLERANCE, atol=TOLERANCE
    )
    assert len(weights) == 8 and largest_difference(weights, sharded) < 10 * TOLERANCE
    return actual


# ---- checkpoints


def train_in_two_parts(folder: Path, build: Any, first: str, settings: dict[str, Any]) -> Any:
    """Train six steps at once, and with a resume after three of another kind of run."""
    from megatron_fsdp.huggingface import ShardedTrainer

    kinds = {"sharded": ShardedTrainer, "plain": transformers.Trainer}
    save = {"save_strategy": "steps", "save_steps": 3, **settings}
    runs = []
    for kind, name, until in ((first, "whole", 6), (first, "part", 3), ("sharded", "part", 6)):
        with fresh_accelerate():
            # The schedule of six steps stands; the first part stops early.
            args = training_arguments(folder / name, **save)
            stop = [StopAt(until)] if until < 6 else []
            trainer = kinds[kind](build(), args, train_dataset=Sequences(), callbacks=stop)
            trainer.train(resume_from_checkpoint=until == 6 and name == "part")
            runs.append((values(trainer, "loss"), whole_weights(trainer.model_wrapped)))
        dist.barrier()
    (at_once, weights), _, (in_parts, resumed) = runs
    torch.testing.assert_close(
        torch.tensor(in_parts), torch.tensor(at_once), rtol=TOLERANCE, atol=TOLERANCE
    )
    resumed_names = set(resumed) & set(weights)
    return largest_difference(
        {key: resumed[key] for key in resumed_names}, {key: weights[key] for key in resumed_names}
    )


class StopAt(transformers.TrainerCallback):  # type: ignore[name-defined]
    """Ends a training early, as an interruption between two steps does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["sharded", "plain"])
def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(
    ranks: Ranks, tmp_path: Path, first: str
) -> None:
    difference = ranks(2, train_in_two_parts, tmp_path, build_llama, first, {})[0]
    assert difference < 10 * TOLERANCE
    files = {path.name for path in (tmp_path / "part" / "checkpoint-6").iterdir()}
    expected = {"sharded_state", "scheduler.pt", "trainer_state.json"}
    assert expected <= files and "optimizer.pt" not in files


@pytest.mark.exhaustive
def test_lora_resumes(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the package peft")
    difference = ranks(2, train_in_two_parts, tmp_path, build_lora, "sharded", {})[0]
    assert difference < 10 * TOLERANCE
    assert (tmp_path / "part" / "checkpoint-3" / "adapter_model.safetensors").exists()


def save_best(folder: Path) -> dict[str, Any]:
    """Train to a loss that changes, and load the model of the greatest loss at the end."""
    from megatron_fsdp.huggingface import ShardedTrainer

    with fresh_accelerate():
        args = training_arguments(
            folder,
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=2,
            eval_steps=2,
            load_best_model_at_end=True,
            greater_is_better=True,
            save_total_limit=1,
        )
        data = Sequences()
        trainer = ShardedTrainer(build_llama(), args, train_dataset=data, eval_dataset=data)
        trainer.train()
        losses = values(trainer, "eval_loss")
        best = (trainer.state.best_metric, trainer.state.best_model_checkpoint)
        return {"best": best, "now": trainer.evaluate()["eval_loss"], "all": losses}


@pytest.mark.exhaustive
def test_the_best_model_is_loaded_at_the_end(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, save_best, tmp_path)
    losses = found[0]["all"]
    assert losses[0] > losses[1] > losses[2]
    for each in found:
        assert each["best"] == (losses[0], str(tmp_path / "checkpoint-2"))
        assert each["now"] == pytest.approx(losses[0])


def look_for_folders(folder: Path) -> list[bool]:
    """Return whether the folder of each checkpoint was there when the whole model would be."""
    from megatron_fsdp.huggingface import ShardedTrainer

    there = []

    class LateTrainer(ShardedTrainer):
        """Looks for the folder of a checkpoint before any rank may go on to write shards."""

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            there.append(os.path.isdir(str(output_dir)))
            dist.barrier()

    with fresh_accelerate():
        args = training_arguments(folder, save_strategy="steps", save_steps=2)
        LateTrainer(build_llama(), args, train_dataset=Sequences()).train()
    return there


@pytest.mark.exhaustive
def test_all_ranks_find_the_folder_of_the_best_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    # Ranks that disagreed whether it is there loaded it one by one, and waited for each other.
    assert ranks(2, look_for_folders, tmp_path) == [[True] * 3] * 2


def resume_where_ranks_find_different_checkpoints(folder: Path) -> tuple[int, str]:
    """Resume where rank 1 sees a later checkpoint; then load one that it does not see."""
    from megatron.huggingface import states
    from megatron.huggingface import trainer as ours
    from megatron_fsdp.huggingface import ShardedTrainer

    is_late = dist.get_rank() == 1
    with fresh_accelerate(), pytest.MonkeyPatch.context() as patches:
        settings = {"save_strategy": "steps", "save_steps": 3}
        args = training_arguments(folder, **settings)
        ShardedTrainer(build_llama(), args, train_dataset=Sequences()).train()
        earlier, later = (str(folder / f"checkpoint-{step}") for step in (3, 6))
        last = later if is_late else earlier
        for module in (ours, transformers.trainer):
            patches.setattr(module, "get_last_checkpoint", lambda directory: last)
        trainer = ShardedTrainer(build_llama(), args, train_dataset=Sequences())
        trainer.train(resume_from_checkpoint=True)
        steps = len(values(trainer, "loss"))
        if is_late:
            patches.setattr(states, "shards_folder", lambda checkpoint: None)
        with pytest.raises(ValueError) as error:
            trainer.train(resume_from_checkpoint=earlier)
    return steps, str(error.value)


@pytest.mark.exhaustive
def test_ranks_that_see_different_files_resume_the_same_checkpoint_or_none(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, resume_where_ranks_find_different_checkpoints, tmp_path)
    assert first == second
    assert first[0] == 6 and "checkpoint-3/sharded_state is not seen by rank 1" in first[1]


def save_on(folder: Path, build: Any, settings: dict[str, Any]) -> Any:
    """Train three steps, save a checkpoint and the whole model, and return the model's outputs."""
    from megatron_fsdp.huggingface import ShardedTrainer

    with fresh_accelerate():
        args = training_arguments(
            folder, save_strategy="steps", save_steps=3, max_steps=3, **settings
        )
        trainer = ShardedTrainer(build(), args, train_dataset=Sequences())
        trainer.train()
        trainer.save_model(str(folder / "final"))
        tokens = Sequences()[0]["input_ids"][None]
        with torch.no_grad():
            logits = trainer.model_wrapped(input_ids=tokens).logits
        # What the Trainer gives to its users remains theirs.
        assert trainer.model.config.vocab_size == 41
        dist.barrier()
        return logits


def build_tied() -> Any:
    return build_llama(tied=True)


def build_bf16() -> Any:
    return build_llama(dtype=torch.bfloat16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [build_llama, build_tied, build_bf16])
def test_the_saved_model_loads_into_transformers(ranks: Ranks, tmp_path: Path, build: Any) -> None:
    from megatron_fsdp.huggingface import load_weights_of_shards

    logits = ranks(2, save_on, tmp_path, build, {})[0]
    tokens = Sequences()[0]["input_ids"][None]
    files = sorted(path.name for path in (tmp_path / "final").glob("*.safetensors"))
    assert files == ["model.safetensors"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    dtype = torch.bfloat16 if build is build_bf16 else torch.float32
    assert loaded.dtype == dtype
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits)
    plain = build()
    load_weights_of_shards(plain, tmp_path / "checkpoint-3")
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=tokens).logits, logits)


@pytest.mark.exhaustive
def test_saved_adapters_load_into_peft(ranks: Ranks, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the package peft")
    logits = ranks(2, save_on, tmp_path, build_lora, {})[0]
    tokens = Sequences()[0]["input_ids"][None]
    for folder in ("final", "checkpoint-3"):
        adapters = tmp_path / folder / "adapter_model.safetensors"
        assert adapters.stat().st_size < 30_000
        model = peft.PeftModel.from_pretrained(build_llama(), tmp_path / folder)
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=tokens).logits, logits)


def resume_on(folder: Path) -> tuple[list[float], Any]:
    from megatron_fsdp.huggingface import ShardedTrainer

    with fresh_accelerate():
        args = training_arguments(folder, max_steps=4)
        trainer = ShardedTrainer(build_llama(), args, train_dataset=Sequences())
        trainer.train(resume_from_checkpoint=True)
        return values(trainer, "loss"), trainer.state.global_step


@pytest.mark.exhaustive
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_on, tmp_path, build_llama, {})
    losses, step = ranks(3, resume_on, tmp_path)[0]
    assert step == 4 and losses[3] < losses[0]


def train_twice(folder: Path) -> list[float]:
    """Evaluate before training, train twice, and save before and after."""
    from megatron_fsdp.huggingface import ShardedTrainer

    with fresh_accelerate():
        args = training_arguments(folder, max_steps=3)
        data = Sequences()
        trainer = ShardedTrainer(build_llama(), args, train_dataset=data, eval_dataset=data)
        found = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            found.append(trainer.evaluate()["eval_loss"])
        assert len(trainer.predict(data).predictions) == len(data)
        return found


@pytest.mark.exhaustive
def test_evaluation_comes_first_and_training_is_repeated(ranks: Ranks, tmp_path: Path) -> None:
    first, second, third = ranks(2, train_twice, tmp_path)[0]
    assert first > second > third


# ---- generation


def generate(folder: Path) -> tuple[Any, Any]:
    """Generate after training, on ranks whose sequences end at different lengths."""
    from megatron_fsdp.huggingface import ShardedTrainer

    with fresh_accelerate():
        args = training_arguments(folder, max_steps=2)
        trainer = ShardedTrainer(build_llama(), args, train_dataset=Sequences())
        trainer.train()
        prompt = Sequences()[dist.get_rank()]["input_ids"][None, :4]
        settings = {"max_new_tokens": 2 + 5 * dist.get_rank(), "do_sample": False}
        settings["attention_mask"] = torch.ones_like(prompt)
        tokens = trainer.model.generate(prompt, synced_gpus=True, eos_token_id=None, **settings)
        trainer.save_model(str(folder / "final"))
        dist.barrier()
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
        assert torch.equal(tokens, plain.generate(prompt, eos_token_id=None, **settings))
        return tokens.shape[1]


@pytest.mark.exhaustive
def test_ranks_generate_different_lengths_together(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, generate, tmp_path) == [6, 11]


def evaluate_by_generation(folder: Path) -> tuple[int, ...]:
    from megatron_fsdp.huggingface import ShardedSeq2SeqTrainer

    with fresh_accelerate():
        args = training_arguments(
            folder, "Seq2SeqTrainingArguments", max_steps=2, predict_with_generate=True
        )
        trainer = ShardedSeq2SeqTrainer(
            build_t5(), args, train_dataset=Sequences(), eval_dataset=Sequences()
        )
        trainer.train()
        assert math.isfinite(trainer.evaluate()["eval_loss"])
        return tuple(trainer.predict(Sequences()).predictions.shape)


@pytest.mark.exhaustive
def test_a_seq2seq_trainer_evaluates_by_generation(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, evaluate_by_generation, tmp_path) == [(32, LENGTH)] * 2

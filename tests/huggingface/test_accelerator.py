# SPDX-License-Identifier: Apache-2.0
"""accelerate's own loop over sharded models does what it does with DistributedDataParallel."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.fsdp.reference import Ranks
from tests.support.huggingface.tiny_runs import (
    Sequences,
    build_llama,
    fresh_accelerate,
    largest_difference,
    whole_weights,
)

pytest.importorskip("transformers", reason="needs the package transformers")
accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate")

TOLERANCE = 2e-6
STYLE = "free_full_weight"


def prepare(
    accelerator: Any,
    learning_rate: float = 1e-2,
    model_last: bool = False,
    shuffle: bool = True,
) -> list[Any]:
    """Return model, optimizer, loader and scheduler, prepared in one of two orders."""
    model = build_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    loader = DataLoader(Sequences(), batch_size=2, shuffle=shuffle)
    if model_last:
        scheduler, loader, optimizer, model = accelerator.prepare(
            scheduler, loader, optimizer, model
        )
        return [model, optimizer, loader, scheduler]
    return list(accelerator.prepare(model, optimizer, loader, scheduler))


def train(accelerator: Any, objects: list[Any], batches: int, clip: str = "norm") -> list[float]:
    """Run a loop as accelerate's documentation has it; return losses and norms."""
    model, optimizer, loader, scheduler = objects
    found = []
    model.train()
    for number, batch in enumerate(loader):
        if number == batches:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found.append(loss.item())
            if accelerator.sync_gradients and clip == "norm":
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            elif accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found


def compare_loops(level: int, arguments: dict[str, Any], clip: str, model_last: bool) -> None:
    from megatron_fsdp.huggingface import ShardedAccelerator

    runs: list[tuple[list[float], dict[str, Tensor]]] = []
    for kind, more in (
        (accelerate.Accelerator, {}),
        (ShardedAccelerator, {"sharding": {"zero_dp_strategy": level}}),
    ):
        with fresh_accelerate():
            torch.manual_seed(5)
            accelerator = kind(cpu=True, **arguments, **more)
            objects = prepare(accelerator, model_last=model_last)
            losses = train(accelerator, objects, 6, clip)
            runs.append((losses, whole_weights(objects[0])))
    (expected, weights), (actual, sharded) = runs
    tolerance = 2e-3 if arguments.get("mixed_precision") else TOLERANCE
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )
    assert largest_difference(sharded, weights) < 10 * tolerance


LOOPS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "plain": ({}, "norm", False),
    "accumulated": ({"gradient_accumulation_steps": 2}, "norm", True),
    "by_value": ({}, "value", False),
    "bf16": ({"mixed_precision": "bf16"}, "norm", False),
}
"""Arguments of the accelerator, the kind of clipping, and whether the model is prepared last."""

LOOPS_AT_LEVELS = [("plain", 0), ("plain", 3), ("accumulated", 3), ("by_value", 1), ("bf16", 2)]


@pytest.mark.always("accumulated-3")
@pytest.mark.parametrize(("loop", "level"), LOOPS_AT_LEVELS)
def test_a_loop_gives_the_losses_of_ddp(ranks: Ranks, loop: str, level: int) -> None:
    ranks(2, compare_loops, level, *LOOPS[loop])


def save_and_load(folder: Path) -> tuple[float, list[float], list[float]]:
    """Save after two batches, train on, and load into new objects that train on too."""
    from megatron_fsdp.huggingface import ShardedAccelerator

    with fresh_accelerate():
        accelerator = ShardedAccelerator()
        # accelerate saves no state of the generator with which loaders shuffle.
        objects = prepare(accelerator, shuffle=False)
        train(accelerator, objects, 2)
        accelerator.save_state(str(folder))
        saved = whole_weights(objects[0])
        generator = torch.get_rng_state()
        after = train(accelerator, objects, 2)
        expected_rate = objects[3].get_last_lr()[0]
    with fresh_accelerate():
        accelerator = ShardedAccelerator()
        objects = prepare(accelerator, learning_rate=1e-3, shuffle=False)
        accelerator.load_state(str(folder))
        difference = largest_difference(whole_weights(objects[0]), saved)
        assert torch.equal(torch.get_rng_state(), generator)
        again = train(accelerator, objects, 2)
        assert objects[3].get_last_lr()[0] == expected_rate
    return difference, after, again


@pytest.mark.exhaustive
def test_a_state_is_saved_as_shards_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    difference, after, again = ranks(2, save_and_load, tmp_path)[0]
    assert difference == 0 and after == again
    names = {path.name for path in tmp_path.iterdir()}
    assert {"sharded_state", "scheduler.bin"} <= names
    assert not any(name.startswith(("model", "optimizer")) for name in names)


def save_whole(folder: Path) -> Tensor:
    from megatron_fsdp.huggingface import ShardedAccelerator

    with fresh_accelerate():
        accelerator = ShardedAccelerator()
        model, *_ = objects = prepare(accelerator)
        train(accelerator, objects, 2)
        unwrapped = accelerator.unwrap_model(model)
        state = accelerator.get_state_dict(model)
        assert bool(state) == accelerator.is_main_process
        unwrapped.save_pretrained(
            folder / "pretrained", state_dict=state, is_main_process=accelerator.is_main_process
        )
        accelerator.save_model(model, str(folder / "saved"))
        with torch.no_grad():
            logits = model(input_ids=Sequences()[0]["input_ids"][None]).logits
        accelerator.wait_for_everyone()
        return logits


@pytest.mark.exhaustive
def test_whole_models_are_saved_as_accelerate_documents(ranks: Ranks, tmp_path: Path) -> None:
    import safetensors.torch
    import transformers

    logits = ranks(2, save_whole, tmp_path)[0]
    tokens = Sequences()[0]["input_ids"][None]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits)
    plain = build_llama()
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=tokens).logits, logits)


def prepare_one_by_one() -> list[str]:
    """Prepare in other ways than accelerate's documentation has it; return the messages."""
    from megatron_fsdp.huggingface import ShardedAccelerator

    messages = []
    with fresh_accelerate():
        accelerator = ShardedAccelerator()
        module = build_llama()
        model = accelerator.prepare(module)
        assert accelerator.prepare(model) is model and accelerator.prepare(module) is model
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        assert accelerator.prepare(optimizer) is optimizer
        batch = {key: value[None] for key, value in Sequences()[dist.get_rank()].items()}
        before = whole_weights(model)
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        assert largest_difference(whole_weights(model), before) > 0
        calls = [
            lambda: accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
            lambda: accelerator.prepare(nn.Linear(2, 2), device_placement=[False]),
            lambda: accelerator.join_uneven_inputs([model]).__enter__(),
        ]
        for call in calls:
            with pytest.raises((ValueError, NotImplementedError)) as error:
                call()
            messages.append(str(error.value))
        plain = build_llama()
        matrices = [each for each in plain.parameters() if each.ndim == 2]
        with pytest.raises(NotImplementedError) as error:
            accelerator.prepare(plain, torch.optim.SparseAdam(matrices))
        messages.append(str(error.value))
        assert type(plain.lm_head.weight) is nn.Parameter  # nothing was changed
    return messages


def test_objects_are_prepared_one_by_one_and_wrong_ones_refused(ranks: Ranks) -> None:
    strangers, placement, joined, matrices = ranks(2, prepare_one_by_one)[0]
    assert "hand both to prepare()" in strangers and "device_placement" in placement
    assert "the same number of batches" in joined and "SparseAdam" in matrices


def load_different_checkpoints(folder: Path) -> str:
    from megatron_fsdp.huggingface import ShardedAccelerator

    with fresh_accelerate():
        accelerator = ShardedAccelerator(cpu=True)
        prepare(accelerator)
        for name in ("0", "1"):
            accelerator.save_state(str(folder / name))
        with pytest.raises(ValueError) as error:
            accelerator.load_state(str(folder / str(dist.get_rank())))
    return str(error.value)


@pytest.mark.exhaustive
def test_ranks_that_would_load_different_checkpoints_are_told(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, load_different_checkpoints, tmp_path):
        assert message.endswith(f"different checkpoints: {tmp_path}/0, {tmp_path}/1")


def test_layers_of_the_plan_for_fsdp2_are_units() -> None:
    from megatron.huggingface.accelerator import default_units

    model = build_llama()
    kind = type(model.model.layers[0])
    model.fsdp_plan = {"model.layers.*": STYLE, "model.layers.*.mlp": STYLE}
    mlps = [layer.mlp for layer in model.model.layers]
    assert default_units(model) == [kind, *mlps]
    model._no_split_modules = None
    assert default_units(model)[::2] == list(model.model.layers)
    model.fsdp_plan = None
    assert default_units(model) == []

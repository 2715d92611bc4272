# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of GPT models with FP8 weights: main weights, and the scales of delayed scaling."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from tests.support.checkpoint.command_runs import run_json
from tests.support.transformer_engine.core_gpt import make_gpt, make_sharded_gpt
from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu

pytestmark = pytest.mark.exhaustive

FORMATS = ("fsdp_dtensor", "torch_dist")
LAYERS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")


class Run:
    """A GPT under FSDP with its optimizer, as the training program has them."""

    def __init__(self, recipe: str | None, strategy: str):
        self.model = make_sharded_gpt(recipe, strategy)
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron.mcore_adapter.core_optimizers import make_optimizer_state

        optimizer_config = OptimizerConfig(
            lr=0.01, bf16=True, use_distributed_optimizer=True, fp8_recipe=recipe
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])
        make_optimizer_state(self.optimizer)
        self.args = arguments(recipe)
        self.step = 0
        self.read: dict[str, torch.Tensor] = {}
        """The weights that the last forward read, by module: the values of their codes."""
        for name, layer in self.model.named_modules():
            if name.endswith(LAYERS):
                layer.register_forward_pre_hook(functools.partial(self._keep, name))

    def _keep(self, name: str, layer: Any, _: Any) -> None:
        self.read[name] = layer.weight.detach().dequantize().clone()

    def train(self, num_steps: int) -> list[float]:
        """Train some steps more; return the losses of this rank."""
        losses = []
        for _ in range(num_steps):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * self.step + dist.get_rank())
            tokens = torch.randint(64, (4, 32), generator=generator)
            loss = self.model(tokens, torch.arange(32)[None], None, labels=tokens).float().mean()
            loss.backward()
            losses.append(loss.item())
            self.model.finish_grad_sync()
            self.optimizer.step()
            self.step += 1
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole main weights."""
        from megatron.fsdp.dtensor.tensor_part import full_tensor

        return {name: full_tensor(value) for name, value in self.model.named_parameters()}

    def scales(self) -> dict[str, Any]:
        """Return what the modules keep for delayed scaling."""
        found = {}
        for name, layer in self.model.named_modules():
            if name.endswith(LAYERS):
                states = [layer.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd")]
                found[name] = [(one.scale.clone(), one.amax_history.clone()) for one in states]
        return found

    def parts(self, optimizer: bool = True) -> Any:
        """Return what the formats save and load."""
        from megatron.mcore_adapter.run.run_state import TrainedParts

        return TrainedParts([self.model], self.optimizer if optimizer else None)

    def save(self, folder: str, name: str) -> None:
        """Save in a format."""
        writer = formats()[name]
        state = {"args": self.args, "iteration": self.step, "checkpoint_version": 3.0}
        state["num_floating_point_operations_so_far"] = 0.0
        content = writer.collect(self.args, state, self.parts())
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        assert writer.write(self.args, content, target) == []

    def load(self, folder: str, optimizer: bool = True) -> None:
        """Load any format."""
        state = {"args": self.args, "iteration": 0, "checkpoint_version": 3.0}
        state["num_floating_point_operations_so_far"] = 0.0
        parts, reader = self.parts(optimizer), formats()["fsdp_dtensor"]
        content = reader.load(self.args, state, parts, Path(folder), lambda text: None)
        self.step = content["iteration"]


def formats() -> dict[str, Any]:
    from megatron.mcore_adapter.checkpoints.fsdp_dtensor_format import FsdpDtensorFormat
    from megatron.mcore_adapter.checkpoints.fsdp_torch_dist import FsdpTorchDistFormat

    return dict(zip(FORMATS, (FsdpDtensorFormat(), FsdpTorchDistFormat())))


def arguments(recipe: str | None) -> argparse.Namespace:
    """Return what checkpoints read of the program's arguments."""
    return argparse.Namespace(
        optimizer="adam",
        bf16=True,
        fp16=False,
        params_dtype=torch.bfloat16,
        fp8="hybrid" if recipe else None,
        fp8_recipe=recipe or "delayed",
        swiglu=False,
        untie_embeddings_and_output_weights=True,
        transformer_impl="transformer_engine",
        num_layers=2,
        num_experts=None,
        moe_layer_freq=1,
        ckpt_fully_parallel_save=True,
        ckpt_assume_constant_structure=False,
        strict_fsdp_dtensor_load=True,
    )


def same(one: Any, other: Any) -> bool:
    """Return True for equal bits in nested values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def go_on(run: Run, num_steps: int = 1) -> dict[str, Any]:
    """Return all that a checkpoint should bring back, and what comes of it."""
    found: dict[str, Any] = {"weights": run.weights()}
    if run.args.fp8 and run.args.fp8_recipe == "delayed":
        found["scales"] = run.scales()
    found["losses"] = run.train(num_steps)
    return found | {"codes": dict(run.read)}


def save_and_go_on(folder: str, recipe: str | None, strategy: str) -> dict[str, Any]:
    run = Run(recipe, strategy)
    run.train(3)
    for name in FORMATS:
        run.save(f"{folder}/{name}", name)
    return go_on(run)


def load_and_go_on(folder: str, recipe: str | None, strategy: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # Transformer Engine's own switch
        run = Run(recipe, strategy)
        run.load(folder)
        return go_on(run)


Saved = Callable[[str], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def run_with(engine_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder that a run of a recipe has saved in both formats, and how it went on."""

    @functools.cache
    def save(recipe: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp(recipe)
        return folder, engine_ranks(save_and_go_on, str(folder), recipe, "optim_grads_params")

    return save


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("delayed", "fsdp_dtensor"),
        ("delayed", "torch_dist"),
        ("tensorwise", "fsdp_dtensor"),
        ("blockwise", "torch_dist"),
    ],
)
def test_training_goes_on_bitwise(
    engine_ranks: RunOnRanks, recipe: str, name: str, run_with: Saved
) -> None:
    folder, saved = run_with(recipe)
    loaded = engine_ranks(load_and_go_on, str(folder / name), recipe, "optim")
    assert all(map(same, saved, loaded))


def test_conversions_keep_scales(engine_ranks: RunOnRanks, run_with: Saved, tmp_path: Path) -> None:
    folder, saved = run_with("delayed")
    own, converted, back = folder / "torch_dist", tmp_path / "converted", tmp_path / "back"
    run_json("convert-fsdp-dtensor-to-torch-dist", folder / "fsdp_dtensor", converted)
    converted /= "iter_0000003"
    for checkpoint in (own, converted):
        found = {key: value[0] is not None for key, value in scales_in(checkpoint).items()}
        assert found.pop("decoder.final_layernorm._extra_state/shard_0_1") is False
        assert list(found.values()) == [True] * 8
    run_json("convert-torch-dist-to-fsdp-dtensor", converted, back)
    back /= "iter_0000003"
    first = scales_in(folder / "fsdp_dtensor")
    # Megatron-Core does not write those of attention.
    assert same(scales_in(back), {key: first[key] for key in first if "attention._" not in key})
    for checkpoint in (converted, back):
        loaded = engine_ranks(load_and_go_on, str(checkpoint), "delayed", "optim_grads")
        assert all(map(same, saved, loaded))


def scales_in(folder: Path) -> dict[str, Any]:
    """Return the extra states in a checkpoint, by key."""
    stored = StoredCheckpoint(folder)
    return {key: stored.read_object(key) for key in stored.objects if "._extra_state" in key}


def save_in(folder: str, source: str, recipe: str | None) -> None:
    run = Run(recipe, "optim_grads_params")
    run.load(source)
    run.save(folder, "fsdp_dtensor")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_runs_in_bf16_load_and_save_the_same_main_weights(
    engine_ranks: RunOnRanks, recipe: str, run_with: Saved, tmp_path: Path
) -> None:
    folder, saved = run_with(recipe)
    in_bf16 = tmp_path / "bf16"
    for name in FORMATS:
        engine_ranks(save_in, str(in_bf16 / name), str(folder / name), None)
        loaded = engine_ranks(load_and_go_on, str(in_bf16 / name), recipe, "optim")
        for before, after in zip(saved, loaded):
            assert same(before["weights"], after["weights"])
            # Scales of delayed scaling are nowhere in a checkpoint of bf16: they begin anew.
            assert same(before["codes"], after["codes"]) == (recipe == "tensorwise")


def load_with_megatron_core(folder: str, recipe: str | None) -> tuple[Any, Any]:
    """Load a torch_dist checkpoint without FSDP; return weights and, in FP8, scales."""
    transformer_engine_on_cpu.use()
    from megatron.core import dist_checkpointing

    _, module = make_gpt(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
        sharded = module.module.sharded_state_dict()
        state = dist_checkpointing.load(dict(sharded), folder)
        module.module.load_state_dict({key: state[key] for key in sharded})
    weights = {name: value.detach() for name, value in module.named_parameters()}
    scales = {
        name: layer.fp8_meta["scaling_fwd"].scale
        for name, layer in module.named_modules()
        if recipe and name.endswith(LAYERS)
    }
    return weights if recipe is None else None, scales


def test_megatron_core_loads_weights_and_scales(engine_ranks: RunOnRanks, run_with: Saved) -> None:
    saved_in, (saved, _) = run_with("delayed")
    folder = str(saved_in / "torch_dist")
    weights, _ = engine_ranks(load_with_megatron_core, folder, None)[0]
    wanted = {name: value.bfloat16() for name, value in saved["weights"].items()}
    assert same({f"module.module.{name}": value for name, value in weights.items()}, wanted)
    _, scales = engine_ranks(load_with_megatron_core, folder, "delayed")[0]
    for name, scale in scales.items():
        assert torch.equal(scale, saved["scales"][f"module.module.{name}"][0][0])

# SPDX-License-Identifier: Apache-2.0
"""Weights of `quantized_model_init`: sharded, gathered as codes, trained from fp32 main weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.fsdp.wrong_calls import message_of
from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu

WIDTH, INNER = 128, 256
RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    return {
        # Otherwise the replicas of the reference would have to agree on their activations too.
        "delayed": lambda: recipe.DelayedScaling(reduce_amax=False),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
        "mxfp8": recipe.MXFP8BlockScaling,
    }[name]()


def build(recipe: Any, keeps_values: bool = True, device: str = "cpu") -> nn.Sequential:
    te = transformer_engine_on_cpu.use()
    torch.manual_seed(5)
    with te.quantized_model_init(
        enabled=True, recipe=recipe, preserve_high_precision_init_val=keeps_values
    ):
        return nn.Sequential(
            te.Linear(WIDTH, INNER, params_dtype=torch.bfloat16, device=device),
            te.LayerNormLinear(INNER, WIDTH, params_dtype=torch.bfloat16, device=device),
            te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device=device),
        )


def data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(32, WIDTH, generator=generator).bfloat16()


def loss_of(model: nn.Module, recipe: Any, step: int, rank: int) -> Tensor:
    te = transformer_engine_on_cpu.use()
    with te.autocast(enabled=True, recipe=recipe):
        return model(data(step, rank)).float().pow(2).mean()


def first_values(parameter: Any) -> Tensor:
    """Return a weight as it was before quantization, in fp32."""
    get = getattr(parameter, "get_high_precision_init_val", None)
    return (parameter.detach() if get is None else get()).float().clone()


class Reference:
    """The unsharded model, with a replica for the data of each rank, and fp32 main weights."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.replicas = [build(recipe) for _ in range(dist.get_world_size())]
        first = list(self.replicas[0].parameters())
        self.mains = [nn.Parameter(first_values(parameter)) for parameter in first]
        self.optimizer = torch.optim.AdamW(self.mains, lr=0.01)
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def step(self, step: int) -> list[float]:
        """Train a step; return the loss on the data of each rank."""
        losses = []
        sums = [torch.zeros_like(main) for main in self.mains]
        for rank, replica in enumerate(self.replicas):
            loss = loss_of(replica, self.recipe, step, rank)
            loss.backward()
            losses.append(float(loss.detach()))
            for total, parameter in zip(sums, replica.parameters()):
                total += parameter.grad.float()
                parameter.grad = None
        for main, total in zip(self.mains, sums):
            main.grad = total / len(self.replicas)
        self.optimizer.step()
        self.install()
        return losses

    @torch.no_grad()
    def install(self) -> None:
        from transformer_engine.pytorch.tensor.utils import quantize_master_weights

        alone = self.alone[dist.get_rank()]
        for replica in self.replicas:
            quantized, mains = [], []
            for parameter, main in zip(replica.parameters(), self.mains):
                if hasattr(parameter, "get_high_precision_init_val"):
                    quantized.append(parameter)
                    mains.append(main.detach().view(-1))
                else:
                    parameter.copy_(main)
            quantize_master_weights(quantized, mains, [0] * len(mains), alone)


def settings_of(level: int, variant: str) -> dict[str, Any]:
    """Return settings of `fully_shard`; they call collectives for a hybrid mesh."""
    from megatron_fsdp import MixedPrecisionPolicy
    from tests.support.fsdp.meshes import mesh_of

    te = transformer_engine_on_cpu.use()
    settings: dict[str, Any] = {"zero_dp_strategy": level}
    settings["fsdp_unit_modules"] = [te.Linear, te.LayerNormLinear]
    settings["mixed_precision_policy"] = MixedPrecisionPolicy(torch.float32, torch.float32)
    settings["keep_fp8_transpose_cache"] = variant == "copies kept"
    settings["fsdp_double_buffer"] = variant == "slots"
    settings["enable_fine_grained_param_gather"] = variant == "fine grained"
    if variant.startswith("hybrid"):
        mesh = mesh_of("outer", "inner", sizes=(2, 1))
        settings |= {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        settings["outer_dp_sharding_strategy"] = variant.removeprefix("hybrid_")
    return settings


def compare(recipe_name: str, level: int, variant: str = "flat") -> None:
    from megatron.fsdp.dtensor.tensor_part import full_tensor
    from megatron_fsdp import fully_shard

    recipe = recipe_of(recipe_name)
    reference = Reference(recipe)
    module = build(recipe)
    wanted = [first_values(parameter) for parameter in module.parameters()]
    model, optimizer = fully_shard(
        module, torch.optim.AdamW(module.parameters(), lr=0.01), **settings_of(level, variant)
    )
    for own, first in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(full_tensor(own), first)  # the first main weights, bit by bit
    read: list[tuple[str, Tensor]] = []
    for name, layer in module.named_children():
        layer.register_forward_pre_hook(
            lambda layer, _, name=name: read.append((name, layer.weight.dequantize()))
        )
    for step in range(3):
        read.clear()
        codes = [layer.weight.dequantize() for layer in reference.replicas[0]]
        losses = reference.step(step)
        loss = loss_of(model, recipe, step, dist.get_rank())
        loss.backward()
        assert [torch.equal(mine, codes[int(name)]) for name, mine in read] == [True] * 3
        assert float(loss.detach()) == losses[dist.get_rank()], step
        optimizer.step()
        optimizer.zero_grad()
        for own, main in zip(model.parameters(), reference.mains, strict=True):
            assert torch.equal(full_tensor(own), main), step
    assert bool(model.memory_slots) == (variant == "slots")


# Level 3 has every recipe, since it alone gathers for each pass.
FLAT = [("current", 2), ("block", 2), ("mxfp8", 1), ("nvfp4", 1)]


@pytest.mark.always("mxfp8-1", "current-3", "nvfp4-3", "block-3")
@pytest.mark.parametrize(("recipe", "level"), [*FLAT, *((recipe, 3) for recipe in RECIPES)])
def test_weights_and_losses_have_the_bits_of_the_unsharded_model(
    blackwell: RunOnRanks, recipe: str, level: int
) -> None:
    blackwell(compare, recipe, level)


@pytest.mark.always("mxfp8-slots", "block-hybrid_optim")
@pytest.mark.parametrize(
    ("recipe", "variant"),
    [
        ("current", "slots"),
        ("mxfp8", "slots"),
        ("mxfp8", "fine grained"),
        ("current", "hybrid_no_shard"),
        ("block", "hybrid_optim"),
        ("mxfp8", "hybrid_optim"),
    ],
)
def test_other_settings_have_them_too(blackwell: RunOnRanks, recipe: str, variant: str) -> None:
    blackwell(compare, recipe, 3, variant)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "level", "variant"),
    [("delayed", 3, "flat"), ("current", 3, "copies kept"), ("block", 1, "copies kept")],
)
def test_transposed_copies_are_made_anew(
    hopper: RunOnRanks, recipe: str, level: int, variant: str
) -> None:
    hopper(compare, recipe, level, variant)


def load_before_sharding() -> None:
    transformer_engine_on_cpu.use()
    from megatron.fsdp.dtensor.tensor_part import full_tensor
    from megatron_fsdp import fully_shard

    module = build(recipe_of("current"))
    with torch.no_grad():
        module[0].weight.copy_(torch.full((INNER, WIDTH), 0.25))
    model, _ = fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1))
    weight = full_tensor(next(iter(model.parameters())))
    assert torch.equal(weight, torch.full_like(weight, 0.25))


def test_what_was_loaded_before_sharding_is_trained(blackwell: RunOnRanks) -> None:
    blackwell(load_before_sharding)


def shard_from_meta(recipe_name: str, keeps_values: bool) -> None:
    """Check that a model of the meta device begins with codes of values, and trains as another."""
    te = transformer_engine_on_cpu.use()
    from megatron.fsdp.dtensor.tensor_part import full_tensor
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    recipe = recipe_of(recipe_name)
    losses = []
    settings: dict[str, Any] = {
        "fsdp_unit_modules": [te.Linear, te.LayerNormLinear],
        "mixed_precision_policy": MixedPrecisionPolicy(torch.float32, torch.float32),
    }
    mains: list[Tensor] = []
    for device in ("meta", "cpu"):
        module = build(recipe, keeps_values or device == "cpu", device)
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), mains):
                if hasattr(parameter, "get_high_precision_init_val"):
                    parameter.get_high_precision_init_val().copy_(value)
                parameter.copy_(value)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        settings["init_model_with_meta_device"] = device == "meta"
        model, optimizer = fully_shard(module, optimizer, **settings)
        codes = [type(group.parameters[0]).__name__ for group in model.groups if len(group.names)]
        assert sum(name.endswith(("Float8Tensor", "MXFP8Tensor")) for name in codes) == 3
        mains = mains or [full_tensor(parameter) for parameter in model.parameters()]
        assert mains[0].std() > 0.01
        for step in range(2):
            loss = loss_of(model, recipe, step, dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[:2] == losses[2:]


@pytest.mark.always("mxfp8-False")
@pytest.mark.parametrize(("recipe", "keeps_values"), [("current", True), ("mxfp8", False)])
def test_weights_of_the_meta_device_are_quantized_unit_by_unit(
    blackwell: RunOnRanks, recipe: str, keeps_values: bool
) -> None:
    blackwell(shard_from_meta, recipe, keeps_values)


def tie_on_meta() -> str:
    from megatron_fsdp import fully_shard_model

    module = build(recipe_of("current"), device="meta")
    module.append(build(recipe_of("current"), device="meta")[2])
    module[3].weight = module[2].weight
    return message_of(
        NotImplementedError, fully_shard_model, module, init_model_with_meta_device=True
    )


def test_tied_weights_that_initialisation_replaces_are_refused(blackwell: RunOnRanks) -> None:
    for message in blackwell(tie_on_meta):
        assert "Linear replaces weight" in message and "build it on a device" in message


def copies_for_backward(recipe_name: str, keeps: bool) -> list[bool]:
    """Return True where a weight has a transposed copy.

    In its forward, before its backward, in it, after it, after an evaluation, and after a step.
    """
    te = transformer_engine_on_cpu.use()
    from megatron_fsdp import fully_shard

    recipe = recipe_of(recipe_name)
    module = build(recipe)
    model, optimizer = fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        fsdp_unit_modules=[te.Linear, te.LayerNormLinear],
        keep_fp8_transpose_cache=keeps,
        overlap_param_gather=False,
    )
    group = next(group for group in model.groups if group.names == ["0.weight"])
    name = "_transpose" if recipe_name == "current" else "_columnwise_data"
    seen: list[bool] = []

    def note(*_: Any) -> None:
        seen.append(getattr(group.parameters[0], name) is not None)

    handle = module[0].register_forward_hook(note)
    inputs = data(0, 0).requires_grad_()  # so that the backward reads the weight
    with te.autocast(enabled=True, recipe=recipe):
        loss = model(inputs).float().pow(2).mean()
    note()
    group.parameters[0].register_hook(note)
    loss.backward()
    note()
    handle.remove()
    with torch.no_grad():
        loss_of(model, recipe, 0, 0)
    note()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        loss_of(model, recipe, 0, 0)
    note()
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "keeps"), [("current", False), ("current", True), ("block", True)]
)
def test_copies_for_the_backward_are_freed_with_their_unit_or_kept(
    hopper: RunOnRanks, recipe: str, keeps: bool
) -> None:
    expected = [keeps, keeps, True, False, keeps, keeps]
    assert hopper(copies_for_backward, recipe, keeps) == [expected] * 2


def frozen_base(recipe_name: str) -> None:
    te = transformer_engine_on_cpu.use()
    from megatron_fsdp import fully_shard

    recipe = recipe_of(recipe_name)
    reference, module = build(recipe), build(recipe)
    for layer in (*reference, *module):
        layer.weight.requires_grad_(False)
    model, _ = fully_shard(
        module,
        torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1),
        fsdp_unit_modules=[te.Linear, te.LayerNormLinear],
    )
    for _ in range(2):
        assert float(loss_of(model, recipe, 0, 0)) == float(loss_of(reference, recipe, 0, 0))
        loss_of(model, recipe, 0, 0).backward()
        loss_of(reference, recipe, 0, 0).backward()


@pytest.mark.always("mxfp8")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_frozen_weights_are_gathered_as_bytes(blackwell: RunOnRanks, recipe: str) -> None:
    blackwell(frozen_base, recipe)


def gathered(recipe_name: str) -> tuple[int, int]:
    """Return the bytes that a forward gathers, and the number of elements of its matrices."""
    te = transformer_engine_on_cpu.use()
    from megatron.fsdp import trace
    from megatron.fsdp.engine.observe import GATHER
    from megatron_fsdp import fully_shard

    recipe = recipe_of(recipe_name)
    module = nn.Sequential(build(recipe)[2])
    model, _ = fully_shard(
        module, torch.optim.SGD(module.parameters(), lr=0.1), fsdp_unit_modules=[te.Linear]
    )
    with torch.no_grad(), trace.record() as recording:
        loss_of(model, recipe, 0, 0)
    gathers = [entry for entry in recording.collectives if entry.track == GATHER]
    return sum(entry.num_bytes for entry in gathers), WIDTH * WIDTH


def test_codes_travel(blackwell: RunOnRanks) -> None:
    for recipe, ratio in {"current": 1.0, "block": 1.0, "nvfp4": 0.5}.items():
        for num_bytes, numel in blackwell(gathered, recipe):
            assert num_bytes == ratio * numel


def refuse() -> list[str]:
    """Shard weights that have lost their values, and weights at level 0."""
    transformer_engine_on_cpu.use()
    from megatron_fsdp import fully_shard

    messages = []
    for level in (3, 0):
        module = build(recipe_of("current"))
        for layer in module if level else ():
            layer.weight.clear_high_precision_init_val()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        settings = {"zero_dp_strategy": level}
        messages.append(message_of(NotImplementedError, fully_shard, module, optimizer, **settings))
    return messages


def test_what_is_not_built_is_refused_on_all_ranks(blackwell: RunOnRanks) -> None:
    first, second = blackwell(refuse)
    assert first == second
    no_values, level_0 = first
    assert "Float8Tensor" in no_values and "preserve_high_precision_init_val=True" in no_values
    assert "use level 1" in level_0

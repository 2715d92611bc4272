# SPDX-License-Identifier: Apache-2.0
"""Units that code unshards and reshards itself, as users of FSDP2 do."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import UnshardHandle

import megatron.fsdp
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.fsdp import models
from tests.support.fsdp.models import Outer, ResidualBlock
from tests.support.fsdp.optimizers import OPTIMIZERS
from tests.support.fsdp.reference import Ranks, batch, close, evaluate, loss_of, mean_loss, on_ranks
from tests.support.fsdp.state_dicts import whole
from tests.support.fsdp.watched_communication import watching_collectives
from tests.support.fsdp.wrong_calls import message_of
from tests.support.pairwise import pairwise


def sharded(
    level: int, name: str = "several_units", **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = models.build(name)
    return fully_shard(
        module,
        OPTIMIZERS["adamw"](module.parameters()),
        fsdp_unit_modules=type(module).units,
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
        **settings,
    )


def is_gathered(module: nn.Module, model: MegatronFSDP) -> bool:
    (unit,) = (unit for unit in model._units if module in unit.modules)
    return any(group.compute.is_allocated for group in unit.groups)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at_once", "async"])
@on_ranks(2)
def test_a_unit_that_was_unsharded_by_hand_is_not_gathered_again(asynchronous: bool) -> None:
    """Show that a unit is gathered once, with the main weights, and freed by either end."""
    model, _ = sharded(3)
    block = model.module.blocks[1]
    with torch.no_grad():
        model(batch(0, 0, 0))
        with watching_collectives() as alone:
            expected = model(batch(0, 0, 0))
        model.get_parameter("module.blocks.1.up.weight").mul_(1.5)
        with watching_collectives() as gathers:
            assert not is_gathered(block, model)
            handle = model.unshard(block, async_op=asynchronous)
            assert is_gathered(block, model) and not is_gathered(model.module.blocks[0], model)
            assert isinstance(handle, UnshardHandle) if asynchronous else handle is None
            if handle is not None:
                handle.wait()
            assert len(gathers) == 1
            for sharded_param in model.sharded_params:
                if sharded_param.name.startswith("blocks.1."):
                    weight = full_tensor(sharded_param.parameter)
                    close(sharded_param.compute.detach(), weight, sharded_param.name, 0.0)
            model.unshard(block)
            output = model(batch(0, 0, 0))
        assert [kind for kind, *_ in gathers] == [kind for kind, *_ in alone]
    assert not torch.equal(output, expected) and not is_gathered(block, model)
    model.unshard(block)
    model.reshard(block)
    assert not is_gathered(block, model)
    for module in (None, model.module.embed):  # a small module that is gathered with the root
        model.unshard()
        assert is_gathered(model.module, model)
        model.reshard(module)
        assert not is_gathered(model.module, model)


def train(level: int, name: str, settings: dict[str, Any]) -> None:
    """Unshard and reshard wherever code may, and compare with the unsharded model."""
    reference = models.build(name)
    expected = OPTIMIZERS["adamw"](reference.parameters())
    model, optimizer = sharded(level, name, **settings)
    blocks = list(model.module.blocks)
    # FSDP2's explicit prefetching: a layer gathers the next one, or one that comes much later.
    for block, other in zip(blocks, blocks[1:] + blocks[:1]):
        block.register_forward_pre_hook(lambda *_, other=other: model.unshard(other, True) and None)
        block.register_full_backward_pre_hook(
            lambda *_, other=other: model.unshard(other, True) and None
        )
    blocks[0].register_forward_hook(lambda *_: model.reshard(blocks[1]))  # gathered, not used yet
    for step in range(3):
        mean_loss(reference, step).backward()
        model.unshard(blocks[2], async_op=True)
        loss = loss_of(model(batch(step, dist.get_rank(), 0)))
        model.unshard()
        model.reshard(blocks[2])
        loss.backward()
        model.unshard(blocks[1])  # stays over the step, which brings new weights
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        for key, value in whole(model.state_dict()).items():
            weight = reference.get_parameter(key.removeprefix("module.")).detach()
            close(value, weight, f"{key} after step {step}")
        close(evaluate(model, step)[0], evaluate(reference, step)[0], f"output after step {step}")
        for block in blocks:
            model.reshard(block)
            assert is_gathered(block, model) == (level < 3)


SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "slots": {"fsdp_double_buffer": True}}


@pytest.mark.always("*level=3", "*level=1")
@pytest.mark.parametrize(
    ("name", "settings", "level"),
    pairwise(
        always=[("several_units", "plain", 3), ("tied_across_units", "slots", 3)],
        name=["several_units", "tied_across_units"],
        settings=SETTINGS,
        level=range(4),
    ),
)
def test_training_with_units_unsharded_by_hand_matches_the_unsharded_model(
    ranks: Ranks, name: str, settings: str, level: int
) -> None:
    ranks(2, train, level, name, SETTINGS[settings])


@on_ranks(2)
def test_below_level_3_unshard_installs_new_weights_and_reshard_does_nothing() -> None:
    """Show that weights are as new as the step, and that nothing is gathered twice or freed."""
    for level in (1, 2):
        model, optimizer = sharded(level)
        loss_of(model(batch(0, dist.get_rank(), 0))).backward()
        optimizer.step()
        with watching_collectives() as gathers:
            model.unshard(model.module.blocks[0])
            model.unshard(model.module.blocks[0])
        assert len(gathers) == 1
        model.reshard(model.module.blocks[0])
        for sharded_param in model.sharded_params:
            if sharded_param.name.startswith("blocks.0."):
                weight = full_tensor(sharded_param.parameter)
                close(sharded_param.compute.detach(), weight, sharded_param.name, 0.0)


@on_ranks(1)
def test_modules_that_are_no_units_are_refused_with_the_nearest_unit() -> None:
    module = models.build("nested_units")
    model = fully_shard_model(module, fsdp_unit_modules=[ResidualBlock, Outer])
    for call in (model.unshard, model.reshard):
        inside = message_of(ValueError, call, module.outer[1].second.up)
        assert "Linear inside of the unit 'outer.1.second'" in inside
        assert "ModuleList inside of the unit 'root'" in message_of(ValueError, call, module.blocks)
        assert "Linear outside of the model" in message_of(ValueError, call, nn.Linear(2, 2))
        assert "str" in message_of(ValueError, call, "blocks.0")
    plain = megatron.fsdp.fully_shard(models.build_stack(), units=[ResidualBlock])
    plain.unshard(plain.module.blocks[0])
    plain.reshard(plain.module.blocks[0])

# SPDX-License-Identifier: Apache-2.0
"""State dicts: full shapes at any moment, copies and files, checkpoints from any layout into any other."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, Replicate

from megatron.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron.fsdp.dtensor.uneven_dtensor import (
    gather_uneven_dtensor_to_full_tensor,
    redistribute_uneven_dtensor_to_replicated,
    uneven_dtensor_to_full_tensor,
)
from tests.fsdp import models
from tests.fsdp.reference import Meshes, batch, evaluate, loss_of, optimizer_over, shard_mesh

Ranks = Callable[..., list[Any]]
NAMES = ["scalars", "tied_across_units", "frozen_in_part"]


def sharded(
    name: str, level: int, module: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build(name) if module is None else module
    return fully_shard(
        module,
        optimizer_over(module),
        shard_mesh(),
        fsdp_unit_modules=type(module).units,
        zero_dp_strategy=level,
        mixed_precision_policy=MixedPrecisionPolicy(None),
        **settings,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """On the same data on every rank, so that the result is the same in every world."""
    for step in range(steps):
        loss_of(model(batch(step, 0, 0), step=step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: uneven_dtensor_to_full_tensor(value) if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def assert_equal(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )


def look_at_any_moment(name: str, level: int) -> None:
    expected = {"module." + key: value for key, value in models.build(name).state_dict().items()}
    model, optimizer = sharded(name, level)
    x = batch(0, dist.get_rank(), 0)
    assert_equal(whole(model.state_dict()), expected)
    output = model(x)
    assert_equal(whole(model.state_dict()), expected)
    loss_of(output).backward()
    assert_equal(whole(model.state_dict()), expected)
    optimizer.step()
    state = model.state_dict()
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in expected.items()
    }
    unsharded = models.build(name)
    unsharded.load_state_dict(
        {key.removeprefix("module."): value for key, value in whole(state).items()}
    )
    for left, right in zip(evaluate(model, 0), evaluate(unsharded, 0), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_state_dict_has_full_shapes_and_current_weights_at_any_moment(
    ranks: Ranks, name: str, level: int
) -> None:
    ranks(3, look_at_any_moment, name, level)


def gather_in_three_ways() -> None:
    model, _ = sharded("scalars", 3)
    for value in model.state_dict().values():
        full = uneven_dtensor_to_full_tensor(value)
        for gather in (
            redistribute_uneven_dtensor_to_replicated,
            gather_uneven_dtensor_to_full_tensor,
        ):
            replicated = gather(value)
            assert isinstance(replicated, DTensor)
            assert replicated.placements == (Replicate(),)
            assert replicated.shape == value.shape
            assert torch.equal(replicated.to_local(), full)
        assert (
            gather_uneven_dtensor_to_full_tensor(value, target_device="cpu").to_local().device.type
            == "cpu"
        )


def test_uneven_dtensors_are_gathered_whole(ranks: Ranks) -> None:
    ranks(3, gather_in_three_ways)


def keep_the_best(level: int) -> None:
    """copy.deepcopy keeps what was, torch.save and torch.load (weights_only, its default) bring it back."""
    model, optimizer = sharded("scalars", level)
    train(model, optimizer, 1)
    best_model, best_optimizer = (
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
    )
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    before = whole(best_model)
    outputs = evaluate(model, 0)
    train(model, optimizer, 2)
    assert_equal(whole(best_model), before)
    later = whole(model.state_dict())
    assert all(not torch.equal(later[name], value) for name, value in before.items())

    model.load_state_dict(best_model)
    optimizer.load_state_dict(best_optimizer)
    assert all(
        torch.equal(left, right) for left, right in zip(evaluate(model, 0), outputs, strict=True)
    )
    train(model, optimizer, 2)
    assert_equal(whole(model.state_dict()), later)

    file.seek(0)
    loaded = torch.load(file)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, 2)
    assert_equal(whole(model.state_dict()), later)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_deepcopy_and_torch_save_keep_a_state(ranks: Ranks, level: int) -> None:
    ranks(2, keep_the_best, level)


def save(name: str, level: int, path: str, with_torch_functions: bool) -> None:
    model, optimizer = sharded(name, level)
    train(model, optimizer, 2)
    state = checkpointed_state(model, optimizer, with_torch_functions)
    dcp.save(state, checkpoint_id=path)


def checkpointed_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, with_torch_functions: bool
) -> dict[str, Any]:
    if with_torch_functions:
        model_state, optimizer_state = torch_state_dict.get_state_dict(model, optimizer)
        assert set(optimizer_state["state"]) == {
            name for name, p in model.named_parameters() if p.requires_grad
        }
        return {"model": model_state, "optimizer": optimizer_state}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(name: str, level: int, path: str, with_torch_functions: bool) -> None:
    """Into a freshly built model of other weights; then both go on as if nothing had happened."""
    expected = models.build(name)
    expected_optimizer = optimizer_over(expected)
    train(expected, expected_optimizer, 2)
    module = models.build(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    model, optimizer = sharded(name, level, module)
    state = checkpointed_state(model, optimizer, with_torch_functions)
    dcp.load(state, checkpoint_id=path)
    if with_torch_functions:
        torch_state_dict.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    else:
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    for left, right in zip(
        evaluate(model, 0), evaluate(expected, 0), strict=True
    ):  # active at once
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)
    train(model, optimizer, 2)
    train(expected, expected_optimizer, 2)
    assert_equal(
        whole(model.state_dict()),
        {"module." + key: value for key, value in expected.state_dict().items()},
        1e-11,
    )


PAIRS = [((2, 3), (3, 3)), ((4, 3), (1, 0)), ((1, 2), (4, 1)), ((2, 0), (4, 3)), ((3, 1), (2, 2))]
"""World size and level of saving, and of loading."""


@pytest.mark.parametrize(
    ("saved", "loaded", "with_torch_functions"),
    [(*pair, False) for pair in PAIRS] + [(*pair, True) for pair in PAIRS[:2]],
    ids=str,
)
def test_checkpoint_loads_into_another_world_and_strategy(
    ranks: Ranks,
    tmp_path: Path,
    saved: tuple[int, int],
    loaded: tuple[int, int],
    with_torch_functions: bool,
) -> None:
    for name in NAMES:
        path = str(tmp_path / name)
        ranks(saved[0], save, name, saved[1], path, with_torch_functions)
        ranks(loaded[0], load, name, loaded[1], path, with_torch_functions)


def load_unsharded(level: int) -> None:
    """Plain state dicts of model and optimizer, under the module's own names and the wrapper's."""
    expected = models.build("scalars")
    expected_optimizer = torch.optim.AdamW(expected.named_parameters(), lr=0.02, weight_decay=0.1)
    train(expected, expected_optimizer, 2)
    for prefix in ("", "module."):
        model, optimizer = sharded("scalars", level)
        result = model.load_state_dict(
            {prefix + key: value for key, value in expected.state_dict().items()}
        )
        assert not result.missing_keys
        assert not result.unexpected_keys
        optimizer.load_state_dict(copy.deepcopy(expected_optimizer.state_dict()))
        for left, right in zip(evaluate(model, 0), evaluate(expected, 0), strict=True):
            assert torch.equal(left, right)
        copied = copy.deepcopy(expected)
        copied_optimizer = optimizer_over(copied)
        copied_optimizer.load_state_dict(copy.deepcopy(expected_optimizer.state_dict()))
        train(model, optimizer, 2)
        train(copied, copied_optimizer, 2)
        assert_equal(
            whole(model.state_dict()),
            {"module." + key: value for key, value in copied.state_dict().items()},
            1e-11,
        )


@pytest.mark.parametrize("level", [0, 1, 3])
def test_state_of_the_unsharded_model_and_optimizer_loads(ranks: Ranks, level: int) -> None:
    ranks(2, load_unsharded, level)


def load_into_bf16() -> None:
    """The weights of the next forward are the loaded ones, before any optimizer step."""
    model = fully_shard_model(
        models.build("several_units", torch.bfloat16),
        shard_mesh(),
        fsdp_unit_modules=[models.Block],
    )
    other = models.Stack().bfloat16()
    model.load_state_dict(other.float().state_dict())
    x = batch(0, 0, 0).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(x), other.bfloat16()(x))


def test_loaded_weights_are_active_at_once(ranks: Ranks) -> None:
    ranks(2, load_into_bf16)


def load_what_does_not_fit() -> str:
    model, optimizer = sharded("several_units", 3)
    before = whole(model.state_dict())
    state = models.build("several_units").state_dict()
    state["embed.weight"] = torch.zeros(2, 2)
    state["stranger"] = state.pop("head.bias")
    state["head.weight"] = torch.ones_like(state["head.weight"])
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    assert_equal(whole(model.state_dict()), before)  # nothing was loaded in part
    del state["embed.weight"]
    result = model.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == ["embed.weight", "head.bias"]
    assert result.unexpected_keys == ["stranger"]
    assert torch.equal(whole(model.state_dict())["module.head.weight"], state["head.weight"])

    other_module = models.build("scalars")
    other = optimizer_over(other_module)
    _, other = fully_shard(other_module, other, shard_mesh())
    with pytest.raises(ValueError, match="param_groups"):
        optimizer.load_state_dict(other.state_dict())
    return str(error.value)


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(ranks: Ranks) -> None:
    for message in ranks(2, load_what_does_not_fit):
        for part in (
            "embed.weight",
            "(5, 5)",
            "(2, 2)",
            "missing keys: head.bias",
            "unexpected keys: stranger",
        ):
            assert part in message


def buffers_travel() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = fully_shard_model(module, shard_mesh(), fsdp_unit_modules=[nn.Linear])
    model(torch.randn(5, 4))
    state = model.state_dict()
    assert torch.equal(state["module.1.running_mean"], module[1].running_mean)
    assert state["module.1.num_batches_tracked"].item() == 1
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fresh = fully_shard_model(other, shard_mesh(), fsdp_unit_modules=[nn.Linear])
    fresh.load_state_dict(state)
    assert torch.equal(fresh.module[1].running_mean, module[1].running_mean)


def test_buffers_are_in_the_state(ranks: Ranks) -> None:
    ranks(2, buffers_travel)


def load_state_of_another_layout() -> str:
    saved = fully_shard_model(
        nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 24, bias=False)]),
        shard_mesh(),
        disable_bucketing=True,
    )
    units = fully_shard_model(
        nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 24, bias=False)]),
        shard_mesh(),
        fsdp_unit_modules=[nn.Linear],
    )
    chunks = [
        [value._local_tensor.chunks for value in model.state_dict().values()]
        for model in (saved, units)
    ]
    assert any(left != right for left, right in zip(*chunks))
    with pytest.raises(RuntimeError) as error:
        units.load_state_dict(saved.state_dict())
    return str(error.value)


def test_state_of_another_layout_is_refused(ranks: Ranks) -> None:
    for message in ranks(2, load_state_of_another_layout):
        assert "sharded for another layout" in message
        assert "torch.distributed.checkpoint" in message


def write_piece_of_the_same_size() -> None:
    model = fully_shard_model(nn.Linear(8, 8, bias=False), shard_mesh())
    state = model.state_dict()
    value = state["module.weight"]
    other = 1 - dist.get_rank()
    flat_range = model._by_name["weight"].group.layout.owned(0, other)
    assert flat_range.numel == value._local_tensor.numel()
    value._local_tensor.chunks = tuple(flat_range.boxes())
    with pytest.raises(RuntimeError, match="sharded for another layout"):
        model.load_state_dict(state)


def test_a_piece_of_the_same_size_from_elsewhere_is_refused(ranks: Ranks) -> None:
    ranks(2, write_piece_of_the_same_size)


LAYOUTS: dict[str, tuple[int, str, int, int, torch.dtype]] = {
    "hybrid_optim": (4, "outer2", 3, 1, torch.float32),
    "hybrid_bf16": (4, "outer2", 2, 0, torch.bfloat16),
    "flat_of_three": (3, "flat", 3, 0, torch.float32),
    "bf16_on_two": (2, "flat", 1, 0, torch.bfloat16),
    "one_rank": (1, "flat", 0, 0, torch.float32),
    "more_outer_ranks": (4, "outer4", 3, 1, torch.float32),
}
"""World, mesh, level, outer level and compute dtype; main weights are fp32 everywhere."""


def laid_out(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    _, mesh, level, outer, dtype = LAYOUTS[layout]
    module = models.build("tied_across_units", dtype)
    return fully_shard(
        module,
        optimizer_over(module),
        **Meshes().arguments(mesh),
        fsdp_unit_modules=type(module).units,
        zero_dp_strategy=level,
        outer_dp_sharding_strategy=outer,
        grad_reduce_in_fp32=True,
    )


def all_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Main weights and moments, whole, by name."""
    state = whole(model.state_dict())
    for name, parameter in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{slot}"] = uneven_dtensor_to_full_tensor(
                optimizer.state[parameter][slot]
            )
    return state


def save_layout(layout: str, path: str) -> dict[str, Tensor]:
    model, optimizer = laid_out(layout)
    for step in range(2):
        loss_of(model(batch(step, dist.get_rank(), 0).to(LAYOUTS[layout][4]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(checkpointed_state(model, optimizer, False), checkpoint_id=path)
    return all_state(model, optimizer)


def load_layout(layout: str, path: str, expected: dict[str, Tensor]) -> None:
    model, optimizer = laid_out(layout)
    state = checkpointed_state(model, optimizer, False)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_equal(all_state(model, optimizer), expected)
    loss_of(model(batch(0, 0, 0).to(LAYOUTS[layout][4]))).backward()  # and training goes on
    optimizer.step()


@pytest.mark.parametrize("saved", ["hybrid_optim", "hybrid_bf16", "bf16_on_two"])
def test_checkpoint_loads_bitwise_under_every_other_layout(
    ranks: Ranks, saved: str, tmp_path: Path
) -> None:
    expected = ranks(LAYOUTS[saved][0], save_layout, saved, str(tmp_path))[0]
    for layout, (world_size, *_) in LAYOUTS.items():
        ranks(world_size, load_layout, layout, str(tmp_path), expected)

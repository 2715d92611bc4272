# SPDX-License-Identifier: Apache-2.0
"""State dicts of model and optimizer: full shapes, current weights, copies, wrong contents."""

import copy
import io
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.fsdp.test_warnings_once import Messages
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes, shard_mesh
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.reference import Ranks, batch, evaluate, loss_of, on_ranks, optimizer_over
from tests.support.fsdp.state_dicts import NAMES, assert_equal, sharded, train, whole, whole_state


@pytest.mark.always("scalars-0", "frozen_in_part-3")
@pytest.mark.parametrize(
    ("name", "level"), [*zip(NAMES, range(3)), ("scalars", 3), ("frozen_in_part", 3)]
)
@on_ranks(3)
def test_state_dict_has_full_shapes_and_current_weights_at_any_moment(
    name: str, level: int
) -> None:
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


@pytest.mark.always("0")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_deepcopy_and_torch_save_keep_a_state(level: int) -> None:
    """Keep a state by copy.deepcopy, and by torch.save and torch.load (weights only)."""
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


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_state_of_the_unsharded_model_and_optimizer_loads(level: int) -> None:
    """Load plain state dicts, under the module's own names and the wrapper's."""
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


@on_ranks(2)
def test_entries_that_do_not_fit_are_listed_and_nothing_is_loaded() -> None:
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
    message = str(error.value)
    for part in (
        "embed.weight",
        "(5, 5)",
        "(2, 2)",
        "missing keys: head.bias",
        "unexpected keys: stranger",
    ):
        assert part in message, message


@on_ranks(2)
def test_buffers_are_in_the_state() -> None:
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


@on_ranks(2)
def test_a_shard_of_the_same_size_from_other_offsets_is_refused() -> None:
    model = fully_shard_model(nn.Linear(8, 8, bias=False), shard_mesh())
    state = model.state_dict()
    value = state["module.weight"]
    other = 1 - dist.get_rank()
    flat_range = model.sharded_params[0].group.layout.owned(0, other)
    assert flat_range.numel == value._local_tensor.numel()
    value.part = replace(value.part, chunks=tuple(flat_range.chunks()), key=None)
    with pytest.raises(RuntimeError, match="sharded for another layout"):
        model.load_state_dict(state)


def copy_and_train_on(level: int, dtype: torch.dtype) -> None:
    module = models.build("scalars", dtype)
    model, optimizer = fully_shard(
        module,
        optimizer_over(module),
        shard_mesh(),
        zero_dp_strategy=level,
        fsdp_unit_modules=[ResidualBlock],
    )
    loss_of(model(batch(0, 0, 0).to(dtype))).backward()
    optimizer.step()
    optimizer.zero_grad()
    offsets = {parameter.to_local().storage_offset() for parameter in model.parameters()}
    assert len(offsets) > 1  # the local tensors do not begin where their storage does
    best, best_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    before = {name: value.clone() for name, value in whole_state(model.state_dict()).items()}
    loss_of(model(batch(1, 0, 0).to(dtype))).backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in whole_state(best).items())
    assert not all(
        torch.equal(value, before[name]) for name, value in whole_state(model.state_dict()).items()
    )
    model.load_state_dict(best)
    optimizer.load_state_dict(best_optimizer)
    assert all(
        torch.equal(value, before[name]) for name, value in whole_state(model.state_dict()).items()
    )
    assert {float(slots["step"]) for slots in optimizer.state_dict()["state"].values()} == {1.0}


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_state_dicts_of_bf16_models_can_be_deep_copied(ranks: Ranks, level: int) -> None:
    ranks(2, copy_and_train_on, level, torch.bfloat16)


@on_ranks(2)
def test_assigning_a_state_dict_copies_it() -> None:
    model = fully_shard_model(nn.Linear(4, 4))
    before = list(model.parameters())
    model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, assign=True)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter is old and (uneven_dtensor_to_full_tensor(parameter) == 1).all()


def load_a_part() -> tuple[list[str], str]:
    model = fully_shard_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), shard_mesh())
    messages = Messages()
    model.load_state_dict({"0.weight": torch.ones(4, 4), "2.weight": torch.ones(4)}, strict=False)
    said = messages.take()
    model.load_state_dict(model.state_dict(), strict=False)
    assert messages.take() == []
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict({"model.0.weight": torch.zeros(4, 4)}, strict=False)
    model.load_state_dict({"1.running_mean": torch.ones(4)}, strict=False)  # a buffer fits
    assert (whole(model.state_dict())["module.0.weight"] == 1).all()
    return said, str(error.value)


def test_a_load_that_is_not_strict_counts_and_names_what_it_leaves_out(ranks: Ranks) -> None:
    (said, error), (said_by_second, same) = ranks(2, load_a_part)
    assert said_by_second == [] and error == same
    (line,) = said
    assert "not in the model: 1 keys (2.weight)" in line
    assert "left as they are: 6 keys (0.bias, 1.bias, 1.num_batches_tracked, " in line
    assert "no key fits: 1 keys (model.0.weight); the model has 7 keys (0.bias, 0.weight" in error


def list_state_on_one_rank() -> int:
    """Ask for the state on the first rank alone while gathers over two axes are under way."""
    model, optimizer = fully_shard(
        module := models.build_stack(),
        optimizer_over(module),
        **Meshes().arguments("outer2"),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=3,
        outer_dp_sharding_strategy="optim",
        mixed_precision_policy=MixedPrecisionPolicy(None),
    )
    loss_of(model(batch(0, dist.get_rank(), 0))).backward()
    optimizer.step()
    model.start_param_sync(force_dispatch=True)
    num_entries = len(model.state_dict()) if dist.get_rank() == 0 else 0
    dist.barrier()
    model(batch(0, dist.get_rank(), 0))
    return num_entries


def test_a_state_dict_communicates_nothing(ranks: Ranks) -> None:
    assert ranks(4, list_state_on_one_rank, timeout=60)[0] > 0

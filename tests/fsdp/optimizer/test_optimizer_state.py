# SPDX-License-Identifier: Apache-2.0
"""The state of a sharded optimizer: its first values, and how it is saved, copied and loaded."""

import copy
import io
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp import models
from tests.support.fsdp.matrix_optimizers import Simple
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.optimizers import (
    IN_ONE_GROUP,
    ONE_OF_EACH,
    OPTIMIZERS,
    sharded_pair,
    sharded_step,
    sharding,
    two_groups,
    unsharded_step,
)
from tests.support.fsdp.reference import Ranks, batch, close, loss_of, on_ranks
from tests.support.fsdp.state_dicts import whole_state


def compare_fresh_states(
    make: Callable[..., torch.optim.Optimizer], pairs: list[tuple[nn.Module, torch.optim.Optimizer]]
) -> None:
    """Compare keys, shapes, dtypes and first values with those that torch makes."""
    reference = models.build("scalars")
    expected = make(reference.parameters())
    for parameter in reference.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected.step()
    lazy = isinstance(expected, torch.optim.ASGD | torch.optim.Rprop) or expected.defaults.get(
        "dampening"
    )
    for model, optimizer in pairs:
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            slots, wanted = optimizer.state.get(parameter, {}), expected.state.get(other, {})
            wanted = {name: value for name, value in wanted.items() if value is not None}
            assert list(slots) == ([] if lazy else list(wanted))
            for name, value in slots.items():
                assert value.dtype == wanted[name].dtype
                if isinstance(value, DTensor):
                    begin = expected.defaults.get("initial_accumulator_value", 0.0)
                    assert value.shape.numel() == wanted[name].numel()
                    assert (value.to_local() == begin).all(), name
                else:
                    assert value.shape == wanted[name].shape == ()
                    assert value.item() == {"step": 0.0, "mu_product": 1.0}[name]


@pytest.mark.exhaustive
@on_ranks(2)
def test_fresh_state_is_what_torch_would_make() -> None:
    mesh = shard_mesh()
    after = fully_shard_model(models.build("scalars"), mesh, **IN_ONE_GROUP)
    for make in (OPTIMIZERS[name] for name in ONE_OF_EACH):
        module = models.build("scalars")
        model, optimizer = fully_shard(module, make(module.parameters()), mesh, **IN_ONE_GROUP)
        compare_fresh_states(
            make, [(model, optimizer), (after, fully_shard_optimizer(make(after.parameters())))]
        )


def shards_by_name(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return this rank's shards of the state."""
    state = optimizer.state_dict()
    names = list(chain.from_iterable(group["param_names"] for group in state["param_groups"]))
    return {
        names[key]: {
            slot: (value.to_local() if isinstance(value, DTensor) else value).clone()
            for slot, value in slots.items()
        }
        for key, slots in state["state"].items()
    }


def assert_same_state(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    assert_equal_state(actual, shards_by_name(expected))


def assert_equal_state(actual: torch.optim.Optimizer, right: dict[str, dict[str, Tensor]]) -> None:
    left = shards_by_name(actual)
    assert left.keys() == right.keys()
    for name, slots in right.items():
        assert left[name].keys() == slots.keys()
        assert all(torch.equal(left[name][slot], value) for slot, value in slots.items()), name


def reordered(parameters: list[tuple[str, nn.Parameter]], way: str) -> list[dict[str, Any]]:
    matrices = [pair for pair in parameters if pair[1].dim() > 1]
    rest = [pair for pair in parameters if pair[1].dim() <= 1]
    groups = [{"params": matrices, "lr": 0.02}, {"params": rest, "lr": 0.003}]
    if way == "groups":
        return groups[::-1]
    if way == "parameters":
        return [{**group, "params": group["params"][::-1]} for group in groups]
    return (
        [{"params": rest, "lr": 0.02}, {"params": matrices[::-1], "lr": 0.003}]
        if way == "settings"
        else groups
    )


@pytest.mark.always("sharded")
@pytest.mark.parametrize("source", ["sharded", "torch_functions", "unsharded"])
@on_ranks(2)
def test_state_loads_by_name(source: str) -> None:
    """Save in one order and load in others.

    Sources are this package, torch's functions and an unsharded optimizer.
    """
    mesh = shard_mesh()
    expected_module = models.build("scalars")
    if source == "unsharded":
        saved = torch.optim.AdamW(reordered(list(expected_module.named_parameters()), "as_is"))
        unsharded_step(expected_module, saved, 0)
    else:
        expected_model = fully_shard_model(expected_module, mesh, **sharding(expected_module))
        saved = fully_shard_optimizer(
            torch.optim.AdamW(reordered(list(expected_model.named_parameters()), "as_is"))
        )
        sharded_step(expected_model, saved, 0)
    loaded = []
    for way in ("as_is", "groups", "parameters", "settings"):
        module = models.build("scalars")
        model = fully_shard_model(module, mesh, **sharding(module))
        optimizer = fully_shard_optimizer(
            torch.optim.AdamW(reordered(list(model.named_parameters()), way))
        )
        own_names = [group["param_names"] for group in optimizer.param_groups]
        if source == "torch_functions":
            state = torch_state_dict.get_optimizer_state_dict(expected_model, saved)
            torch_state_dict.set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
        else:
            optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        assert [group["param_names"] for group in optimizer.param_groups] == own_names, way
        for group in optimizer.param_groups:
            assert group["lr"] == (0.02 if group["params"][0].dim() > 1 else 0.003), way
        loaded.append(optimizer)
    if source == "unsharded":
        fully_shard(expected_module, saved, mesh, **sharding(expected_module))
    for optimizer in loaded:
        assert_same_state(optimizer, saved)


@on_ranks(2)
def test_state_that_does_not_fit_is_refused() -> None:
    """Check that a refused state changes nothing."""
    module = models.build("several_units")
    model, optimizer = fully_shard(
        module, OPTIMIZERS["adamw"](two_groups(module)), shard_mesh(), **sharding(module)
    )
    sharded_step(model, optimizer, 0)
    state = optimizer.state_dict()
    before = shards_by_name(optimizer)
    names = [group["param_names"] for group in state["param_groups"]]

    def with_names(*lists: list[str]) -> dict[str, Any]:
        return {
            **state,
            "param_groups": [
                {**group, "param_names": each} for group, each in zip(state["param_groups"], lists)
            ],
        }

    other_key = {
        **state,
        "state": {**state["state"], 0: {**state["state"][0], "exp_avg": torch.zeros(2, 2)}},
    }
    for wrong, message in (
        (with_names(names[0], ["stranger", *names[1][1:]]), "stranger"),
        (
            with_names([names[1][0], *names[0][1:]], [names[0][0], *names[1][1:]]),
            "grouped in another way",
        ),
        (with_names([names[0][0]] * len(names[0]), names[1]), r"param_groups\[0\]"),
        (other_key, r"expects shape \(5, 5\) but got \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)
    assert_equal_state(optimizer, before)
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


@pytest.mark.always("0")
@pytest.mark.parametrize(
    ("level", "flatten"), [(0, False), (3, False), (3, True)], ids=["0", "3", "3_flat"]
)
@on_ranks(2)
def test_state_can_be_copied_at_any_time(level: int, flatten: bool) -> None:
    """Copy state before the first step and after one, in every way that torch has."""
    options = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = sharded_pair("frozen_in_part", level)
    for step in range(2):
        state = optimizer.state_dict()
        assert len(state["state"]) == sum(
            parameter.requires_grad for parameter in model.parameters()
        )
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        by_name = copy.deepcopy(
            torch_state_dict.get_optimizer_state_dict(model, optimizer, options=options)
        )
        other, fresh = sharded_pair("frozen_in_part", level)
        torch_state_dict.set_optimizer_state_dict(other, fresh, by_name, options=options)
        assert_same_state(fresh, optimizer)
        for copied in (copy.deepcopy(state), torch.load(file)):
            _, fresh = sharded_pair("frozen_in_part", level)
            fresh.load_state_dict(copied)
            assert_same_state(fresh, optimizer)
            assert fresh.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]
        sharded_step(model, optimizer, step)
    assert next(iter(optimizer.state.values()))["step"].item() == 2  # looking has taken no step


@on_ranks(1)
def test_state_exists_after_loading_none() -> None:
    """Load the state of an unsharded optimizer that has not stepped, which has none."""
    module = models.build("several_units")
    _, optimizer = sharded_pair("several_units")
    optimizer.load_state_dict(OPTIMIZERS["adamw"](module.named_parameters()).state_dict())
    assert len(optimizer.state) == len(list(module.parameters()))
    assert all(slots["step"].item() == 0 for slots in optimizer.state.values())


@pytest.mark.always("AdamW-3")
@pytest.mark.parametrize(("kind", "level"), [("Adam", 0), ("Adam", 3), ("AdamW", 1), ("AdamW", 3)])
@on_ranks(2)
def test_making_state_neither_counts_a_step_nor_decays_weights(kind: str, level: int) -> None:
    module, reference = models.build("several_units"), models.build("several_units")
    settings = {"lr": 0.1, "weight_decay": 0.5}
    optimizer, expected = (
        getattr(torch.optim, kind)(each.parameters(), **settings) for each in (module, reference)
    )
    model, optimizer = fully_shard(
        module, optimizer, shard_mesh(), zero_dp_strategy=level, preserve_fp32_weights=False
    )
    torch_state_dict.get_optimizer_state_dict(
        model, optimizer
    )  # torch takes a step where it finds no state
    for slots in optimizer.state_dict()["state"].values():
        assert float(slots["step"]) == 0
        assert not slots["exp_avg"].to_local().any() and not slots["exp_avg_sq"].to_local().any()
    for name, value in whole_state(model.state_dict()).items():
        assert torch.equal(value, reference.get_parameter(name)), name
    x = batch(0, 0, 0)
    for each, each_optimizer in ((model, optimizer), (reference, expected)):
        loss_of(each(x)).backward()
        each_optimizer.step()
    for name, value in whole_state(model.state_dict()).items():
        close(value, reference.get_parameter(name).detach(), name)


class RowsOfShard(Simple):
    """Keeps the mean of each row of its shard, as optimizers that quantize shards do."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        rows = grad.to_local().square()
        rows = rows.mean(-1, keepdim=rows.ndim > 1) if group["is_local"] else grad.square().mean()
        self.state[parameter]["rows"] = rows
        return grad


class EvenParts(Simple):
    """Wraps a tensor of the size of its shard as if the shards of all ranks were equal."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        local = torch.zeros(parameter.to_local().numel())
        mesh, placements = parameter.device_mesh, [Shard(0)] * parameter.device_mesh.ndim
        self.state[parameter]["codes"] = DTensor.from_local(local, mesh, placements)
        return grad


def local_state(make: Callable[..., torch.optim.Optimizer], level: int) -> str | None:
    """Return the error of saving state, after which a rank still trains."""
    module = models.build("scalars")
    model, optimizer = fully_shard(
        module, make(module.parameters()), shard_mesh(), **sharding(module, level)
    )
    sharded_step(model, optimizer, 0)
    message = None
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    except ValueError as error:
        message = str(error)
    sharded_step(model, optimizer, 1)
    return message


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_state_of_shards_is_refused_by_name(ranks: Ranks, level: int) -> None:
    first, second = ranks(2, local_state, partial(RowsOfShard, is_local=True), level)
    assert first is not None and first == second
    for part in ("RowsOfShard", "['rows'] (", "torch.zeros_like(parameter)"):
        assert part in first
    first, second = ranks(2, local_state, EvenParts, level)
    assert first is not None and first == second and "EvenParts" in first


def test_state_that_all_ranks_share_is_saved(ranks: Ranks) -> None:
    assert ranks(2, local_state, partial(RowsOfShard, is_local=False), 3) == [None, None]
    assert ranks(2, local_state, partial(RowsOfShard, is_local=True), 0) == [None, None]


@on_ranks(2)
def test_state_of_shards_is_refused_where_it_is_loaded() -> None:
    """Load files of each rank that differ."""
    module = models.build("scalars")
    optimizer = RowsOfShard(module.parameters(), is_local=False)
    model, optimizer = fully_shard(module, optimizer, shard_mesh(), **sharding(module))
    sharded_step(model, optimizer, 0)
    state = optimizer.state_dict()
    state["state"][1]["rows"] = torch.full((2,), float(dist.get_rank()))
    with pytest.raises(ValueError, match=r"RowsOfShard has .*: \S+\['rows'\] \(2,\)"):
        optimizer.load_state_dict(state)
    assert all(slots["rows"].ndim == 0 for slots in optimizer.state.values())  # as before


@on_ranks(2)
def test_flattened_state_does_not_repeat_all_names_for_each_parameter() -> None:
    """Load a flattened state by DCP, and look at the lengths of all lists in it."""
    options = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = sharded_pair("scalars")
    sharded_step(model, optimizer, 0)
    flat = torch_state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    length = sum(len(value) for key, value in flat.items() if key.endswith(".param_names"))
    other, fresh = sharded_pair("scalars")
    torch_state_dict.set_optimizer_state_dict(other, fresh, flat, options=options)
    assert_same_state(fresh, optimizer)
    names = optimizer.param_groups[0]["param_names"]
    assert fresh.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    assert length == 0 and len(names) > 2

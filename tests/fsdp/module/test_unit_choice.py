# SPDX-License-Identifier: Apache-2.0
"""Modules become units, and every parameter belongs to one unit."""

from itertools import product

import pytest
from torch import nn

from megatron.fsdp.config.settings import resolve_unit_modules
from megatron.fsdp.module.unit_choice import assign_parameters, find_units, merge_small_units
from tests.support.fsdp import models
from tests.support.fsdp.models import Outer, ResidualBlock


def owners(module: nn.Module, units: list) -> dict[str, list[str]]:
    """Return the names of the parameters of every unit, by the unit's name."""
    return {
        unit.name: list(names)
        for unit, names in assign_parameters(
            find_units(module, resolve_unit_modules(units))
        ).items()
    }


def test_units_are_given_as_classes_instances_or_import_paths() -> None:
    model = models.build("nested_units")
    assert resolve_unit_modules(["torch.nn.Linear", ResidualBlock, model.embed]) == [
        nn.Linear,
        ResidualBlock,
        model.embed,
    ]
    assert asked_for(model, [*model.blocks]) == ["blocks.0", "blocks.1", "blocks.2"]
    assert asked_for(model, ["tests.support.fsdp.models.Outer"]) == ["outer.0", "outer.1"]
    assert asked_for(model, []) == []
    assert resolve_unit_modules(None) == []


def asked_for(model: nn.Module, units: list) -> list[str]:
    return [
        unit.name
        for unit in find_units(model, resolve_unit_modules(units))[1:]
        if not unit.is_automatic
    ]


def test_a_model_that_is_named_itself_is_one_unit() -> None:
    """Modules in it may return their own parameters, which it then uses."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    names = [name for name, _ in layer.named_parameters()]
    for named in (nn.TransformerEncoderLayer, layer):
        assert owners(layer, [named]) == {"": names}


def test_outside_of_units_every_module_that_owns_parameters_is_one() -> None:
    model = models.build("nested_units")
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert [
        unit.name for unit in find_units(model, [ResidualBlock, Outer]) if unit.is_automatic
    ] == ["embed", "head"]
    units = [
        unit.name
        for unit in find_units(
            nn.ModuleDict({"blocks": nn.ModuleList(ResidualBlock() for _ in range(3))}), []
        )
    ]
    assert units == ["", *map(".".join, product(blocks, ("norm", "up", "down")))]
    ignored = frozenset([model.embed.weight, model.embed.bias, model.head.weight])
    found = find_units(model, [ResidualBlock, Outer], ignored=ignored)
    assert [unit.name for unit in found if unit.is_automatic] == ["head"]
    inside = [
        unit.name
        for unit in find_units(nn.Sequential(ResidualBlock()), [ResidualBlock], fine_grained=True)
    ]
    assert inside == ["", "0", "0.norm", "0.up", "0.down"]


def test_a_subclass_of_a_unit_class_is_a_unit() -> None:
    class Special(ResidualBlock):
        pass

    assert [
        unit.name for unit in find_units(nn.Sequential(Special(), nn.Linear(2, 2)), [ResidualBlock])
    ] == ["", "0", "1"]


def test_everything_wrong_with_unit_modules_is_listed() -> None:
    with pytest.raises(ValueError) as error:
        resolve_unit_modules(
            ["nowhere.Block", "torch.nn.Lineal", "Block", "math.pi", int, nn.Linear]
        )
    for part in ("nowhere.Block", "torch.nn.Lineal", "'Block'", "math.pi", "int", "Settings.units"):
        assert part in str(error.value)
    assert "Linear'" not in str(error.value)


def test_every_parameter_belongs_to_the_innermost_unit() -> None:
    owned = owners(models.build("nested_units"), [ResidualBlock, Outer])
    block = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
    assert owned["outer.0"] == ["outer.0.mix.weight", "outer.0.mix.bias"]
    assert owned["outer.0.first"] == ["outer.0.first." + name for name in block]
    assert owned["embed"] == ["embed.weight", "embed.bias"]
    assert owned["head"] == ["head.weight", "head.bias"]
    assert owned[""] == []


def test_parameters_tied_across_units_are_a_unit_that_both_need() -> None:
    units = find_units(models.build("tied_across_units"), [ResidualBlock])
    owned = {unit.name: list(names) for unit, names in assign_parameters(units).items()}
    assert owned["blocks.0+blocks.2"] == ["blocks.0.up.weight"]
    assert "blocks.0.up.weight" not in owned["blocks.0"]
    assert "blocks.2.up.weight" not in owned["blocks.2"]
    sharers = [
        unit.name
        for unit in units
        if [shared.name for shared in unit.shared] == ["blocks.0+blocks.2"]
    ]
    assert sharers == ["blocks.0", "blocks.2"]
    assert units[-1].module is None

    outer = nn.Sequential(Outer(), Outer())
    outer[0].first.up.weight = outer[0].second.up.weight
    outer[0].first.up.bias = outer[1].first.up.bias
    outer[1].mix.weight = outer[1].second.norm.weight = nn.Parameter(outer[1].mix.weight.detach())
    owned = owners(outer, [ResidualBlock, Outer])
    assert owned["0"] == ["0.mix.weight", "0.mix.bias"]
    assert owned["0.first+0.second"] == ["0.first.up.weight"]
    assert owned["0.first+1.first"] == ["0.first.up.bias"]
    assert owned[""] == []
    assert "1.second.norm.weight" in owned["1"]


def test_a_module_that_two_parents_share_is_one_unit() -> None:
    block = ResidualBlock()
    model = nn.ModuleDict({"left": nn.Sequential(block), "right": nn.Sequential(block)})
    assert [unit.name for unit in find_units(model, [ResidualBlock])] == ["", "left.0"]
    assert len(owners(model, [ResidualBlock])["left.0"]) == 5


def merged(module: nn.Module, named: list, limit: int | None = None) -> dict[str, list[str]]:
    """Return the parameters of every unit, by the unit's name, after merging."""
    units = find_units(module, named)
    parameters_of = assign_parameters(units)
    merge_small_units(units, parameters_of, limit)
    assert list(parameters_of) == units
    return {unit.name: list(names) for unit, names in parameters_of.items()}


def test_small_automatic_units_are_merged_into_the_root_up_to_a_limit() -> None:
    """Sizes in bytes: embed 4 * 110, head 4 * 33, a block more than both together."""
    model = nn.ModuleDict(
        {"embed": nn.Linear(10, 10), "block": nn.Linear(20, 20), "head": nn.Linear(10, 3)}
    )
    named = [model["block"]]
    embed, head = ["embed.weight", "embed.bias"], ["head.weight", "head.bias"]
    assert merged(model, named)[""] == embed + head
    assert merged(model, named, 0)[""] == []
    assert merged(model, named, 4 * 33) == {
        "": head,
        "embed": embed,
        "block": ["block.weight", "block.bias"],
    }
    assert merged(model, named, 4 * 142)[""] == head  # the smallest first
    assert merged(model, [], None)[""] == []  # nobody asked for few collectives


def test_a_weight_tied_between_small_units_is_merged_with_them_or_not_at_all() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Linear(10, 10), "block": nn.Linear(20, 20), "head": nn.Linear(10, 10)}
    )
    model["head"].weight = model["embed"].weight
    named = [model["block"]]
    assert set(merged(model, named)) == {"", "block"}
    assert set(merged(model, named, 100)) == {"", "embed", "block", "head", "embed+head"}
    units = find_units(model, named)
    parameters_of = assign_parameters(units)
    merge_small_units(units, parameters_of)
    assert units[0].modules[1:] == [model["embed"], model["head"]] and not units[0].shared

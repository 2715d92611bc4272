# SPDX-License-Identifier: Apache-2.0
"""Which modules are units and whose a parameter is."""

import pytest
from torch import nn

from megatron.fsdp.units import assign_parameters, find_units, resolve_unit_modules
from tests.fsdp import models
from tests.fsdp.models import Block, Outer


def owners(module: nn.Module, units: list) -> dict[str, list[str]]:
    """Names of the parameters of every unit, by the unit's name."""
    return {unit.name: list(names) for unit, names in assign_parameters(find_units(module, units)).items()}


def test_units_are_given_as_classes_instances_or_import_paths() -> None:
    model = models.build("nested_units")
    assert resolve_unit_modules(["torch.nn.Linear", Block, model.embed]) == [nn.Linear, Block, model.embed]
    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert [unit.name for unit in find_units(model.cpu(), [*model.blocks])] == names
    assert [unit.name for unit in find_units(model, ["tests.fsdp.models.Outer"])] == ["", "outer.0", "outer.1"]
    assert [unit.name for unit in find_units(model, [])] == [""]
    assert resolve_unit_modules(None) == []


def test_a_subclass_of_a_unit_class_is_a_unit() -> None:
    class Special(Block):
        pass

    assert [unit.name for unit in find_units(nn.Sequential(Special(), nn.Linear(2, 2)), [Block])] == ["", "0"]


def test_everything_wrong_with_unit_modules_is_listed() -> None:
    with pytest.raises(ValueError) as error:
        resolve_unit_modules(["nowhere.Block", "torch.nn.Lineal", "Block", "math.pi", int, nn.Linear])
    for part in ("nowhere.Block", "torch.nn.Lineal", "'Block'", "math.pi", "int", "fsdp_unit_modules"):
        assert part in str(error.value)
    assert "Linear'" not in str(error.value)


def test_every_parameter_belongs_to_the_innermost_unit() -> None:
    owned = owners(models.build("nested_units"), [Block, Outer])
    block = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
    assert owned["outer.0"] == ["outer.0.mix.weight", "outer.0.mix.bias"]
    assert owned["outer.0.first"] == ["outer.0.first." + name for name in block]
    assert owned[""] == ["embed.weight", "embed.bias", "head.weight", "head.bias"]


def test_a_parameter_tied_across_units_belongs_to_what_is_around_both() -> None:
    owned = owners(models.build("tied_across_units"), [Block])
    assert "blocks.0.up.weight" in owned[""]
    assert "blocks.0.up.weight" not in owned["blocks.0"]
    assert "blocks.2.up.weight" not in owned["blocks.2"]

    outer = nn.Sequential(Outer(), Outer())
    outer[0].first.up.weight = outer[0].second.up.weight
    outer[0].first.up.bias = outer[1].first.up.bias
    outer[1].mix.weight = outer[1].second.norm.weight = nn.Parameter(outer[1].mix.weight.detach())
    owned = owners(outer, [Block, Outer])
    assert owned["0"] == ["0.first.up.weight", "0.mix.weight", "0.mix.bias"]
    assert owned[""] == ["0.first.up.bias"]
    assert "1.second.norm.weight" in owned["1"]


def test_a_module_that_two_parents_share_is_one_unit() -> None:
    block = Block()
    model = nn.ModuleDict({"left": nn.Sequential(block), "right": nn.Sequential(block)})
    assert [unit.name for unit in find_units(model, [Block])] == ["", "left.0"]
    assert len(owners(model, [Block])["left.0"]) == 5

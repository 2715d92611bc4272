# SPDX-License-Identifier: Apache-2.0
"""The choice of units, the assignment of parameters to them, and the kinds of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import nn

from megatron.fsdp.engine.policy import ParameterKind
from megatron.fsdp.engine.tensor_parallel import has_uneven_slices
from megatron.fsdp.engine.unit import Unit

NamedParameters = dict[str, nn.Parameter]  # by their names in the model
ParametersOfUnits = dict[Unit, NamedParameters]
ParameterKinds = Mapping[str, ParameterKind]  # of parameters, by their names in the model

OF_EMBEDDINGS = "is_embedding_or_output_parameter"
"""The attribute by which Megatron-Core marks the weights of embeddings and of the output layer."""


def find_units(
    root: nn.Module,
    unit_modules: Sequence[type | nn.Module],
    fine_grained: bool = False,
    ignored: Set[nn.Parameter] = frozenset(),
) -> list[Unit]:
    """Return the unit of the root and the units inside it, in module order.

    They are the modules that the user names and, outside of them, every module that owns parameters
    directly (embedding, final norm, head).

    Args:
        root: the model.
        unit_modules: classes and instances of the named units.
        fine_grained: make modules that own parameters units inside of named units too.
        ignored: parameters that are not sharded; a module that owns no others is no unit.
    """
    classes = tuple(entry for entry in unit_modules if isinstance(entry, type))
    instances = {entry for entry in unit_modules if isinstance(entry, nn.Module)}
    units: dict[nn.Module, Unit] = {root: Unit("", root)}
    # By the path of a module: True if it, or one around it, is named.
    inside_named: dict[str, bool] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        is_named = isinstance(module, classes) or module in instances
        is_inside = inside_named.get(_parent(path), False)
        inside_named[path] = is_inside or is_named
        if is_named:
            units.setdefault(module, Unit(path, module))
            continue
        own_parameters = set(module.parameters(recurse=False)) - ignored
        if own_parameters and (fine_grained or not is_inside):
            units.setdefault(module, Unit(path, module, is_automatic=True))
    return list(units.values())


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def assign_parameters(units: list[Unit]) -> ParametersOfUnits:
    """Return the parameters of every unit, each under its first name.

    Units of parameters that several units share are appended to ``units``.
    """
    # A parameter belongs to the innermost unit around the module that owns it. If modules of
    # several units own it (tied weights), it belongs to the one of these units that contains the
    # others. If there is no such unit, it gets a separate unit, which calls of all of them use.
    parameters_of: ParametersOfUnits = {}
    for unit in units:
        parameters_of[unit] = {}
    units_of_shared: dict[tuple[Unit, ...], Unit] = {}
    names, owners = _owners_of_parameters(units)
    for parameter, around in owners.items():
        sharers = tuple(around)
        owner = _containing(around)
        if owner is None:
            owner = units_of_shared.get(sharers)
        if owner is None:
            joined = "+".join(sharer.name for sharer in sharers)
            owner = Unit(joined, None)
            units_of_shared[sharers] = owner
            units.append(owner)
            parameters_of[owner] = {}
            for sharer in sharers:
                sharer.shared.append(owner)
        name = names[parameter]
        parameters_of[owner][name] = parameter
    return parameters_of


Around = dict[Unit, tuple[Unit, ...]]
"""The innermost unit around each module that owns a parameter, and all units around it."""


def _owners_of_parameters(
    units: list[Unit],
) -> tuple[dict[nn.Parameter, str], dict[nn.Parameter, Around]]:
    """Return the first name of each parameter, and the units around the modules that own it."""
    names: dict[nn.Parameter, str] = {}
    owners: dict[nn.Parameter, Around] = {}
    unit_of = {unit.module: unit for unit in units}
    root = units[0].module
    assert root is not None  # only units of shared parameters have no module
    # By the path of a module: the units around it, outermost first, and its own.
    units_around: dict[str, tuple[Unit, ...]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        enclosing = units_around.get(_parent(path), ())
        if module in unit_of:
            enclosing = (*enclosing, unit_of[module])
        units_around[path] = enclosing
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(parameter, name)
            around = owners.setdefault(parameter, {})
            around[enclosing[-1]] = enclosing
    return names, owners


def _containing(around: Around) -> Unit | None:
    """Return the unit that contains all others, if one does."""
    for unit in around:
        if all(unit in enclosing for enclosing in around.values()):
            return unit
    return None


def merge_small_units(
    units: list[Unit],
    parameters_of: ParametersOfUnits,
    limit: int | None = None,
) -> None:
    """Merge small automatic units into the root's unit, whose collectives then serve them too.

    Args:
        units: all units, the root first; those that are merged are removed.
        parameters_of: their parameters by name, which move to the root.
        limit: bytes of parameters that the root's unit may have. None: the size of the largest
            unit that the user named, 0 without any.
    """
    # The smallest first. Their weights stay unsharded while the root computes. Example: a final
    # norm, and an embedding that is small in comparison with a layer.
    root = units[0]
    sizes: dict[Unit, int] = {}
    largest_named = 0
    for unit, parameters in parameters_of.items():
        size = sum(parameter.nbytes for parameter in parameters.values())
        sizes[unit] = size
        if unit is not root and unit.modules and not unit.is_automatic:
            largest_named = max(largest_named, size)
    if limit is None:
        limit = largest_named
    room = limit - sizes[root]
    merged = set()

    def order(unit: Unit) -> tuple[bool, int]:
        return unit.module is not None, sizes[unit]

    for unit in sorted(units[1:], key=order):
        sharers = [sharer for sharer in units if unit in sharer.shared]
        if not all(sharer.is_automatic for sharer in sharers or [unit]):
            continue
        # A tied weight comes before its sharers; those that need one that stays behind stay too.
        if not all(shared is root for shared in unit.shared):
            continue
        # Unequal slices would shift the root's other parameters differently on different ranks.
        if any(has_uneven_slices(parameter) for parameter in parameters_of[unit].values()):
            continue
        if sizes[unit] <= room:
            room -= sizes[unit]
            merged.add(unit)
            for sharer in sharers:
                position = sharer.shared.index(unit)
                sharer.shared[position] = root
    for unit in list(units):  # in the order of the model, not of sizes
        if unit in merged:
            units.remove(unit)
            parameters_of[root].update(parameters_of.pop(unit))
            if unit.module is not None:
                root.modules.append(unit.module)


def kinds_of(
    module: nn.Module,
    named: Mapping[str, nn.Parameter],
    *,
    has_expert_mesh: bool,
    has_embedding_strategy: bool,
) -> dict[str, ParameterKind]:
    """Return the kinds of parameters by their names.

    Args:
        module: the model.
        named: some of its parameters, by their names in the model.
        has_expert_mesh: experts have a mesh of their own; without one they are dense parameters.
        has_embedding_strategy: embeddings have a strategy of their own; without one they are dense.
    """
    embeddings: set[nn.Parameter] = set()
    if has_embedding_strategy:
        embeddings = embedding_parameters(module)
    kinds = {}
    for name, parameter in named.items():
        kinds[name] = ParameterKind.DENSE
        if has_expert_mesh and belongs_to_expert(name, parameter):
            kinds[name] = ParameterKind.EXPERT
        elif parameter in embeddings:
            kinds[name] = ParameterKind.EMBEDDING
    return kinds


def belongs_to_expert(name: str, tensor: torch.Tensor) -> bool:
    """Return True if a parameter or buffer belongs to an expert of an expert-parallel layer.

    Args:
        name: its name in the model.
        tensor: the parameter, which Megatron-Core marks by ``allreduce=False``.
    """
    allreduce = getattr(tensor, "allreduce", None)
    if allreduce is None:  # not marked: it is inside a module called "experts"
        return "experts" in name.split(".")[:-1]
    return not allreduce


def embedding_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the embeddings and of the output layer of a model.

    They are marked as Megatron-Core marks them, or belong to an ``nn.Embedding``, or to the module
    that ``get_output_embeddings``, as models of transformers have it, returns.
    """
    found = set()
    for parameter in module.parameters():
        if getattr(parameter, OF_EMBEDDINGS, False):
            found.add(parameter)
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            found.update(inner.parameters())
        output_layer = getattr(inner, "get_output_embeddings", lambda: None)()
        if isinstance(output_layer, nn.Module):
            found.update(output_layer.parameters())
    return found

# SPDX-License-Identifier: Apache-2.0
"""Initialisation of modules that were built on the meta device, part by part.

The whole model never exists on one rank. A part is a unit or, outside units, a module that owns
parameters, with everything inside it. A module that contains units is a part without its children.
In a part children come before their parents, the order in which constructors finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Initialiser:
    """The source of first values for the parameters and buffers that a module owns itself.

    It follows torch's convention: a method ``reset_parameters``, in some of torch's modules
    ``_reset_parameters``.
    """

    def knows(self, module: nn.Module) -> bool:
        """Return True if ``module`` can be initialised."""
        return _reset_method(module) is not None

    def initialise(self, module: nn.Module) -> None:
        """Give the parameters and buffers of ``module`` their first values, in place.

        Raises:
            ValueError: for a module for which :meth:`knows` returns False.
        """
        reset = _reset_method(module)
        if reset is None:
            raise ValueError(f"{type(module).__name__} has no method reset_parameters()")
        reset()


def problems_of_initialisation(module: nn.Module, initialiser: Initialiser) -> list[str]:
    """Return a problem naming the modules with meta tensors that ``initialiser`` does not know."""
    unknown = []
    for name, each in module.named_modules():
        on_meta = [key for key, _ in _own_meta_tensors(each)]
        if on_meta and not initialiser.knows(each):
            unknown.append(f"{name or 'the model'} ({type(each).__name__}: {', '.join(on_meta)})")
    if not unknown:
        return []
    return [
        "init_model_with_meta_device needs a method reset_parameters() in every module that owns"
        f" parameters or buffers on the meta device; it is missing in {'; '.join(unknown)}"
    ]


def initialisation_parts(root: nn.Module, units: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Divide the modules of ``root`` into parts; all modules of a part are initialised together.

    Args:
        root: the model.
        units: modules in it whose parameters are sharded together.

    Yields:
        The modules of a part, children first.
    """
    wanted = {unit for unit in units if unit is not root}

    def visit(module: nn.Module) -> Iterator[list[nn.Module]]:
        contains_units = any(each in wanted for each in module.modules() if each is not module)
        owns_parameters = next(module.parameters(recurse=False), None) is not None
        is_part = module in wanted or (owns_parameters and module is not root)
        if is_part and not contains_units:
            yield list(_children_first(module))
            return
        for child in module.children():
            yield from visit(child)
        yield [module]

    return visit(root)


def materialize(
    modules: Iterable[nn.Module], device: torch.device, initialiser: Initialiser
) -> None:
    """Move the meta tensors that ``modules`` own directly to ``device``, and initialise them."""
    names_of: dict[nn.Module, set[str]] = {}
    for module in modules:
        names = {name for name, _ in _own_meta_tensors(module)}
        if names:
            names_of[module] = names
    for module in names_of:
        for name, tensor in list(_own_meta_tensors(module)):
            _allocate(module, name, tensor, device)
    for module, names in names_of.items():
        with torch.no_grad(), _protected(module, names, device):
            initialiser.initialise(module)


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method: Callable[[], object] | None = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


@contextmanager
def _protected(module: nn.Module, names: set[str], device: torch.device) -> Iterator[None]:
    """Replace the tensors that ``module`` owns, except ``names``, by stand-ins inside the context.

    Tensors that have values keep them: a parameter tied to one of an earlier module, which may be
    sharded already, or a tensor that the user has set. The initialiser still draws the same number
    of random numbers.
    """
    others = {name: tensor for name, tensor in _own_tensors(module) if name not in names}
    for name, tensor in others.items():
        stand_in = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            module._parameters[name] = _parameter_like(tensor, stand_in)
        else:
            module._buffers[name] = stand_in
    try:
        yield
    finally:
        for name, tensor in others.items():
            if isinstance(tensor, nn.Parameter):
                module._parameters[name] = tensor
            else:
                module._buffers[name] = tensor


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _own_meta_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in _own_tensors(module) if tensor.is_meta)


def _allocate(module: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Allocate storage on ``device`` for the meta tensor that ``module`` owns as ``name``."""
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        # The object stays: other modules and optimizers may refer to it.
        torch.utils.swap_tensors(tensor, _parameter_like(tensor, empty))
    else:
        module._buffers[name] = empty


def _parameter_like(original: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Return a parameter with other values and the attributes of ``original``."""
    parameter = nn.Parameter(values, requires_grad=original.requires_grad)
    vars(parameter).update(vars(original))
    return parameter

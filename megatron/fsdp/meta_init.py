# SPDX-License-Identifier: Apache-2.0
"""Initialisation of modules that were built on the meta device: piece by piece, so that the whole never exists.

A piece is a unit, or outside of units a module that owns parameters with everything inside it;
modules that contain units are pieces without their children. In a piece children come before their
parents, as their constructors would have run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Initialiser:
    """Gives the parameters and buffers that a module owns itself their first values: torch's convention, a method
    ``reset_parameters`` (in some of its modules ``_reset_parameters``).
    """

    def knows(self, module: nn.Module) -> bool:
        """Whether there is a way to initialise ``module``."""
        return self._method_of(module) is not None

    def initialise(self, module: nn.Module) -> None:
        self._method_of(module)()

    def _method_of(self, module: nn.Module) -> Callable[[], object] | None:
        methods = (
            getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")
        )
        return next((method for method in methods if callable(method)), None)


def problems_of(module: nn.Module, initialiser: Initialiser) -> list[str]:
    """Modules with parameters or buffers on the meta device that nothing can initialise."""
    unknown = [
        f"{name or 'the model'} ({type(each).__name__}: {', '.join(own)})"
        for name, each in module.named_modules()
        if (own := [key for key, _ in _own_meta(each)]) and not initialiser.knows(each)
    ]
    if not unknown:
        return []
    return [
        "init_model_with_meta_device needs a method reset_parameters() in every module that owns"
        f" parameters or buffers on the meta device; it is missing in {'; '.join(unknown)}"
    ]


def pieces(root: nn.Module, units: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """The modules of ``root``, children first, cut into what has to be whole at the same time."""
    wanted = {unit for unit in units if unit is not root}

    def visit(module: nn.Module) -> Iterator[list[nn.Module]]:
        inside = [each for each in module.modules() if each is not module and each in wanted]
        owns = next(module.parameters(recurse=False), None) is not None
        if not inside and (module in wanted or (owns and module is not root)):
            yield list(_children_first(module))
            return
        for child in module.children():
            yield from visit(child)
        yield [module]

    return visit(root)


def materialize(
    modules: Iterable[nn.Module], device: torch.device, initialiser: Initialiser
) -> None:
    """Give the parameters and buffers that ``modules`` own themselves storage on ``device`` and their first values."""
    fresh = [module for module in modules if any(True for _ in _own_meta(module))]
    fresh_names = {module: {name for name, _ in _own_meta(module)} for module in fresh}
    for module in fresh:
        for name, tensor in list(_own_meta(module)):
            _give_storage(module, name, tensor, device)
    for module in fresh:
        with torch.no_grad(), _others_put_aside(module, fresh_names[module], device):
            initialiser.initialise(module)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


@contextmanager
def _others_put_aside(module: nn.Module, names: set[str], device: torch.device) -> Iterator[None]:
    """Within, everything of ``module`` but ``names`` is a stand-in: what has values, being tied to a parameter of an earlier
    module (and away already) or given by the user, keeps them, and random numbers are drawn as
    ever.
    """
    own = {name: tensor for name, tensor in _own(module) if name not in names}
    for name, tensor in own.items():
        stand_in = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            module._parameters[name] = nn.Parameter(stand_in, tensor.requires_grad)
            vars(module._parameters[name]).update(vars(tensor))
        else:
            module._buffers[name] = stand_in
    try:
        yield
    finally:
        for name, tensor in own.items():
            (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[name] = (
                tensor
            )


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _own_meta(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in _own(module) if tensor.is_meta)


def _give_storage(module: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        module._buffers[name] = empty
        return
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    torch.utils.swap_tensors(
        tensor, parameter
    )  # the object stays: other modules and optimizers may hold it

# SPDX-License-Identifier: Apache-2.0
"""Initialisation of modules that were built on the meta device, part by part."""

# A part is a unit or, outside units, a module that owns parameters, with everything inside it. A
# module that contains units is a part without its children. Children come first, as constructed.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import nn

from megatron.fsdp.quantized.tensor_subclasses import users_attributes

InitialiseModule = Callable[[nn.Module], object]  # gives its own tensors values, in place


@dataclass(frozen=True, kw_only=True)
class MetaInitialisation:
    """First values of parameters on the meta device, which are made and sharded unit by unit.

    Args:
        function: called with every module that owns parameters or buffers on the meta device,
            children first, when they have storage. None: ``reset_parameters()``, or in models of
            transformers their own ``_init_weights``.
    """

    function: InitialiseModule | None = None

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise ValueError(
                "MetaInitialisation.function expects a function of a module, or None, but got"
                f" {self.function!r}"
            )


class Initialiser:
    """First values of what a module owns itself, by torch's convention ``reset_parameters``."""

    # The code that may leave tensors without values, which then is an error; None: it is trusted.
    source: str | None = None
    visits_parents = False  # modules that own nothing are initialised too: they may set children
    kept_together: Collection[nn.Module] = ()  # parts by themselves, with everything inside them

    def for_model(self, model: nn.Module, setting: MetaInitialisation | None) -> Initialiser | None:
        """Return the initialiser of a model; None: nothing is on meta."""
        if setting is None or not isinstance(model, nn.Module):
            return None
        if not any(_own_meta_tensors(module) for module in model.modules()):
            return None
        if setting.function is not None:
            return GivenInitialiser(setting.function)
        models = [module for module in model.modules() if _is_of_transformers(module)]
        if models:
            return TransformersInitialiser(models, self)
        return self

    def knows(self, module: nn.Module) -> bool:
        """Return True if ``module`` can be initialised."""
        return _reset_method(module) is not None

    def initialise(self, module: nn.Module) -> None:
        """Give the parameters and buffers of a known module their first values, in place."""
        reset = _reset_method(module)
        if reset is None:
            raise ValueError(f"{type(module).__name__} has no method reset_parameters()")
        reset()


def _is_of_transformers(module: nn.Module) -> bool:
    """Return True for a model of transformers, which this package does not import."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


class GivenInitialiser(Initialiser):
    """A function of the user's; tensors that it leaves out are found afterwards."""

    source = "MetaInitialisation.function"

    def __init__(self, function: InitialiseModule):
        self._function = function

    def knows(self, module: nn.Module) -> bool:
        """Return True."""
        return True

    def initialise(self, module: nn.Module) -> None:
        """Call the function."""
        self._function(module)


class TransformersInitialiser(Initialiser):
    """The initialisation of models of transformers by ``_init_weights``, and of modules outside."""

    source = "_init_weights() of its model"
    visits_parents = True

    def __init__(self, models: Iterable[nn.Module], others: Initialiser):
        self._others = others
        self._method_for: dict[nn.Module, InitialiseModule] = {}  # methods of the innermost model
        self.kept_together = set()
        for model in models:
            method: InitialiseModule = model._init_weights  # type: ignore[assignment]  # a method
            self._method_for.update(dict.fromkeys(model.modules(), method))
            # Layers scale weights of the modules inside them. Transformers never splits them.
            names = set(getattr(model, "_no_split_modules", None) or ())
            for module in model.modules():
                if type(module).__name__ in names:
                    self.kept_together.add(module)

    def knows(self, module: nn.Module) -> bool:
        """Return True for modules of these models, and for those that the others know."""
        return module in self._method_for or self._others.knows(module)

    def initialise(self, module: nn.Module) -> None:
        """Call ``reset_parameters``, as constructors do, and then ``_init_weights``."""
        if self._others.knows(module):
            self._others.initialise(module)
        if module in self._method_for:
            self._method_for[module](module)


def problems_of_initialisation(module: nn.Module, initialiser: Initialiser) -> Iterator[str]:
    """Yield a problem naming the modules with meta tensors that ``initialiser`` does not know."""
    unknown = []
    for name, inner in module.named_modules():
        names_on_meta = ", ".join(_own_meta_tensors(inner))
        if names_on_meta and not initialiser.knows(inner):
            unknown.append(f"{name or 'the model'} ({type(inner).__name__}: {names_on_meta})")
    if unknown:
        yield (
            "Settings.initialisation needs a method reset_parameters() in every module that owns"
            " parameters or buffers on the meta device, or a MetaInitialisation.function that"
            f" initialises modules; the method is missing in {'; '.join(unknown)}"
        )


def initialisation_parts(
    root: nn.Module,
    units: Iterable[nn.Module],
    together: Collection[nn.Module] = (),
) -> Iterator[list[nn.Module]]:
    """Yield the parts of a model, children first.

    Args:
        root: the model.
        units: the modules of its units.
        together: modules that are one part each, with any units inside.
    """
    wanted = set(units)

    def visit(module: nn.Module) -> Iterator[list[nn.Module]]:
        contains_units = any(inner in wanted for inner in module.modules() if inner is not module)
        owns_parameters = next(module.parameters(recurse=False), None) is not None
        is_part = module in wanted or (owns_parameters and module is not root)
        if module in together or (is_part and not contains_units):
            inside: list[nn.Module] = []
            module.apply(inside.append)  # children first
            yield inside
            return
        for child in module.children():
            yield from visit(child)
        yield [module]

    return visit(root)


def materialize(
    modules: Collection[nn.Module],
    device: torch.device,
    initialiser: Initialiser,
) -> list[nn.Parameter]:
    """Move the meta tensors of a part to a device, initialise them, and return its parameters.

    Args:
        modules: the modules of the part, children first.
        device: device of the new tensors.
        initialiser: gives them their values.
    """
    of_modules = {module: _own_meta_tensors(module) for module in modules}
    found: dict[nn.Parameter, None] = {}
    for module, tensors in of_modules.items():
        for name, tensor in tensors.items():
            if tensor.is_meta:  # no other module that owns it too was before
                made = _like(tensor, device)
                if isinstance(tensor, nn.Parameter):
                    found[tensor] = None
                    torch.utils.swap_tensors(tensor, made)  # optimizers may refer to the object
                else:
                    module._buffers[name] = made
            if initialiser.source is not None and tensor.is_floating_point():
                _own_tensors(module)[name].data.fill_(nan)
    for module, tensors in of_modules.items():
        inside = {}
        for inner in module.modules():
            if inner in of_modules:
                inside[inner] = of_modules[inner]
        is_parent = initialiser.visits_parents and of_modules.keys() >= set(module.children())
        if tensors or (is_parent and any(inside.values())):
            with torch.no_grad(), _protected(inside, device):
                initialiser.initialise(module)
        replaced = []
        for name, tensor in tensors.items():
            if tensor in found and module._parameters[name] is not tensor:
                replaced.append(name)
        if replaced:
            raise NotImplementedError(
                f"{type(module).__name__} replaces {', '.join(replaced)} by new parameters: build"
                " it on a device"
            )
    if initialiser.source is not None:
        _refuse_without_values(of_modules, initialiser.source)
    return list(found)


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):  # the second in some of torch's modules
        method: Callable[[], object] | None = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _refuse_without_values(
    of_modules: dict[nn.Module, dict[str, torch.Tensor]], source: str
) -> None:
    """Raise ``ValueError`` for tensors of these names that are NaN everywhere still."""
    left = []
    for module, names in of_modules.items():
        for name, tensor in _own_tensors(module).items():
            is_number = name in names and tensor.is_floating_point() and tensor.numel()
            if is_number and tensor.isnan().all():
                left.append(f"{type(module).__name__}.{name}")
    if left:
        raise ValueError(
            f"{source} gives no values to {', '.join(left)}: pass a MetaInitialisation.function"
            " that initialises every module"
        )


@contextmanager
def _protected(
    names_of: Mapping[nn.Module, Collection[str]], device: torch.device
) -> Iterator[None]:
    """Replace the tensors that modules own, except those named, by stand-ins for a while."""
    # They keep their values: a parameter tied to one of an earlier module, which may be sharded
    # already, or a tensor that the user has set. As many random numbers are drawn.
    kept: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []
    for module, names in names_of.items():
        stores: list[dict[str, Any]] = [module._parameters, module._buffers]
        for store in stores:
            for name, tensor in store.items():
                if name not in names:
                    kept.append((store, name, tensor))
    for store, name, tensor in kept:
        if tensor is not None:
            store[name] = _like(tensor, device)
    try:
        yield
    finally:
        for store, name, tensor in kept:
            store[name] = tensor


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return dict([*parameters, *buffers])


def _own_meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in _own_tensors(module).items() if tensor.is_meta}


def _like(original: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a buffer, or a parameter with the same attributes, without values on ``device``."""
    values = torch.empty_like(original, device=device)
    if not isinstance(original, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=original.requires_grad)
    vars(parameter).update(users_attributes(original))
    return parameter

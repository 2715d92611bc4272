# SPDX-License-Identifier: Apache-2.0
"""Guards of compute parameters, which nobody may read while they are not gathered."""

# [Note: weights that nobody may read] Code may read a weight past its module, by a reference that
# it keeps, and backward may read one for a tensor that left a unit by another way than as its
# result. No hook tells the schedule of it, so they would read freed memory at level 3, what an
# all-gather has not filled yet, or weights of another unit in its memory slot. So while a unit is
# not unsharded, its compute parameters
#   - have a class that refuses to compute with them, as torch's uninitialized parameters do, and
#   - have version counters that no graph knows, so that autograd, which compares them with what it
#     has saved, raises before it reads. The number tells which parameter it is.

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count, repeat
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron.fsdp.engine.gradients import set_all

NOT_GATHERED = (
    "unit {unit!r}: {name} is read while its weights are not gathered. Either code reads it past"
    " its module, by a reference that it keeps: read it as an attribute of the module. Or a tensor"
    " that forward keeps elsewhere (on the module, in a list, in an object that is no pytree) is in"
    " the loss: return it from the forward of the unit"
)
FIRST_VERSION = 1 << 31  # of a guarded parameter; graphs count from 0
VERSION_IN_MESSAGE = re.compile(r"is at version (\d+); expected version")
# Methods that read no elements.
ALLOWED = frozenset(
    {
        *(torch.Tensor.__hash__, torch.Tensor.__len__, torch.Tensor.dim, torch.Tensor.size),
        *(torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.nelement),
        *(torch.Tensor.element_size, torch.Tensor.storage_offset, torch.Tensor.is_contiguous),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.get_device),
        *(torch.Tensor.untyped_storage, torch.Tensor.requires_grad_, torch.Tensor.register_hook),
        *(torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad),
        *(torch.Tensor.ndimension, torch.Tensor.type, torch.Tensor.is_signed),
        *(torch.Tensor.is_pinned, torch.Tensor.is_shared, torch.Tensor.is_inference),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.result_type),
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones),
        torch.Tensor.new_full,
    }
)
# Attributes that are views of the elements; the others read none.
VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})

_set_versions = torch._C._autograd._unsafe_set_version_counter
_version_of = attrgetter("_version")
_guard_of_version: WeakValueDictionary[int, WeightGuard] = WeakValueDictionary()
_versions = count(FIRST_VERSION)


class FunctionsOfTorch:
    """A base of tensor classes: functions of torch on them are calls of :meth:`call`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return cls.call(func, args, kwargs or {})

    @classmethod
    def call(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``, or NotImplemented to leave it to another tensor."""
        raise NotImplementedError


class WeightGuard:
    """Lets the compute parameters of a group be read, or not."""

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str], unit_name: str):
        self._parameters = parameters
        self._unit_name = unit_name
        self._name_of = dict(zip(_versions, names))
        _guard_of_version.update(dict.fromkeys(self._name_of, self))
        self._plain: list[nn.Parameter] | None = None
        self._saved: tuple[int, ...] | None = None  # the version counters while guarded

    @property
    def versions(self) -> tuple[int, ...]:
        """The version counters of the parameters as autograd knows them."""
        return self._saved or tuple(map(_version_of, self._parameters))

    def close(self) -> None:
        """Let nobody read the parameters."""
        if self._saved is None:
            self._saved = tuple(map(_version_of, self._parameters))
            _set_versions(tuple(self._parameters), tuple(self._name_of))
            if self._plain is None:  # tensor subclasses have functions of their own
                self._plain = [each for each in self._parameters if type(each) is nn.Parameter]
            set_all(self._plain, "__class__", repeat(GuardedParameter))

    def open(self, complete: Callable[[], None]) -> None:
        """Let everybody read the parameters again, which ``complete`` may write to first."""
        set_all(self._plain or (), "__class__", repeat(nn.Parameter))
        complete()
        if self._saved is not None:
            _set_versions(tuple(self._parameters), self._saved)
            self._saved = None

    def rename(self, names: Sequence[str], unit_name: str) -> None:
        """Use other names of the parameters and of their unit in messages."""
        self._unit_name = unit_name
        self._name_of = dict(zip(self._name_of, names))

    def words(self, version: int) -> str:
        """Return the message about a reader of the parameter with this version."""
        return NOT_GATHERED.format(unit=self._unit_name, name=self._name_of[version])


class GuardedParameter(FunctionsOfTorch, nn.Parameter):
    """A compute parameter that is not gathered; it becomes a plain parameter again."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} that is not gathered"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def call(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Raise ``RuntimeError`` for what reads elements."""
        # Attributes come as their __get__ and __set__.
        is_attribute = type(func).__name__ == "method-wrapper"
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        reads = is_attribute and func.__name__ == "__get__" and name in VIEWS
        if func in ALLOWED or (is_attribute and not reads):
            return func(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, GuardedParameter):
                raise RuntimeError(_guard_of_version[value._version].words(value._version))
        return NotImplemented


def _named(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def run_and_name(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            found = VERSION_IN_MESSAGE.search(str(error))
            if found and (guard := _guard_of_version.get(version := int(found[1]))):
                raise RuntimeError(guard.words(version)) from error
            raise

    return run_and_name


# torch knows nothing of parameters' names; this is what all its ways into backward call.
run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
torch.autograd._engine_run_backward = _named(run_backward)  # type: ignore[attr-defined]

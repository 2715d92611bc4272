# SPDX-License-Identifier: Apache-2.0
"""Guards of compute parameters, which nobody may read while they are not gathered."""

# [Note: weights that nobody may read] Code may read a weight past its module, by a reference that
# it keeps, and backward may read one for a tensor that left a unit by another way than as its
# result. No hook notifies the schedule, so they would read freed memory at level 3, what an
# all-gather has not filled yet, or weights of another unit in its memory slot. So while a unit is
# not unsharded, its compute parameters
#   - have a class that refuses to compute with them, as torch's uninitialized parameters do, and
#   - have version counters that no graph knows, so that autograd, which compares them with what it
#     has saved, raises before it reads. The number identifies the parameter.

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.fsdp.engine.gradients import GroupNames
from megatron.fsdp.engine.loops_in_c import attributes, set_all

NOT_GATHERED = (
    "unit {unit!r}: {name} is read while its weights are not gathered. Either code reads it past"
    " its module, by a reference that it keeps: read it as an attribute of the module. Or a tensor"
    " that forward keeps elsewhere (on the module, in a list, in an object that is no pytree) is in"
    " the loss: return it from the forward of the unit"
)
FIRST_VERSION = 1 << 31  # version of the first guarded parameter; graphs count from 0
VERSION_IN_MESSAGE = re.compile(r"is at version (\d+); expected version")
# Methods that read no elements.
ALLOWED = frozenset(
    {
        Tensor.__hash__,
        Tensor.__len__,
        Tensor.dim,
        Tensor.size,
        Tensor.stride,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.storage_offset,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
        Tensor.untyped_storage,
        Tensor.requires_grad_,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.retain_grad,
        Tensor.ndimension,
        Tensor.type,
        Tensor.is_signed,
        Tensor.is_pinned,
        Tensor.is_shared,
        Tensor.is_inference,
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        torch.result_type,
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        Tensor.new_empty,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
    }
)
# Attributes that are views of the elements; the others read none.
VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})

_set_versions = torch._C._autograd._unsafe_set_version_counter
_guard_of_version: WeakValueDictionary[int, WeightGuard] = WeakValueDictionary()
_versions = count(FIRST_VERSION)


class FunctionsOfTorch:
    """A base of tensor classes whose :meth:`call` replaces functions of torch."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return cls.call(func, args, kwargs or {})

    @classmethod
    def call(
        cls,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of a function of torch.

        Args:
            func: the function, or the ``__get__`` or ``__set__`` of an attribute.
            args: its positional arguments, at least one of them a tensor of this class.
            kwargs: its keyword arguments.

        Returns:
            The result, or NotImplemented, so that the class of another tensor is asked.
        """
        raise NotImplementedError


class WeightGuard:
    """Permits code to read the compute parameters of a group, or refuses it.

    Args:
        parameters: the compute parameters.
        names: of the group, for messages.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: GroupNames):
        self._parameters = parameters
        self._names = names
        # Index of a parameter by the version that it has while it is guarded.
        self._index_of = dict(zip(_versions, range(len(parameters))))
        _guard_of_version.update(dict.fromkeys(self._index_of, self))
        self._plain: list[nn.Parameter] | None = None  # parameters of no subclass
        self._saved: tuple[int, ...] | None = None  # version counters while guarded

    @property
    def versions(self) -> tuple[int, ...]:
        """The version counters of the parameters as autograd knows them."""
        return self._saved or tuple(attributes(self._parameters, "_version"))

    def close(self) -> None:
        """Refuse reads of the parameters."""
        if self._saved is None:
            self._saved = self.versions
            _set_versions(tuple(self._parameters), tuple(self._index_of))
            if self._plain is None:  # tensor subclasses have functions of their own
                self._plain = [
                    parameter for parameter in self._parameters if type(parameter) is nn.Parameter
                ]
            set_all(self._plain, "__class__", GuardedParameter)

    def open(self, complete: Callable[[], None]) -> None:
        """Permit reads of the parameters again, which ``complete`` may write to first."""
        if self._plain is not None:
            set_all(self._plain, "__class__", nn.Parameter)
        complete()
        if self._saved is not None:
            _set_versions(tuple(self._parameters), self._saved)
            self._saved = None

    def message(self, version: int) -> str:
        """Return the error message for a read of the parameter with this version."""
        name = self._names.parameters[self._index_of[version]]
        return NOT_GATHERED.format(unit=self._names.unit, name=name)


class GuardedParameter(FunctionsOfTorch, nn.Parameter):
    """A compute parameter that is not gathered; it becomes a plain parameter again."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} that is not gathered"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def call(
        cls,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Raise ``RuntimeError`` for functions that read elements.

        Args:
            func: a function of torch, or the ``__get__`` or ``__set__`` of an attribute.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        reads = func not in ALLOWED
        if type(func).__name__ == "method-wrapper":  # the __get__ or __set__ of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            reads = func.__name__ == "__get__" and name in VIEWS
        if not reads:
            return func(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, GuardedParameter):
                raise RuntimeError(_guard_of_version[value._version].message(value._version))
        return NotImplemented


def _naming_parameters(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` so that errors of guarded parameters name them."""

    @wraps(run)
    def run_and_name(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            found = VERSION_IN_MESSAGE.search(str(error))
            if found is not None:
                version = int(found[1])
                guard = _guard_of_version.get(version)
                if guard is not None:
                    raise RuntimeError(guard.message(version)) from error
            raise

    return run_and_name


# torch does not know the names of parameters. All its ways into backward call this function.
run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
torch.autograd._engine_run_backward = _naming_parameters(run_backward)  # type: ignore[attr-defined]

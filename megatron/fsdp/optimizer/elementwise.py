# SPDX-License-Identifier: Apache-2.0
"""A test whether an optimizer is element-wise: only then may it step on shards of matrices.

torch's optimizers are known. Other optimizers are tried out on small tensors, whole and sharded;
see :func:`why_not_elementwise`.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

KNOWN = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.ASGD,
)
"""Optimizers of torch that are element-wise."""

NEED_THE_WHOLE = re.compile(r"(?i:adafactor|muon|shampoo|lbfgs|soap)|LAMB|Lamb(?!da)|LARS|SAM\b")
"""Names of optimizers whose updates depend on whole rows, matrices or the whole model."""

STEPS = 3
LEARNING_RATE = 0.1  # the user's own may be 0, at the beginning of a warm-up

OptimizerClass = type[torch.optim.Optimizer]

Setting = dict[str, Any]
"""The settings of a param group, by name."""


class OnLocalShards(TorchFunctionMode):
    """A mode that runs some operations on local tensors: those that DTensor does not implement.

    The operations are element-wise, so the result is the same.
    """

    OPERATIONS = frozenset(
        {
            torch._fused_sgd_,
            torch._fused_adagrad_,
            torch._foreach_copy_,
            torch.Tensor.__setitem__,
        }
    )

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in self.OPERATIONS:
            args, kwargs = tree_map_only(DTensor, _local, (args, kwargs))
        return function(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the mode inside the context, for code other than the optimizer's: closures."""
        # torch has no types for either.
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor


def torch_class(kind: OptimizerClass) -> OptimizerClass | None:
    """Return the class in :data:`KNOWN` whose update ``kind`` has; None if there is none.

    ``kind`` may be a subclass that does not change ``step`` or ``_init_group``.
    """
    known = next((base for base in kind.__mro__ if base in KNOWN), None)
    if known is None:
        return None
    # torch wraps the `step` of a class when its first instance is created.
    has_own_step = inspect.unwrap(kind.step) is not inspect.unwrap(known.step)
    # `_init_group` creates the state of a parameter at the first step.
    makes_own_state = getattr(kind, "_init_group", None) is not getattr(known, "_init_group", None)
    return None if has_own_step or makes_own_state else known


def state_names(kind: OptimizerClass | None, group: Setting) -> list[str]:
    """Return the names of the element-wise state of torch's optimizers, in torch's order.

    The list is empty if the first step must create the state.

    Args:
        kind: the result of :func:`torch_class`.
        group: the settings of a param group.
    """
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    if kind is torch.optim.RMSprop:
        momentum = ["momentum_buffer"] if group["momentum"] > 0 else []
        return ["square_avg", *momentum] + (["grad_avg"] if group["centered"] else [])
    if kind is torch.optim.SGD:
        return ["momentum_buffer"] if group["momentum"] != 0 and group["dampening"] == 0 else []
    names: dict[OptimizerClass | None, list[str]] = {
        torch.optim.NAdam: ["exp_avg", "exp_avg_sq"],
        torch.optim.RAdam: ["exp_avg", "exp_avg_sq"],
        torch.optim.Adamax: ["exp_avg", "exp_inf"],
        torch.optim.Adadelta: ["square_avg", "acc_delta"],
        torch.optim.Adagrad: ["sum"],
    }
    return names.get(kind, [])


def why_not_elementwise(
    kind: OptimizerClass, defaults: Setting, groups: Sequence[Setting]
) -> str | None:
    """Return the reason why an optimizer cannot step on shards of matrices; None if it can.

    A class that is not torch's own is tried out. It is built from ``defaults`` and the settings of
    ``groups`` over small plain float64 tensors: once over whole matrices, and twice over their
    shards on two ranks (some rows, a flat range, nothing). After a few steps on the same gradients
    the weights must agree. The user's optimizer, its tensors and all random number generators of
    torch and Python are not changed, and nothing is communicated.

    A class that cannot be built or stepped that way (it needs other arguments than its defaults, or
    has GPU kernels for another dtype only) is assumed to be element-wise, unless its name is known
    to need whole matrices.

    Args:
        kind: the optimizer's class.
        defaults: its ``defaults``.
        groups: its ``param_groups``; of their parameters only the device is used.
    """
    if any(NEED_THE_WHOLE.search(base.__name__) for base in kind.__mro__):
        return (
            "needs whole matrices or the whole model, but ranks hold pieces of them: not built yet"
        )
    if issubclass(kind, torch.optim.SparseAdam):
        return "is for sparse gradients, which are not built yet"
    if any(group.get("differentiable") for group in groups):
        return "with differentiable=True would record its update through the weights: not built yet"
    return None if torch_class(kind) else _try_out(kind, defaults, groups)


def _try_out(kind: OptimizerClass, defaults: Setting, groups: Sequence[Setting]) -> str | None:
    device = _device_of(groups)
    python_state = random.getstate()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compare(kind, defaults, _different_settings(groups), device)
    finally:
        random.setstate(python_state)


def _device_of(groups: Sequence[Setting]) -> torch.device:
    """Return the device of the first parameter."""
    for group in groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    return torch.device("cpu")


class TrialMatrix(NamedTuple):
    """A float64 weight, and the slope that determines its gradients, of the same shape."""

    weight: torch.Tensor
    slope: torch.Tensor

    def rows(self, begin: int | None, end: int | None) -> TrialMatrix:
        """Return rows ``begin`` to ``end`` of both."""
        return TrialMatrix(self.weight[begin:end], self.slope[begin:end])

    def as_column(self) -> TrialMatrix:
        """Return both as flat vectors with two dims."""
        return TrialMatrix(self.weight.reshape(-1, 1), self.slope.reshape(-1, 1))


def _random_matrix(
    shape: Sequence[int], generator: torch.Generator, device: torch.device
) -> TrialMatrix:
    weight, slope = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return TrialMatrix(weight.to(device), slope.to(device))


def _shards(whole: list[TrialMatrix]) -> tuple[list[TrialMatrix], list[TrialMatrix]]:
    """Return the shards of three matrices on two ranks: rows, a flat range, all or nothing.

    The flat range has two dims, like the matrix, since a DTensor keeps the number of dims. Blocks
    of 64 or more elements are not cut, for optimizers that quantize their state by blocks.
    """
    by_rows, by_range, small = whole
    flat = by_range.as_column()
    first = [by_rows.rows(None, 49), flat.rows(None, 17), small]
    second = [by_rows.rows(49, None), flat.rows(17, None), small.rows(5, None)]
    return first, second


def _compare(
    kind: OptimizerClass, defaults: Setting, settings: list[Setting], device: torch.device
) -> str | None:
    """Step on whole matrices and on their shards; return the difference, or None."""
    generator = torch.Generator().manual_seed(1)  # the global one is not advanced
    wholes: list[list[TrialMatrix]] = []
    firsts: list[list[TrialMatrix]] = []
    seconds: list[list[TrialMatrix]] = []
    for _ in settings:
        # All have two dims, because some optimizers accept nothing else.
        shapes = ((136, 128), (9, 7), (5, 1))
        whole = [_random_matrix(shape, generator, device) for shape in shapes]
        first, second = _shards(whole)
        wholes.append(whole)
        firsts.append(first)
        seconds.append(second)
    try:
        expected = _step(kind, defaults, settings, wholes)
    except Exception:  # unknown code may raise anything: it cannot be tried out
        return None
    try:
        results = zip(
            _step(kind, defaults, settings, firsts), _step(kind, defaults, settings, seconds)
        )
    except Exception as error:
        return (
            f"cannot step on pieces of a matrix, which is what ranks hold ({type(error).__name__}:"
            f" {error})"
        )
    for weight, shards in zip(expected, results):
        together = torch.cat([shard.reshape(-1) for shard in shards])
        if not torch.allclose(together, weight.reshape(-1), rtol=1e-9, atol=1e-12, equal_nan=True):
            return (
                f"is not element-wise: {STEPS} steps on a matrix and on its pieces, which is what"
                " ranks hold, give other weights (it looks at rows, whole matrices or the whole"
                " model, or draws random numbers): not built yet"
            )
    return None


def _step(
    kind: OptimizerClass,
    defaults: Setting,
    settings: list[Setting],
    groups: list[list[TrialMatrix]],
) -> list[torch.Tensor]:
    """Return the weights after a few steps of a new optimizer.

    Args:
        kind: the optimizer's class.
        defaults: its ``defaults``.
        settings: the settings of each param group.
        groups: the matrices of each param group.
    """
    param_groups: list[dict[str, Any]] = []
    weights: list[nn.Parameter] = []
    slopes: list[torch.Tensor] = []
    for setting, samples in zip(settings, groups):
        own = [nn.Parameter(sample.weight.clone()) for sample in samples]
        param_groups.append({**copy.deepcopy(setting), "params": own})
        weights += own
        slopes += [sample.slope for sample in samples]
    optimizer = kind(param_groups, **_accepted(kind, defaults))

    def closure() -> torch.Tensor:
        """Return an element-wise loss; its gradients depend on the weights."""
        with torch.enable_grad():
            terms = [
                (slope * torch.sin(weight + slope)).sum() for weight, slope in zip(weights, slopes)
            ]
            loss = torch.stack(terms).sum()
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
                weight.grad = gradient
        return loss

    for _ in range(STEPS):
        closure()
        try:
            optimizer.step(closure)  # type: ignore[arg-type]  # closures may return tensors
        except TypeError:  # takes none
            optimizer.step()
    return [weight.detach() for weight in weights]


def _accepted(kind: OptimizerClass, defaults: Setting) -> Setting:
    """Return copies of the ``defaults`` that the constructor of an optimizer accepts."""
    parameters = inspect.signature(kind).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return {
        key: copy.deepcopy(value)
        for key, value in defaults.items()
        if takes_all or key in parameters
    }


def _different_settings(groups: Sequence[Setting]) -> list[Setting]:
    """Return the distinct settings of groups, with a learning rate that changes weights."""
    found: dict[str, Setting] = {}
    for group in groups:
        setting = {
            key: value
            for key, value in group.items()
            if key not in ("params", "param_names", "initial_lr")
        }
        if isinstance(setting.get("lr"), torch.Tensor):
            setting["lr"] = torch.full_like(setting["lr"], LEARNING_RATE)
        elif "lr" in setting:
            setting["lr"] = LEARNING_RATE
        found.setdefault(repr(sorted(setting.items(), key=lambda item: item[0])), setting)
    return list(found.values())

# SPDX-License-Identifier: Apache-2.0
"""Is an optimizer's update element-wise? Only then may ranks that hold pieces of matrices step on their own.

torch's optimizers are known. Any other is tried out on small tensors, whole and in pieces; see
:func:`why_not_elementwise`.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

KNOWN = (
    *(
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
    ),
    *(
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.ASGD,
    ),
)
"""Optimizers of torch that are element-wise."""

NEED_THE_WHOLE = re.compile(r"(?i:adafactor|muon|shampoo|lbfgs|soap)|LAMB|Lamb(?!da)|LARS|SAM\b")
"""Names of optimizers whose updates look at whole rows, matrices or the whole model."""

STEPS = 3
LEARNING_RATE = 0.1  # one that moves weights, where a warm-up begins at 0


class OnLocalParts(TorchFunctionMode):
    """Inside, operations that torch has not taught its DTensors run on this rank's pieces: element-wise, it is the same."""

    OPERATIONS = {
        torch._fused_sgd_,
        torch._fused_adagrad_,
        torch._foreach_copy_,
        torch.Tensor.__setitem__,
    }

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function in self.OPERATIONS:
            args, kwargs = tree_map_only(DTensor, _local, (args, kwargs))
        return function(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For code inside that is not the optimizer's: closures."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor


def torch_class(kind: type) -> type | None:
    """The element-wise optimizer of torch that ``kind`` is: itself, or with a constructor of its own; else None."""
    known = next((base for base in kind.__mro__ if base in KNOWN), None)
    if known is None:
        return None
    # Where the first optimizer of a class is made, torch wraps its `step`.
    own_step = inspect.unwrap(kind.step) is not inspect.unwrap(known.step)
    return None if own_step or kind._init_group is not known._init_group else known


def state_names(kind: type | None, group: dict[str, Any]) -> list[str]:
    """Names of the element-wise state of torch's optimizers, in torch's order; none where it must be left to the first step.

    Args:
        kind: what :func:`torch_class` says.
        group: the settings of a param group.
    """
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    if kind is torch.optim.RMSprop:
        momentum = ["momentum_buffer"] if group["momentum"] > 0 else []
        return ["square_avg", *momentum] + (["grad_avg"] if group["centered"] else [])
    if kind is torch.optim.SGD:
        return ["momentum_buffer"] if group["momentum"] != 0 and group["dampening"] == 0 else []
    return {
        torch.optim.NAdam: ["exp_avg", "exp_avg_sq"],
        torch.optim.RAdam: ["exp_avg", "exp_avg_sq"],
        torch.optim.Adamax: ["exp_avg", "exp_inf"],
        torch.optim.Adadelta: ["square_avg", "acc_delta"],
        torch.optim.Adagrad: ["sum"],
    }.get(kind, [])


def why_not_elementwise(
    kind: type, defaults: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> str | None:
    """Why an optimizer cannot step on pieces of matrices; None if it can.

    A class that is not torch's own is tried: it is built from ``defaults`` and the settings of
    ``groups`` over small plain float64 tensors, on whole matrices and once more, by two others, on
    pieces of them as two ranks
    would hold them: some rows, a flat run, nothing. After a few steps on the same gradients the
    weights must agree. The user's optimizer, its tensors and all random number generators of torch
    and Python stay as they are, and nothing is communicated.

    A class that cannot be built or stepped that way (other arguments than its defaults, kernels for
    GPUs in another dtype) is taken at its word, unless its name is one of those known to need whole
    matrices.

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


def _try_out(kind: type, defaults: dict[str, Any], groups: Sequence[dict[str, Any]]) -> str | None:
    device = next(
        (parameter.device for group in groups for parameter in group["params"]), torch.device("cpu")
    )
    python_state = random.getstate()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compare(kind, defaults, _different_settings(groups), device)
    finally:
        random.setstate(python_state)


def _compare(
    kind: type, defaults: dict[str, Any], settings: list[dict[str, Any]], device: torch.device
) -> str | None:
    """Step on wholes and on pieces, and compare."""
    generator = torch.Generator().manual_seed(1)  # of its own
    wholes, ranks = [], ([], [])
    for _ in settings:
        # All have two dims: some optimizers take nothing else.
        pairs = [_random_pair(shape, generator, device) for shape in ((136, 128), (9, 7), (5, 1))]
        wholes.append(pairs)
        for rank, pieces in zip(ranks, _cut(*pairs)):
            rank.append(pieces)
    try:
        expected = _step(kind, defaults, settings, wholes)
    except Exception:  # whatever a stranger's code raises: it cannot be tried out
        return None
    try:
        first, second = (_step(kind, defaults, settings, rank) for rank in ranks)
    except Exception as error:
        return (
            f"cannot step on pieces of a matrix, which is what ranks hold ({type(error).__name__}:"
            f" {error})"
        )
    for whole, *pieces in zip(expected, first, second):
        together = torch.cat([piece.reshape(-1) for piece in pieces])
        if not torch.allclose(together, whole.reshape(-1), rtol=1e-9, atol=1e-12, equal_nan=True):
            return (
                f"is not element-wise: {STEPS} steps on a matrix and on its pieces, which is what"
                " ranks hold, give other weights (it looks at rows, whole matrices or the whole"
                " model, or draws random numbers): not built yet"
            )
    return None


Pair = tuple[torch.Tensor, torch.Tensor]
"""Weights, and what their gradients are made of."""


def _random_pair(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Pair:
    weight, slope = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return weight.to(device), slope.to(device)


def _cut(matrix: Pair, run: Pair, small: Pair) -> tuple[list[Pair], list[Pair]]:
    """What two ranks hold: rows, a flat run (with as many dims as the whole, since DTensors keep them), all or nothing.

    The cuts hit no block of 64 or more elements, for optimizers that quantize their state by
    blocks.
    """
    flat = tuple(tensor.reshape(-1, 1) for tensor in run)
    first = [tuple(tensor[:49] for tensor in matrix), tuple(tensor[:17] for tensor in flat), small]
    second = [
        tuple(t[49:] for t in matrix),
        tuple(t[17:] for t in flat),
        tuple(t[5:] for t in small),
    ]
    return first, second


def _step(
    kind: type, defaults: dict[str, Any], settings: list[dict[str, Any]], groups: list[list[Pair]]
) -> list[torch.Tensor]:
    """The weights after a few steps of a new optimizer."""
    weights = [[nn.Parameter(weight.clone()) for weight, _ in pairs] for pairs in groups]
    flat = [weight for group in weights for weight in group]
    slopes = [slope for pairs in groups for _, slope in pairs]
    accepted = inspect.signature(kind).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    optimizer = kind(
        [{**copy.deepcopy(setting), "params": group} for setting, group in zip(settings, weights)],
        **{
            key: copy.deepcopy(value)
            for key, value in defaults.items()
            if anything or key in accepted
        },
    )

    def closure() -> torch.Tensor:
        """An element-wise loss: gradients depend on the weights, for optimizers that look twice."""
        with torch.enable_grad():
            loss = sum(
                (slope * torch.sin(weight + slope)).sum() for weight, slope in zip(flat, slopes)
            )
            for weight, gradient in zip(flat, torch.autograd.grad(loss, flat)):
                weight.grad = gradient
        return loss

    for _ in range(STEPS):
        closure()
        try:
            optimizer.step(closure)
        except TypeError:  # takes none
            optimizer.step()
    return [weight.detach() for weight in flat]


def _different_settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of groups, each once, with a learning rate that moves weights."""
    found = {}
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

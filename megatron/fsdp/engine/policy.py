# SPDX-License-Identifier: Apache-2.0
"""Settings: what is sharded, in which precision, and how communication overlaps compute."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, IntEnum

import torch

# Each settings object checks its fields.


class ShardingStrategy(IntEnum):
    """The ZeRO levels (arXiv:1910.02054): the state that is sharded over the inner axis."""

    NO_SHARD = 0  # Nothing is sharded: gradients are all-reduced, all ranks update all parameters.
    OPTIM = 1  # Optimizer state and main weights are sharded.
    OPTIM_GRADS = 2  # Gradients are sharded too: they are reduce-scattered after every backward.
    OPTIM_GRADS_PARAMS = 3  # Compute weights are sharded too: they are all-gathered unit by unit.

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def shards_optimizer(self) -> bool:
        """True if each rank updates its own shard only."""
        return self >= ShardingStrategy.OPTIM

    @property
    def shards_gradients(self) -> bool:
        """True if gradients are reduced after every backward."""
        return self >= ShardingStrategy.OPTIM_GRADS

    @property
    def shards_parameters(self) -> bool:
        """True if weights are freed between uses."""
        return self >= ShardingStrategy.OPTIM_GRADS_PARAMS

    @classmethod
    def parse(
        cls,
        value: int | str | ShardingStrategy,
        argument: str = "Strategy.level",
    ) -> ShardingStrategy:
        """Return the strategy of a level.

        Args:
            value: a number from 0 to 3, a name such as "optim_grads", or a member.
            argument: the user's name of the argument, for the error.

        Raises:
            ValueError: for any other value.
        """
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if isinstance(value, int) and not isinstance(value, bool) and value in range(len(cls)):
            return cls(value)
        names = ", ".join(f"{member.name.lower()}/{member.value}" for member in cls)
        raise ValueError(f"{argument} expects one of {names} but got {value!r}")


class ParameterKind(Enum):
    """The kind of a parameter, which decides its axes of the mesh and its strategy."""

    DENSE = "dense"
    """All that are of no other kind."""
    EXPERT = "expert"
    """Of an expert-parallel layer, with a mesh of the ranks that have the same experts."""
    EMBEDDING = "embedding"
    """Of an embedding or of the output layer, with a strategy of their own."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Precision of main weights and gradients; computation is in the dtype of the module.

    Args:
        main_params_dtype: dtype of the weights that the optimizer updates. None: it updates the
            compute weights themselves.
        main_grads_dtype: dtype in which gradients are summed over microbatches. None: the dtype of
            the parameter.
        grad_comm_dtype: dtype in which gradients are reduced. None: ``main_grads_dtype``.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        problems = problems_of_flags(self)
        for field in fields(self):
            if not field.name.endswith("_dtype"):
                continue
            dtype = getattr(self, field.name)
            is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if dtype is not None and not is_float:
                problems.append(
                    f"{field.name} expects a floating-point torch.dtype or None but got {dtype!r}"
                )
        raise_problems(problems)

    def resolve(self, compute_dtype: torch.dtype, trainable: bool) -> Precision:
        """Return the dtypes of a group.

        Args:
            compute_dtype: dtype of its parameters in the module.
            trainable: False: frozen parameters keep their dtype, since nothing updates them.
        """
        main_param = compute_dtype
        if trainable and self.main_params_dtype is not None:
            main_param = self.main_params_dtype
        main_grad = self.main_grads_dtype or compute_dtype
        return Precision(
            compute=compute_dtype,
            main_param=main_param,
            main_grad=main_grad,
            grad_comm=self.grad_comm_dtype or main_grad,
        )


@dataclass(frozen=True)
class Precision:
    """The dtypes of a group: a :class:`MixedPrecisionPolicy` with its defaults filled in.

    Args:
        compute: dtype of compute weights, and of the gradients that autograd computes.
        main_param: dtype of main weights.
        main_grad: dtype in which gradients are summed over microbatches.
        grad_comm: dtype in which gradients are reduced.
    """

    compute: torch.dtype
    main_param: torch.dtype
    main_grad: torch.dtype
    grad_comm: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The overlap of communication with compute.

    Args:
        grad_reduce: overlap the reductions of a unit with the backward of the next one.
        param_gather: overlap the all-gathers of the next units with the compute of this one.
        prefetch_units: how many units may be unsharded ahead of the one in use, 0 or more.
        prefetch_bytes: how many bytes of weights may be unsharded ahead, in place of a number of
            units, and up to which small units outside the named ones are gathered with the
            parameters of the root. None: no such bound, and the size of the largest named unit.
    """

    grad_reduce: bool = True
    param_gather: bool = True
    prefetch_units: int = 1
    prefetch_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = problems_of_flags(self)
        number = self.prefetch_units
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            problems.append(
                f"Overlap.prefetch_units expects a number of units, at least 0, but got {number!r}"
            )
        size = self.prefetch_bytes
        is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if size is not None and not is_size:
            problems.append(
                "Overlap.prefetch_bytes expects a positive number of bytes or None but got"
                f" {size!r}"
            )
        raise_problems(problems)


def problems_of_flags(setting: object) -> list[str]:
    """Return a problem for every flag of a settings object that is neither True nor False."""
    problems = []
    for field in fields(setting):  # type: ignore[arg-type]  # a dataclass
        value = getattr(setting, field.name)
        if isinstance(field.default, bool) and value not in (True, False):
            name = f"{type(setting).__name__}.{field.name}"
            problems.append(f"{name} expects True or False but got {value!r}")
    return problems


def raise_problems(problems: list[str]) -> None:
    """Raise one ``ValueError`` with a line for each problem, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))

# SPDX-License-Identifier: Apache-2.0
"""Arguments while rules complete and check them, and as the parts of a run see them."""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron.pretrain.arguments.flags import Flag


class CommandLineError(ValueError):
    """All problems of a command line; `problems` has one sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
        super().__init__("\n".join([f"The command line has {count}:", *lines]))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.problems,)


class FrozenArguments(argparse.Namespace):
    """A copy of ``args`` that cannot be changed, with ``values`` put in.

    What changes during a run is in :class:`megatron.mcore_adapter.run.run_state.Progress`.

    Raises:
        AttributeError: on every attempt to set or delete an attribute.
    """

    def __init__(self, args: argparse.Namespace, **values: Any) -> None:
        vars(self).update(vars(args) | values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"arguments are read-only during a run: cannot set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"arguments are read-only during a run: cannot delete {name}")


@dataclass(frozen=True)
class Machine:
    """The machine of a run."""

    world_size: int
    """Number of ranks."""
    cuda: bool
    """There are GPUs."""
    transformer_engine: bool
    """Transformer Engine can be imported."""
    fused_weight_gradient: bool
    """The kernel of --gradient-accumulation-fusion is installed."""
    expert_dispatch: bool
    """The kernels of --moe-token-dispatcher-type flex, package deep_ep, are installed."""
    emerging_optimizers: bool
    """The package of --optimizer muon is installed."""
    environment: Mapping[str, str]
    """The environment variables."""


@dataclass
class Check:
    """The arguments under check.

    Rules read and complete `args`, and append to `problems` and `notes`.
    """

    args: argparse.Namespace
    given: dict[str, Any]
    """Destinations that the command line named, with the values they had there."""
    flags: Mapping[str, Flag]
    """All flags by destination."""
    machine: Machine
    refused: set[str] = field(default_factory=set)
    """Destinations whose words could not be read as a value, which `problems` reports."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def flag(self, dest: str) -> str:
        """Return the spelling of a destination's flag."""
        return self.flags[dest].name

    def changed(self, dest: str) -> bool:
        """Return True if the command line gave a value other than the default."""
        return dest in self.given and self.given[dest] != self.flags[dest].default

    def set_default(self, dest: str) -> None:
        """Go on as if the flag, whose problem is recorded, were not on the command line."""
        self.given.pop(dest, None)
        # A default that is a list belongs to one run.
        setattr(self.args, dest, copy.copy(self.flags[dest].default))

    def require(self, condition: object, problem: str) -> None:
        """Record the problem unless the condition holds."""
        if not condition:
            self.problems.append(problem)

    def require_given(self, condition: object, *dests: str) -> None:
        """Record that a flag is missing, unless the condition holds or its value was refused."""
        if not self.refused.intersection(dests):
            flags = " or ".join(self.flag(dest) for dest in dests)
            self.require(condition, f"required but not given: {flags}")

    def require_multiple(
        self,
        dest: str,
        divisor: int,
        why: str,
    ) -> None:
        """Record a problem unless the value of `dest`, if given, is a multiple of `divisor`."""
        value = getattr(self.args, dest)
        self.require(
            not value or value % divisor == 0,
            f"{self.flag(dest)} {value} must be a multiple of {divisor}: {why}",
        )

    def at_most_one(self, *dests: str) -> None:
        """Record a problem if more than one of the flags is set."""
        found = [self.flag(dest) for dest in dests if getattr(self.args, dest)]
        self.require(len(found) < 2, f"{' and '.join(found)} exclude each other: give one of them")

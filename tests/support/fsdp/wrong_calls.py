# SPDX-License-Identifier: Apache-2.0
"""Wrong calls: what they raise, and that they leave model and optimizer as they were."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import WIDTH, ResidualBlock
from tests.support.fsdp.reference import Ranks


def message_of(
    kind: type[Exception], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    with pytest.raises(kind) as error:
        function(*args, **kwargs)
    assert error.type is kind
    return str(error.value)


TIMEOUT = 120.0
"""Seconds that the calls of a table may take, and one more each, where one of them hangs."""


class Scene:
    """A model and its optimizer, which has stepped once, before a wrong call."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.rank = dist.get_rank()
        self.module = nn.Sequential(ResidualBlock(), nn.Linear(WIDTH, 3))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.02)
        self.module(torch.ones(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.before = self.snapshot()

    def snapshot(
        self,
    ) -> tuple[list[tuple[int, Tensor]], list[list[int]], list[list[Tensor]], type]:
        parameters = [
            (id(parameter), parameter.detach().clone()) for parameter in self.module.parameters()
        ]
        groups = [
            [id(parameter) for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]
        state = [
            [value.clone() for value in slots.values()] for slots in self.optimizer.state.values()
        ]
        return parameters, groups, state, type(self.optimizer)

    def check_that_nothing_has_happened(self) -> None:
        (old, *others), (new, *others_now) = self.before, self.snapshot()
        assert [key for key, _ in old] == [key for key, _ in new]
        assert all(torch.equal(left, right) for (_, left), (_, right) in zip(old, new))
        assert others[0] == others_now[0] and others[2] is others_now[2]
        for slots, slots_now in zip(others[1], others_now[1]):
            assert all(map(torch.equal, slots, slots_now))
        assert not any(hasattr(parameter, "_fsdp_model") for parameter in self.module.parameters())

    def check_that_the_right_call_works(self) -> None:
        model, optimizer = fully_shard(
            self.module, self.optimizer, fsdp_unit_modules=[ResidualBlock]
        )
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()


@dataclass(frozen=True)
class WrongCall:
    """A wrong call, what it raises, and what the text must have in it."""

    parts: tuple[str, ...]
    call: Callable[[Scene], Any]
    kind: type[Exception] = ValueError
    world_size: int = 2


def with_arguments(*parts: str, kind: type[Exception] = ValueError, **arguments: Any) -> WrongCall:
    """Return a call of `fully_shard` with wrong arguments and a good model and optimizer."""
    return WrongCall(
        parts, lambda scene: fully_shard(scene.module, scene.optimizer, **arguments), kind
    )


def on_mesh(
    *parts: str,
    names: tuple[str, ...],
    world_size: int = 2,
    sizes: tuple[int, ...] | None = None,
    **arguments: Any,
) -> WrongCall:
    """Return such a call on a mesh of the axes `names`.

    Functions among the arguments receive the mesh.
    """

    def call(scene: Scene) -> None:
        mesh = mesh_of(*names, sizes=sizes)
        values = {
            key: value(mesh) if callable(value) else value for key, value in arguments.items()
        }
        fully_shard(scene.module, scene.optimizer, mesh, **values)

    return WrongCall(parts, call, world_size=world_size)


def sharded_linear() -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = nn.Linear(3, 3)
    return fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))


FOLLOWED_BY_THE_RIGHT_CALL = {
    "strategy 4",
    "axis unknown",
    "units cannot be imported",
    "optimizer with a step of its own",
    "strategies differ",
    "strategy wrong on one rank",
    "optimizer of another model on one rank",
    "LBFGS",
    "optimizer of another model",
    "decoupled gradients with torch's optimizer",
}


def call_wrongly(module: str, names: list[str]) -> list[str]:
    """Make calls of the table `WRONG_CALLS` of a test module, and return their messages."""
    return [message_of_call(module, name) for name in names]


def message_of_call(module: str, name: str) -> str:
    wrong = importlib.import_module(module).WRONG_CALLS[name]
    scene = Scene()
    try:
        message = message_of(wrong.kind, wrong.call, scene)
        scene.check_that_nothing_has_happened()
        if name in FOLLOWED_BY_THE_RIGHT_CALL:
            scene.check_that_the_right_call_works()
    except BaseException as error:
        error.add_note(f"in the wrong call {name!r}")
        raise
    return message


def check_refusals(ranks: Ranks, module: str) -> None:
    """Raise AssertionError unless every rank refuses all wrong calls with the same, right messages.

    The error has all differences.
    """
    table = importlib.import_module(module).WRONG_CALLS
    problems = []
    for world_size in sorted({wrong.world_size for wrong in table.values()}):
        names = [name for name, wrong in table.items() if wrong.world_size == world_size]
        of_ranks = ranks(world_size, call_wrongly, module, names, timeout=TIMEOUT + len(names))
        for name, *messages in zip(names, *of_ranks, strict=True):
            if len(set(messages)) > 1:
                problems.append(f"{name}: ranks differ: {messages}")
            absent = [part for part in table[name].parts if part not in messages[0]]
            if absent:
                problems.append(f"{name}: {absent} are not in: {messages[0]}")
    assert not problems, "\n".join(problems)

# SPDX-License-Identifier: Apache-2.0
"""The host writes offloaded weights and gradients when no copy of them is under way."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.fsdp.backends.host_memory import HostMemory
from megatron.fsdp.engine.buffer import RunningSum
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.optimizer.block_update import BlockUpdate, Flat
from megatron_fsdp import fully_shard
from tests.support.fsdp.reference import Ranks, on_ranks

COPY, WAIT, UPDATE = "copy", "wait", "update"
METHODS = [
    (ParamGroup, "_fill", COPY),
    (RunningSum, "add", COPY),
    (HostMemory, "wait", WAIT),
    (BlockUpdate, "_update", UPDATE),
]


@contextmanager
def events() -> Iterator[list[str]]:
    """List the copies that a GPU would queue, the waits of the host, and its updates."""
    found: list[str] = []

    def noting(original: Callable[..., Any], event: str, *args: Any) -> Any:
        found.append(event)
        return original(*args)

    with ExitStack() as stack:
        for owner, name, event in METHODS:
            note = partial(noting, getattr(owner, name), event)
            method = lambda self, *args, note=note: note(self, *args)  # noqa: E731
            stack.enter_context(mock.patch.object(owner, name, method))
        yield found


def last_before(found: list[str], end: int) -> str:
    return [event for event in found[:end] if event in (COPY, WAIT)][-1]


def sharded() -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(module.parameters())
    return fully_shard(
        module, optimizer, fsdp_unit_modules=[nn.Linear], offload_policy="host", zero_dp_strategy=3
    )


def loss(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 8)).sum()


def step_after(forward: bool, **arguments: Any) -> None:
    model, optimizer = sharded()
    with events() as found:
        loss(model).backward()
        if forward:
            with torch.no_grad():
                loss(model)
        optimizer.step(**arguments)
    assert last_before(found, found.index(UPDATE)) == WAIT


@pytest.mark.parametrize(
    ("forward", "arguments"),
    [(True, {}), (False, {"install_optimized_model_weights": False})],
    ids=["evaluation", "old weights are kept"],
)
def test_a_step_waits_for_copies_of_main_weights(
    ranks: Ranks, forward: bool, arguments: dict[str, Any]
) -> None:
    ranks(2, step_after, forward, **arguments)


@on_ranks(2)
def test_scaling_waits_for_copies_of_gradients() -> None:
    model, _ = sharded()
    with events() as found, model.no_sync():
        loss(model).backward()
        model.scale_gradients(0.5)
    assert last_before(found, len(found)) == WAIT


class Operators(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_counter_reaches_the_device_without_a_copy_that_the_host_waits_for() -> None:
    memory: Any = mock.Mock(device=torch.device("meta"))
    update = BlockUpdate(lambda params, state: None, [True])
    with Operators() as operators:
        counter = update._counter(Flat(0, torch.ones(2), {}, memory), torch.tensor(3.0))
    assert counter.is_meta and counter.dtype == torch.float32
    assert not [name for name in operators.names if "copy" in name]

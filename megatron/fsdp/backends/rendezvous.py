# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of ranks that torchrun restarts: each attempt has keys of its own in the store."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

# [Note: attempts] torchrun's agent keeps one store for all attempts, and two attempts may have the
# same count of restarts (docs/decisions/restarts_by_torchrun.md). So ranks agree on an attempt:
#
# - every rank draws a ticket, a number that no other process of this store has;
# - rank 0 calls, every few seconds, until all other ranks have answered the same call;
# - it then admits the tickets that have answered, and the call is the name of the attempt.
#
# Answers to a rank 0 that is dead have no effect, until a new rank 0 calls. If ranks of an earlier
# attempt still run, on a node that has not noticed the failure, the others wait: these ranks fail
# at their next collective, and torchrun restarts them.

INIT_METHOD = "attempt://"  # "env://", safe against restarts by torchrun

CALL_SECONDS = 5.0  # in which all ranks must answer a call
LONGEST_PAUSE = 0.25  # seconds between two requests to the store; the first pauses are shorter

# Timeouts that a rank waits for the others: one to notice an earlier failure, one to restart.
PATIENCE = 2

# Key with which a rank whose NCCL collective failed makes all others dump their traces and abort.
# ProcessGroupNCCL writes it into the store itself, past all prefixes.
DUMP_SIGNAL = "exception_dump"


def default_mesh() -> DeviceMesh:
    """Return a one-axis mesh over all ranks, on the accelerator if there is one, else the CPU.

    Raises:
        RuntimeError: if there is no process group, and torchrun has not started the program.
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise RuntimeError(
            "fully_shard needs torch.distributed: start the program with torchrun, or call"
            " torch.distributed.init_process_group first"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu"
    if accelerator is not None:
        device_type = accelerator.type
    if not dist.is_initialized():
        dist.init_process_group(init_method=INIT_METHOD)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def agree_on_attempt(
    store: Store,
    rank: int,
    world_size: int,
    patience: timedelta,
) -> str:
    """Agree on a name for this attempt, which no earlier one has had.

    Args:
        store: that of torchrun's agent, which all attempts share.
        rank: this rank.
        world_size: the number of ranks.
        patience: the longest wait for other ranks.

    Raises:
        TimeoutError: if some of them have not started in this time.
    """
    attempts = PrefixStore("attempts", store)
    ticket = str(attempts.add("tickets", 1))
    deadline = time.monotonic() + patience.total_seconds()
    if rank != 0:
        return _answer(attempts, rank, ticket, deadline)
    call = _call(attempts, world_size, ticket, deadline)
    store.delete_key(DUMP_SIGNAL)  # nobody of an earlier attempt is left to write it again
    for other in range(1, world_size):
        attempts.set(f"admitted/{attempts.get(f'{call}/{other}').decode()}", call)
    return call


def _call(
    attempts: Store,
    world_size: int,
    ticket: str,
    deadline: float,
) -> str:
    """Call until all ranks have answered the same call, and return it."""
    for number in itertools.count():
        call = f"{ticket}.{number}"
        answers = [f"{call}/{rank}" for rank in range(1, world_size)]
        attempts.set("call", call)
        for _ in _pauses(time.monotonic() + CALL_SECONDS):
            if not answers or attempts.check(answers):
                return call
        if time.monotonic() > deadline:
            break
    missing = []
    for rank, answer in enumerate(answers, 1):
        if not attempts.check([answer]):
            missing.append(str(rank))
    raise TimeoutError(
        f"rank 0 has waited in vain for other ranks to start: {', '.join(missing)} of {world_size}."
        " See the logs of these ranks"
    )


def _answer(
    attempts: Store,
    rank: int,
    ticket: str,
    deadline: float,
) -> str:
    """Answer calls until one admits this rank; return it."""
    answered = b""
    for _ in _pauses(deadline):
        if attempts.check([f"admitted/{ticket}"]):
            return str(attempts.get(f"admitted/{ticket}").decode())
        if attempts.check(["call"]):
            call = attempts.get("call")
            if call != answered:
                attempts.set(f"{call.decode()}/{rank}", ticket)
                answered = call
    raise TimeoutError(f"rank {rank} has waited in vain for rank 0, or for ranks that it waits for")


def _pauses(deadline: float) -> Iterator[None]:
    """Yield at once and after each pause, until the deadline has passed."""
    # Store.wait with a timeout would do without pauses, but writes a warning for each timeout.
    pause = 0.01
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
        yield


def _rendezvous(
    url: str,
    timeout: timedelta,
    **options: Any,
) -> Iterator[tuple[Store, int, int]]:
    """Yield the store of this attempt, this rank and the number of ranks."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = agree_on_attempt(store, rank, world_size, PATIENCE * timeout)
        store = PrefixStore(f"attempt_{attempt}", store)
    yield store, rank, world_size


register_rendezvous_handler(INIT_METHOD.removesuffix("://"), _rendezvous)

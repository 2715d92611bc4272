# SPDX-License-Identifier: Apache-2.0
"""Memory slots that are registered with NCCL: on the model of a device, by the rules of pools."""

from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.backends.memory_slots import allocate_slots
from megatron.mcore_adapter import cpu
from megatron.pretrain import ranks as program
from megatron.pretrain.arguments import parse_arguments
from tests.support.cuda_model.adapter_runs import RUNS
from tests.support.cuda_model.machine import cuda_model
from tests.support.cuda_model.pools import ModelBackend
from tests.support.cuda_model.reports import NCCL_RULE, ORDER, POOL
from tests.support.cuda_model.scenarios import stack_on, step
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.reference import Ranks
from tests.support.pretrain import training_runs

CPU = torch.device("cpu")


def pool_of(num_bytes: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Return the backend of all ranks, which have a communicator, a pool, and memory from it."""
    dist.all_reduce(torch.ones(1))
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(CPU)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = allocate_slots(CPU, [num_bytes])
    return backend, pool, memory


def registered_for_a_while() -> None:
    backend, pool, memory = pool_of(8)
    backend.register_mem_pool(pool, symm=True)
    dist.all_reduce(memory[0])
    backend.deregister_mem_pool(pool)
    memory[0].untyped_storage().resize_(0)
    dist.destroy_process_group()


def registered_without_a_communicator() -> None:
    _, pool, _memory = pool_of(8)
    group: Any = dist.new_group()
    group._get_backend(CPU).register_mem_pool(pool)
    group._get_backend(CPU).deregister_mem_pool(pool)


def registered_twice() -> None:
    backend, pool, _memory = pool_of(8)
    backend.register_mem_pool(pool)
    backend.register_mem_pool(pool)
    backend.deregister_mem_pool(pool)


def registered_before_it_has_memory() -> None:
    backend, _, _ = pool_of(8)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool)
    backend.deregister_mem_pool(pool)


def freed_while_registered() -> None:
    backend, pool, memory = pool_of(8)
    backend.register_mem_pool(pool)
    memory.clear()
    backend.deregister_mem_pool(pool)


def dropped_while_registered() -> None:
    backend, pool, _memory = pool_of(8)
    backend.register_mem_pool(pool)
    del pool


def destroyed_while_registered() -> None:
    backend, pool, _memory = pool_of(8)
    backend.register_mem_pool(pool)
    dist.destroy_process_group()
    backend.deregister_mem_pool(pool)


def windows_of_other_sizes() -> None:
    backend, pool, _memory = pool_of(8 + dist.get_rank())
    backend.register_mem_pool(pool, symm=True)
    backend.deregister_mem_pool(pool)


def local_memory_of_other_sizes() -> None:
    backend, pool, _memory = pool_of(8 + dist.get_rank())
    backend.register_mem_pool(pool)
    backend.deregister_mem_pool(pool)


def sent_over_another_group() -> None:
    backend, pool, memory = pool_of(8)
    backend.register_mem_pool(pool)
    dist.all_reduce(memory[0], group=dist.new_group())
    backend.deregister_mem_pool(pool)


PROGRAMS: dict[Callable[[], None], set[str]] = {
    registered_for_a_while: set(),
    local_memory_of_other_sizes: set(),
    registered_without_a_communicator: {POOL},
    registered_twice: {POOL},
    registered_before_it_has_memory: {POOL},
    freed_while_registered: {POOL},
    dropped_while_registered: {POOL},
    destroyed_while_registered: {POOL},
    windows_of_other_sizes: {ORDER},
    sent_over_another_group: {NCCL_RULE},
}


def reported() -> list[set[str]]:
    kinds = []
    for each in PROGRAMS:
        with cuda_model() as model:
            each()
        kinds.append({report.kind for report in model.reports})
    return kinds


def test_the_rules_of_memory_pools(ranks: Ranks) -> None:
    for kinds in ranks(2, reported):
        assert dict(zip(PROGRAMS, kinds)) == PROGRAMS


# ---- trainings

REGISTERED = {"nccl_ub": True}
BY_HAND = {**REGISTERED, "fsdp_manual_registration": True}
LOCAL = {**REGISTERED, "disable_symmetric_registration": True}


def trained(level: int, has_windows: bool, settings: dict[str, bool]) -> list[torch.Tensor]:
    """Train on the model, of which nothing is reported; return the weights."""
    with cuda_model() as machine, patch.object(ModelBackend, "has_windows", has_windows):
        model, optimizer = stack_on(level, Meshes(), **settings)
        for number in range(4):
            step(model, optimizer, number)
            before = sum(map(len, machine.nccl.calls.values()))
            model.manual_buffer_registration()
            num_collectives = sum(map(len, machine.nccl.calls.values())) - before
            assert (num_collectives > 0) == (settings == BY_HAND and number == 0)
        pools = {id(pool) for pool in machine.pools.alive if pool.groups}
        calls = list(chain.from_iterable(machine.nccl.calls.values()))
        with patch.object(program.parallel_state, "destroy_model_parallel"):
            program.stop()
    assert not machine.reports, "\n".join(map(str, machine.reports))
    assert bool(pools) == bool(settings)
    are_windows = bool(settings) and has_windows and settings != LOCAL
    assert any(call.startswith("windows of") for call in calls) == are_windows
    return [parameter.to_local().clone() for parameter in model.parameters()]


def train_in_all_ways(level: int) -> None:
    """Compare the weights of training with registered slots with those of training without."""
    expected = trained(level, True, {})
    ways = [(True, REGISTERED), (True, BY_HAND), (True, LOCAL), (False, REGISTERED)]
    for has_windows, settings in [*ways, (False, BY_HAND)]:
        weights = trained(level, has_windows, settings)
        assert all(map(torch.equal, weights, expected)) and len(weights) == len(expected)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_registered_slots_train_with_the_bits_of_a_run_without(ranks: Ranks, level: int) -> None:
    ranks(2, train_in_all_ways, level)


def pretrain_registered(is_registered: bool) -> tuple[list[float], int, list[str]]:
    """Run the training program; return losses, the number of its windows, and reports."""

    def parse(*args: Any, **kwargs: Any) -> Any:  # --use-nccl-ub needs GPUs
        found, notes = parse_arguments(*args, **kwargs)
        found.nccl_ub = found.fsdp_double_buffer = found.fsdp_manual_registration = True
        return found, notes

    cpu.install()
    parser = parse if is_registered else parse_arguments
    with cuda_model() as model, patch.object(training_runs, "parse_arguments", parser):
        record, _ = training_runs.pretrain_with(RUNS["level3"].ours)
    calls = chain.from_iterable(model.nccl.calls.values())
    num_windows = sum(each.startswith("windows of") for each in calls)
    return [each["lm loss"] for each in record.steps], num_windows, list(map(str, model.reports))


def test_pretrain_registers_slots_after_the_first_step(ranks: Ranks) -> None:
    losses, *_ = ranks(2, pretrain_registered, False)[0]
    for registered, num_windows, reports in ranks(2, pretrain_registered, True):
        assert not reports, "\n".join(reports)
        assert registered == losses and num_windows > 0

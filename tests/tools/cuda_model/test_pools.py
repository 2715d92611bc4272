# SPDX-License-Identifier: Apache-2.0
"""The model keeps the rules of memory pools and their registration with groups."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.fsdp.reference import Ranks
from tools.cuda_model import cuda_model
from tools.cuda_model.reports import NCCL_RULE, ORDER, POOL

CPU = torch.device("cpu")


def pool_of(num_bytes: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Return the backend of all ranks, which have a communicator, a pool, and memory from it."""
    dist.all_reduce(torch.ones(1))
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(CPU)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(pool):
        memory = [torch.empty(num_bytes, dtype=torch.uint8)]
    return backend, pool, memory


def allocated_in_a_pool(empties_cache: bool) -> None:
    freed, kept = torch.ones(8), torch.ones(8)
    del freed
    if empties_cache:
        torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        kept.add(1)


def allocated_with_an_empty_cache() -> None:
    allocated_in_a_pool(empties_cache=True)


def allocated_while_memory_is_cached() -> None:
    allocated_in_a_pool(empties_cache=False)


def registered_for_a_while() -> None:
    backend, pool, memory = pool_of(8)
    backend.register_mem_pool(pool, symm=True)
    dist.all_reduce(memory[0])
    backend.deregister_mem_pool(pool)
    memory[0].untyped_storage().resize_(0)
    dist.destroy_process_group()


def test_collectives_in_registered_memory_are_counted(ranks: Ranks) -> None:
    assert ranks(2, collectives_in_registered_memory) == [1, 1]


def collectives_in_registered_memory() -> int:
    with cuda_model(compares_order=False) as model:
        backend, pool, memory = pool_of(8)
        dist.all_reduce(memory[0])  # not registered yet
        backend.register_mem_pool(pool)
        dist.all_reduce(memory[0])
        backend.deregister_mem_pool(pool)
    return model.nccl.num_registered


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
    allocated_with_an_empty_cache: set(),
    allocated_while_memory_is_cached: {POOL},
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

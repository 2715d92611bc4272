# SPDX-License-Identifier: Apache-2.0
"""The deliberate defects, each in a function of the library, and the scenario that shows it."""

from __future__ import annotations

from benchmarks.stream_defects.calls_under_way import CALLS_UNDER_WAY
from benchmarks.stream_defects.edits import (
    DONE,
    ENDS,
    GRADIENTS,
    GROUP,
    LAUNCH,
    PENDING,
    POOLS,
    RUNS,
    SIDE,
    SLOTS,
    STARTS,
    SUM,
    UNGUARDED,
    WAITS,
    defect,
)
from benchmarks.stream_defects.groups_table import GROUPS
from benchmarks.stream_defects.host_table import HOST_DEFECTS
from tools.cuda_model.reports import (
    EARLY_RELEASE,
    HOST_READ,
    NCCL_RULE,
    ORDER,
    POOL,
    RACE,
    RELEASED,
    UNAWAITED,
)

DEFECTS = [
    # ---- the start of a collective
    defect("collectives overtake compute", "level3", {LAUNCH: [(STARTS, "pass")]}),
    defect(
        "gathers overtake the step, and the cast of main weights",
        "level1 bf16",
        {LAUNCH: [(STARTS, f'stream_name == "gather" or {STARTS}')]},
    ),
    defect(
        "reductions overtake the gradients",
        "level2",
        {LAUNCH: [(STARTS, f'stream_name == "reduce" or {STARTS}')]},
    ),
    defect(
        "a stream waits for itself", "level3", {LAUNCH: [(STARTS, "stream.wait_stream(stream)")]}
    ),
    defect(
        "collectives wait for each other only",
        "level3",
        {LAUNCH: [(STARTS, "[stream.wait_stream(other) for other in self._streams.values()]")]},
    ),
    defect(
        "compute waits for collectives before they start",
        "level3",
        {LAUNCH: [(STARTS, "torch.cuda.current_stream(self._device).wait_stream(stream)")]},
    ),
    # ---- the end of a collective
    defect("compute never waits", "level3", {LAUNCH: [(ENDS, "lambda: None")]}),
    defect(
        "the collectives' stream waits for itself",
        "level3",
        {LAUNCH: [(ENDS, "lambda: stream.wait_event(done)")]},
    ),
    defect(
        "the event comes before the collectives",
        "level3",
        {LAUNCH: [(RUNS, f"{DONE}\n    {RUNS}"), (f"{DONE}\n    return", "    pass\n    return")]},
    ),
    defect(
        "the event was never recorded",
        "level3",
        {LAUNCH: [(DONE, "    done = torch.cuda.Event()")]},
    ),
    defect(
        "the event is of the compute stream",
        "level3",
        {LAUNCH: [(DONE, "done = torch.cuda.default_stream(self._device).record_event()")]},
    ),
    defect(
        "the event comes before the second of two collectives",
        "hybrid sharded optimizer",
        {
            LAUNCH: [
                ("collective(False)", "done = stream.record_event(); collective(False)"),
                (f"\n    {DONE}\n", "\n"),
            ]
        },
    ),
    defect(
        "works on the collectives' stream are not awaited",
        "level3",
        {LAUNCH: [("collective(False)", "collective(True)")]},
        UNAWAITED,
        RACE,
    ),
    defect(
        "a wait counts as made before it is",
        "level3",
        {PENDING: [("if self._wait is None:", "if self._wait is None or not self.has_failed:")]},
    ),
    defect(
        "nobody waits in backward",
        "level3",
        {PENDING: [("if self._wait is None:", "if self._wait is None or in_backward():")]},
    ),
    # ---- weights
    defect(
        "a forward reads before the gather is over",
        "level3",
        {GROUP + "wait_for_unshard": [("self._all_gather.wait()", "pass")]},
    ),
    defect(
        "a unit waits for its first group only",
        "experts",
        {
            "engine.unit:Unit.wait_for_unshard": [
                (
                    "group.wait_for_unshard()",
                    "group.wait_for_unshard() if group is self.groups[0]"
                    " else group.guard.open(lambda: None)",
                )
            ]
        },
    ),
    defect(
        "a unit that is unused is freed while it is gathered",
        "unit_unused_in_some_steps",
        {GROUP + "reshard": [("self.wait_for_unshard()", "self._all_gather = None")]},
        EARLY_RELEASE,
    ),
    defect(
        "a forward reads weights that nobody has gathered",
        "level3",
        {"engine.schedule:Schedule.unshard_for": [("unit.unshard()", "pass")], **UNGUARDED},
        RELEASED,
    ),
    defect(
        "prefetched units are freed though they are in use",
        "level3",
        {
            **UNGUARDED,
            "engine.schedule:Prefetcher.prefetch": [
                ("if self._prefetched:", "if True:"),
                ("self._prefetched.difference(wanted)", "set(self._units)"),
            ],
            "engine.schedule:Prefetcher.reshard_if_unused": [
                ("if not unit.users:", "if True:"),
            ],
        },
        RELEASED,
    ),
    defect(
        "the gathered weights are allocated on another stream",
        "level3",
        {
            GROUP + "prepare_unshard": [
                ("self.compute.allocate()", SIDE + "self.compute.allocate()")
            ]
        },
    ),
    defect(
        "the cast of main weights races with the optimizer",
        "level3 bf16",
        {GROUP + "prepare_unshard": [("filled = self._cast()", SIDE + "filled = self._cast()")]},
    ),
    defect(
        "main weights are cast after the gather has started",
        "level1 bf16",
        {
            GROUP + "prepare_unshard": [("self._cast()", "Pending()")],
            GROUP + "begin_unshard": [("self._all_gather =", "self._cast(); self._all_gather =")],
        },
    ),
    defect(
        "the copy of main weights runs on another stream",
        "level1 bf16",
        {"engine.param_group:StoredForm.fill": [("shard.copy_", SIDE + "shard.copy_")]},
    ),
    defect(
        "the optimizer steps on another stream",
        "level3",
        {"optimizer.flat_update:run_step": [("step(optimizer)", SIDE + "step(optimizer)")]},
    ),
    # ---- storage
    defect(
        "storage is allocated on a stream of its own",
        "level3",
        {"engine.buffer:Storage.allocate": [("buffer.flat.unt", SIDE + "buffer.flat.unt")]},
    ),
    defect(
        "storage is resized before its gradients are reduced",
        "level2",
        {
            GRADIENTS + "_reduce_inner": [
                ("    yield\n", "    self._buffer.flat.untyped_storage().resize_(0)\n    yield\n")
            ]
        },
        EARLY_RELEASE,
    ),
    defect(
        "two buffers that are in use have one slot",
        "slots",
        {
            "backends.memory_slots:MemorySlots._slot_for": [(" and slot not in taken", "")],
            "backends.memory_slots:MemorySlots.blocker": [("buffer and", "buffer and False and")],
        },
    ),
    defect(
        "a slot is reused before its gradients are reduced",
        "slots",
        {
            GRADIENTS + "_reduce_inner": [
                ("    yield\n", "    self._storage.vacate(self._buffer)\n    yield\n")
            ],
            "engine.schedule:Schedule._reduce": [("self._advance_reductions()", "pass")],
        },
    ),
    defect(
        "views become stale when their buffer moves",
        "slots",
        {"engine.buffer:FlatBuffer.move": [("*self.views, ", "")]},
        RELEASED,
    ),
    defect(
        "slices become stale when their buffer moves",
        "slots bf16",
        {"engine.buffer:FlatBuffer.move": [(", *self._slices", "")]},
        RELEASED,
    ),
    defect(
        "a parameter keeps its old memory when the buffer moves",
        "slots",
        {"engine.buffer:FlatBuffer.move": [("if self._on_move is not None:", "if False:")]},
        RELEASED,
    ),
    # ---- gradients
    defect(
        "a reduced gradient is read before it is there",
        "level2 manual",
        {GRADIENTS + "_reduce_inner": [(WAITS, "pass")]},
    ),
    defect(
        "a gradient at level 0 is read before it is there",
        "level0",
        {GRADIENTS + "_reduce_whole": [(WAITS, "pass")]},
    ),
    defect(
        "a gradient over the outer axis is read before it is there",
        "hybrid level2",
        {GRADIENTS + "_reduce_over_outer": [(WAITS, "pass")]},
    ),
    defect(
        "the operand of a reduction is dropped too early",
        "level1 reduced in bf16",
        {GRADIENTS + "_reduce_inner": [("    yield\n", "    del full\n    yield\n")]},
        EARLY_RELEASE,
    ),
    defect(
        "local gradients are freed before they are reduced",
        "level3",
        {GRADIENTS + "_reduce_inner": [("    yield\n", "    self._drop_local()\n    yield\n")]},
        EARLY_RELEASE,
    ),
    defect(
        "a gradient is divided before it is reduced",
        "level2",
        {
            "engine.collectives:Communicator._divide": [
                (
                    "    def wait_and_divide",
                    "    result.div_(divisor)\n\n    def wait_and_divide",
                )
            ]
        },
    ),
    defect(
        "a gradient is divided without waiting",
        "level2",
        {"engine.collectives:Communicator._divide": [(WAITS, "pass")]},
    ),
    defect(
        "gradients are allocated on the wrong stream",
        "level1",
        {SUM + "tensor": [("self._total = self", SIDE + "self._total = self")]},
    ),
    defect(
        "the result of a reduction is allocated on the wrong stream",
        "level3 no_sync",
        {SUM + "buffer_for": [("return torch.empty", SIDE + "return torch.empty")]},
    ),
    defect(
        "gradients are added on another stream",
        "level3 no_sync",
        {"engine.buffer:ShardMemory.add": [("total.add_", SIDE + "total.add_")]},
    ),
    defect(
        "gradients are collected on another stream",
        "level2",
        {GRADIENTS + "accumulate": [("torch._foreach_copy_", SIDE + "torch._foreach_copy_")]},
    ),
    defect(
        "padding is zeroed on another stream",
        "level3",
        {
            GRADIENTS + "_open": [
                ("torch._foreach_zero_(self", SIDE + "torch._foreach_zero_(self"),
                ("self._local.flat.zero_()", SIDE + "self._local.flat.zero_()"),
            ]
        },
    ),
    defect(
        "gradients are scaled on another stream",
        "by hand level3",
        {GRADIENTS + "scale": [("total.mul_", SIDE + "total.mul_")]},
    ),
    *CALLS_UNDER_WAY,
    # ---- other collectives, and NCCL's rules
    defect(
        "a gather of several groups is not awaited",
        "frozen_in_part",
        {"engine.collectives:Transport.all_gather": [("async_ops=async_op", "async_ops=True")]},
        UNAWAITED,
        RACE,
    ),
    defect(
        "a norm is read before it is reduced",
        "level3",
        {"engine.collectives:all_reduce_over": [("group=group)", "group=group, async_op=True)")]},
        UNAWAITED,
        RACE,
    ),
    # The rank that sends frees too early, the other one reads too early.
    defect(
        "a broadcast is not awaited",
        "level3",
        {"engine.collectives:broadcast_over": [("group_src=0", "group_src=0, async_op=True")]},
        UNAWAITED,
    ),
    defect(
        "shards are read before they are there",
        "whole tensors level3",
        {
            "engine.collectives:all_gather_uneven": [
                (
                    "(gathered, padded, group=group)",
                    "(gathered, padded, group=group, async_op=True)",
                )
            ]
        },
        UNAWAITED,
        RACE,
    ),
    defect(
        "the host reads sizes without waiting",
        "whole tensors level3",
        {
            "engine.collectives:all_gather_uneven": [
                ("int(sizes.max())", "int(sizes.max().to('cpu', non_blocking=True))")
            ]
        },
        HOST_READ,
    ),
    defect(
        "a shard lies in another rank's slice",
        "level1",
        {GROUP + "_make_shards": [("partition.inner_rank, p", "1 - partition.inner_rank, p")]},
        NCCL_RULE,
    ),
    defect(
        "a strided tensor is broadcast",
        "level3",
        {
            "engine.collectives:broadcast_over": [
                ("tensor, group=", "tensor.new_empty(2, 3).t(), group=")
            ]
        },
        NCCL_RULE,
    ),
    # ---- memory pools
    defect(
        "slots are allocated outside of their pool",
        "registered level3",
        {POOLS + "allocate": [("with torch.cuda.use_mem_pool(pool):", "if True:")]},
        POOL,
    ),
    defect(
        "slots are registered with a group that has no communicator",
        "registered for all-gathers",
        {POOLS + "register": [("connect(self.groups, self._device)", "pass")]},
        POOL,
    ),
    defect(
        "slots are registered with the first group only",
        "registered for all-gathers",
        {POOLS + "register": [("in self._backends:", "in self._backends[:1]:")]},
        NCCL_RULE,
    ),
    defect(
        "windows that NCCL refused are registered again",
        "registered locally level3",
        {POOLS + "_register": [("_deregister([(backend, pool)])", "pass")]},
        POOL,
    ),
    defect(
        "ranks register windows of other sizes",
        "registered level3",
        {
            "backends.slot_memory:allocate_slots": [
                ("empty(size,", "empty(size + 8 * dist.get_rank(),")
            ]
        },
        ORDER,
    ),
    defect(
        "slots are copies of the memory in their pool",
        "registered level3",
        {SLOTS + "MemorySlots._allocate_memory": [("memory = tensor", "memory = tensor.clone()")]},
        POOL,
    ),
    defect(
        "a model is dropped with its slots registered",
        "registered and dropped level3",
        {POOLS + "__init__": [("weakref.finalize(self, _deregister, self._registered)", "pass")]},
        POOL,
    ),
    defect(
        "groups are destroyed with slots registered",
        "registered by hand level3",
        {"backends.slot_memory:deregister_all": [("_deregister(memory._registered)", "pass")]},
        POOL,
    ),
    *HOST_DEFECTS,
    *GROUPS,
]
"""All defects."""

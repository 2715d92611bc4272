# SPDX-License-Identifier: Apache-2.0
"""Deliberate defects of process groups: launches that wait for each other, backends, priorities."""

from __future__ import annotations

from benchmarks.stream_defects.edits import defect
from tools.cuda_model.reports import DEADLOCK, NCCL_RULE, ORDER, POOL

POOLS = "backends.slot_memory:NcclMemory."
OWNERS = "optimizer.matrix."
LAUNCHES_MESSAGES = "with _coalescing_manager(group, device, async_ops=True) as coalesced:"

GROUPS = [
    defect(
        "messages of owners are not one launch",
        "owners level1",
        {
            OWNERS + "exchange:Exchange._launch": [
                (LAUNCHES_MESSAGES, "coalesced = PeerMessages(group, _TAG)\n    if True:"),
                ("group.recv([tensor], rank, _TAG)", "coalesced.receive(tensor, rank)"),
                ("group.send([tensor], rank, _TAG)", "coalesced.send(tensor, rank)"),
            ]
        },
        DEADLOCK,
    ),
    defect(
        "a rank reduces units of equal sizes in another order",
        "by hand level1",
        {
            "engine.schedule:Schedule.reduce_pending": [
                (
                    "reversed(self.units)",
                    "self.units[1:][:: 2 * torch.distributed.get_rank() - 1] + self.units[:1]",
                )
            ]
        },
        ORDER,
    ),
    defect(
        "owners' ranks have gathered objects only",
        "objects by gloo, owners",
        {
            OWNERS + "matrix_parts:OwnerRanks.__init__": [
                ("connect([self.group], ", "len([self.group]) or (")
            ]
        },
        ORDER,
    ),
    defect(
        "some ranks split the communicator of all",
        "groups of some ranks level1",
        {"engine.collectives:local_group": [("world.bound_device_id = None\n", "pass\n")]},
        ORDER,
    ),
    defect(
        "streams have the priority of none of their groups",
        "high priority level3",
        {"engine.device:CudaStreams.serve": [("self._priority = -1", "self._priority = 0")]},
        NCCL_RULE,
    ),
    defect(
        "slots are registered with a group that has gathered objects only",
        "objects by gloo, registered",
        {
            POOLS + "register": [
                (
                    "connect(self.groups, self._device)",
                    "[dist.all_gather_object([None] * group.size(), 0, group)"
                    " for group in self.groups]",
                )
            ]
        },
        POOL,
    ),
    defect(
        "slots are allocated while torch's cache has memory that they need",
        "registered level3",
        {POOLS + "allocate": [("torch.cuda.empty_cache()", "pass")]},
        POOL,
    ),
]
"""Defects that show on several ranks, or with other settings of their groups."""

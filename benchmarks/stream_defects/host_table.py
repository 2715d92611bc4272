# SPDX-License-Identifier: Apache-2.0
"""The deliberate defects in copies between host and device, and in what the host waits for."""

from __future__ import annotations

from benchmarks.stream_defects.defect import Defect, Edit
from benchmarks.stream_defects.edits import BLOCKS, OFFLOADED, SIDE, SUM, defect
from tools.cuda_model.reports import EARLY_RELEASE, HOST_READ, HOST_WRITE, RACE

STAGING = "megatron.mcore_adapter.checkpoints.staging:"

HOST_DEFECTS = [
    # ---- blocks of offloaded weights
    defect(
        "offloaded blocks are updated before they are on the device",
        OFFLOADED,
        {BLOCKS + "run": [("current.pending.wait()", "pass")]},
    ),
    defect(
        "the copies of a block are freed before they are on the host",
        OFFLOADED,
        {BLOCKS + "_finish": [("if transfer is None:", "if True:")]},
        EARLY_RELEASE,
    ),
    # ---- what the host waits for
    defect(
        "the host gets gradients without waiting",
        "offloaded level3",
        {SUM + "total": [("self.memory.wait()", "pass")]},
        HOST_READ,
    ),
    defect(
        "the host scales gradients that are copied to it",
        "offloaded by hand level1",
        {SUM + "total": [("self.memory.wait()", "pass")]},
        HOST_WRITE,
    ),
    defect(
        "the host steps while weights are copied",
        "offloaded by hand level1",
        {"engine.param_group:ParamGroup.wait_for_readers": [("self.memory.wait()", "pass")]},
        HOST_WRITE,
    ),
    defect(
        "the host goes on before blocks are back",
        f"{OFFLOADED} from pageable memory",
        {BLOCKS + "run": [("memory.wait()", "pass")]},
        HOST_READ,
    ),
    defect(
        "the host waits for no copy at all",
        "offloaded level3",
        {"backends.host_memory:HostMemory.wait": [("self.streams.wait_on_host()", "pass")]},
        HOST_READ,
        HOST_WRITE,
    ),
    defect(
        "copies of a block are allocated on another stream",
        OFFLOADED,
        {BLOCKS + "_fetch": [("copies.append(", SIDE + "copies.append(")]},
    ),
    # ---- saves behind the next step
    Defect(
        "a save ends before its copies",
        "saved behind level3",
        (Edit(f"{STAGING}_copy", (("torch.cuda.current_stream().synchronize()", "pass"),)),),
        (RACE,),
    ),
    Defect(
        "copies of a save overtake the step",
        "saved behind level3",
        (Edit(f"{STAGING}_CopyingThread.__init__", (("self._stream.wait_stream", "id"),)),),
        (RACE,),
    ),
]

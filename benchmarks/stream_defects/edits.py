# SPDX-License-Identifier: Apache-2.0
"""Places and texts of the library that several defects have, and what makes a defect of them."""

from __future__ import annotations

from benchmarks.stream_defects.defect import Defect, Edit
from tools.cuda_model.reports import RACE

Changes = dict[str, list[tuple[str, str]]]


def defect(name: str, scenario: str, changes: Changes, *kinds: str) -> Defect:
    """Return a defect of the library; places are below `megatron.fsdp`."""
    edits = [Edit(f"megatron.fsdp.{place}", tuple(each)) for place, each in changes.items()]
    return Defect(name, scenario, tuple(edits), kinds or (RACE,))


SIDE = "with torch.cuda.stream(torch.cuda.Stream()): "
LAUNCH = "engine.device:CudaStreams.launch"
PENDING = "engine.device:Pending.wait"
GROUP = "engine.param_group:ParamGroup."
GRADIENTS = "engine.gradients:GroupGradients."
SLOTS = "backends.memory_slots:"
POOLS = "backends.slot_memory:NcclMemory."
SUM = "engine.buffer:RunningSum."
STARTS = "stream.wait_stream(torch.cuda.current_stream(self._device))"
ENDS = "lambda: torch.cuda.current_stream(self._device).wait_event(done)"
DONE = "    done = stream.record_event()"
RUNS = "    for collective in collectives:"
WAITS = "pending.wait()"
BLOCKS = "optimizer.block_update:BlockUpdate."
# The guard of weights raises before the model of CUDA sees that they are read.
UNGUARDED: Changes = {"engine.weight_guard:WeightGuard.close": [("self._saved is None", "False")]}
OFFLOADED = "offloaded, updated on the device"

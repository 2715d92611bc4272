# SPDX-License-Identifier: Apache-2.0
"""Defects that calls show while collectives are under way, on other streams, and in fp16."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.stream_defects.edits import (
    ENDS,
    GRADIENTS,
    GROUP,
    LAUNCH,
    SIDE,
    STARTS,
    defect,
)
from tools.cuda_model.reports import EARLY_RELEASE

CALLS_UNDER_WAY = [
    defect(
        "the stream that waits is that of the launch",
        "two streams level3",
        {
            LAUNCH: [
                (STARTS, f"launcher = torch.cuda.current_stream(self._device); {STARTS}"),
                (ENDS, "lambda: launcher.wait_event(done)"),
            ]
        },
    ),
    defect(
        "a whole gradient is added to while it is reduced",
        "hybrid level0 started between",
        {GRADIENTS + "accumulate": [("self.wait_for_reduce()", "pass")]},
    ),
    defect(
        "a gradient is scaled while it is reduced",
        "scaled while reduced level2",
        {GRADIENTS + "scale": [("self.wait_for_reduce()", "pass")]},
    ),
    defect(
        "a gradient is dropped while it is reduced",
        "dropped while reduced level2",
        {GRADIENTS + "drop_reduced": [("self.wait_for_reduce()", "pass")]},
        EARLY_RELEASE,
    ),
    defect(
        "kept weights are cast on another stream",
        "weights kept level3",
        {GROUP + "keep_compute_weights": [("self._fill(self", SIDE + "self._fill(self")]},
    ),
    defect(
        "fp16 is divided when its reduction has started",
        "fp16 level2",
        {
            "engine.collectives:Communicator._divide": [
                ("operand.div_(divisor)", "pass"),
                (
                    "if divides_first or",
                    "if divides_first:\n        operand.div_(divisor)\n    if divides_first or",
                ),
            ]
        },
    ),
    defect(
        "a slot is left before its gather is over",
        "slot left level3",
        {GROUP + "reshard": [("self.wait_for_unshard()", "self._all_gather = None")]},
    ),
    replace(  # ranks that own a matrix which is divided by rows receive into the matrix itself
        defect(
            "slices of a matrix are put together before they have arrived",
            "owners tp2 level3",
            {
                "optimizer.matrix.exchange:Exchange.start": [
                    ("work.wait()", "pass"),
                    ("after()", "after()\n        work.wait()"),
                ]
            },
        ),
        is_of_some_ranks=True,
    ),
]

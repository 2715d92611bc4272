# SPDX-License-Identifier: Apache-2.0
"""Features of the two training loops: rows of `loop_table.py` that compare FSDP with DDP."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from benchmarks.parity import real_loop
from benchmarks.parity.real_loop import (
    FP8_WEIGHTS,
    HYBRID_OPTIM,
    MLA,
    MODEL,
    MOE,
    OVERLAP,
    SP,
    TOLERANCE,
    VPP,
    short,
)
from benchmarks.soak.loop_runs import Found, run
from benchmarks.soak.loops import OWN, RELEASES, Loop
from tools.transformer_engine_on_cpu import BLACKWELL

FP4 = real_loop.ROWS["fp4"].layout


@dataclass(frozen=True)
class Feature:
    """One comparison of four steps with FSDP and with DDP.

    Attributes:
        title: of the row.
        ranks: number of ranks.
        layout: flags of both runs.
        fsdp: further flags of the run with --use-megatron-fsdp.
        measured: row of `real_loop.py` with the same comparison of Megatron-LM's loop.
        elsewhere: what shows it for our loop, if no run here can.
    """

    title: str
    ranks: int = 2
    layout: str = ""
    fsdp: str = ""
    measured: str = ""
    elsewhere: str = ""


EP = f"{MOE} --expert-model-parallel-size 2"
FEATURES = {
    "tp": Feature("tp", 4, "--tensor-model-parallel-size 2", measured="tp"),
    "sp": Feature("tp with sp", 4, SP, measured="tp-sp"),
    "pp": Feature("pp", 4, "--pipeline-model-parallel-size 2", measured="pp"),
    "vpp": Feature("vpp", 4, VPP, OVERLAP, "vpp"),
    "cp": Feature("cp", 4, "--context-parallel-size 2", measured="cp"),
    "ep": Feature("ep", 4, EP, measured="ep"),
    "mla": Feature("MLA", 4, f"{SP} {MLA}", measured="mla"),
    "mtp": Feature("MTP", 2, "--mtp-num-layers 1"),
    "recompute": Feature(
        "recompute",
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "fp8": Feature("FP8 weights", 2, FP8_WEIGHTS, measured="fp8"),
    "fp4": Feature("FP4 weights", 2, FP4, measured="fp4"),
    "slots": Feature("memory slots", 2, "", f"{OVERLAP} --fsdp-double-buffer", "double-buffer"),
    "hybrid": Feature("hybrid sharding", 4, "", HYBRID_OPTIM, "hybrid-optim"),
    "captured": Feature(
        "captured iterations", measured="captured", elsewhere="`test_captured_iterations.py`"
    ),
    "aware": Feature(
        "precision-aware state",
        measured="resume-precision-aware",
        elsewhere="`test_precision_aware.py`",
    ),
    "offload": Feature("offload", 2, "", "--optimizer-cpu-offload"),
    "muon": Feature("Muon", 2, "--optimizer muon", elsewhere="`test_muon.py`"),
    "1f1b": Feature(
        "1F1B overlap",
        2,
        f"{EP} --moe-token-dispatcher-type alltoall --bf16",
        "--overlap-moe-expert-parallel-comm",
        elsewhere="`test_overlapped_experts.py`",
    ),
}


def feature(name: str, loop: Loop) -> str:
    """Return the cell of a feature: differences to DDP, or what shows it, or why it is refused."""
    each = FEATURES[name]
    if loop.name == OWN and each.elsewhere:
        return each.elsewhere
    if loop.name != OWN and each.measured:
        known = _known_cells().get(each.measured, [""] * len(RELEASES))
        if cell := known[RELEASES.index(str(loop.release))]:
            return f"{cell} (`{each.measured}`)"
        if not each.layout and not each.fsdp:
            return f"not run: the row `{each.measured}` is of 0.19.2"
    line = f"{MODEL} {each.layout}"
    ddp = _reference(loop, each.ranks, line)
    found = _run(loop, each.ranks, f"{line} --use-megatron-fsdp {each.fsdp}")
    for one, what in ((found, ""), (ddp, "DDP: ")):
        if one.failed is not None:
            return f"refused: {what}{one.error.partition('error: ')[2] or one.error}"[:240]
    columns = []
    for column in (0, 1):
        pairs = [(found.steps[step][column], ddp.steps[step][column]) for step in ddp.steps]
        columns.append(max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs))
    cell = short(*columns)
    return cell if max(columns) <= TOLERANCE else f"fails: {cell}"


@functools.cache
def _reference(loop: Loop, ranks: int, line: str) -> Found:
    return _run(loop, ranks, line)


def _run(loop: Loop, ranks: int, line: str) -> Found:
    engine = BLACKWELL if "transformer_engine" in line else None
    is_emerging = "--optimizer muon" in line
    return run(loop, ranks, line, capability=engine, emerging_optimizers=is_emerging)


@functools.cache
def _known_cells() -> dict[str, list[str]]:
    """Return the cells of the table of `real_loop.py`, by row."""
    cells = {}
    for line in real_loop.RESULTS.read_text().splitlines():
        name, _, *columns = [*(each.strip() for each in line.strip("|").split("|")), "", ""]
        cells[name] = columns
    return cells

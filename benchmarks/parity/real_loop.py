# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own training loop with this project, against the same loop with its DDP.

    python -m benchmarks.parity.real_loop --release 0.19.2 [--rows zero2 ep] [--write]

Every row of `ROWS` runs `loop_pretrain_gpt.py` on CPU ranks, twice: with the flags of the
layout, and with those and `--use-megatron-fsdp`. Losses, also of evaluations, and gradient norms of
all steps have to agree to 1e-5. `--write` puts the differences into the table of results. With
`--on-model` rows with CUDA graphs run too, against the same run without graphs.
"""

import argparse
import functools
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fork_servers import Packages
from tests.support.megatron_release import RELEASES
from tests.support.rank_pool import run_apart
from tools.transformer_engine_on_cpu import BLACKWELL

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "real_loop.md"
TOLERANCE = 1e-5
TIMEOUT = 300.0

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 5e-3"
    " --min-lr 5e-4 --lr-decay-style cosine --lr-decay-iters 4 --train-iters 4 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 --eval-interval 1000"
    " --log-interval 1 --swiglu --disable-bias-linear --normalization RMSNorm"
    " --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0"
    " --attention-dropout 0 --num-workers 0"
)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-ffn-hidden-size 32"
MLA = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 16 --qk-head-dim 8"
    " --qk-pos-emb-head-dim 8 --v-head-dim 4 --rope-type rope"
)
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
HIDDEN = f"{OVERLAP} --overlap-moe-expert-parallel-comm"
"""The combined 1F1B schedule, in which experts communicate beside compute."""
HYBRID_OPTIM = "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"
AWARE = (
    "--bf16 --transformer-impl transformer_engine --use-distributed-optimizer"
    " --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8"
    " --tensor-model-parallel-size 2"
)
"""One data rank has whole parameters, so moments in fp8 have the scales of DDP."""
FP8 = "--bf16 --transformer-impl transformer_engine --fp8-format hybrid"
FP8_WEIGHTS = f"{FP8} --fp8-param-gather --use-distributed-optimizer"
GRAPHS = (
    "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
    " --no-check-for-nan-in-loss-and-grad"
)
EVALUATIONS = "--eval-iters 3 --eval-interval 2"
REPLAYS = (4 - 2) + (4 * 3 - 2)
"""Of the last steps, and of evaluations after the second and fourth step and two at the end."""
HYBRID_MODEL = f"--hybrid-layer-pattern *-*E {MOE}"


@dataclass(frozen=True)
class Row:
    """One comparison."""

    ranks: int
    layout: str = ""
    """Flags of both runs."""
    fsdp: str = ""
    """Further flags of the run with --use-megatron-fsdp."""
    since: str = RELEASES[0]
    """The first release that has the feature."""
    resumed_at: int | None = None
    """Save after this many steps, and compare the steps of a run that continues from there."""
    graphs: str = ""
    """Flags of the run with CUDA graphs, which is compared with the same run without them."""
    num_replays: int = 0
    """Replays of graphs that the last run has to make."""

    @property
    def with_engine(self) -> bool:
        """True for layers of Transformer Engine, whose kernels are emulated."""
        return "transformer_engine" in self.layout


ROWS = {
    "default": Row(2),
    "zero0": Row(2, fsdp="--data-parallel-sharding-strategy no_shard"),
    "zero1": Row(2, fsdp="--data-parallel-sharding-strategy optim"),
    "zero2": Row(2, fsdp="--data-parallel-sharding-strategy optim_grads"),
    "overlap": Row(2, fsdp=OVERLAP),
    "second-generation": Row(2, EVALUATIONS, f"{OVERLAP} --megatron-fsdp-version 2"),
    "evaluation": Row(2, "--eval-iters 1 --eval-interval 2", OVERLAP),
    "captured": Row(2, EVALUATIONS, OVERLAP, "0.19.2", graphs=GRAPHS, num_replays=REPLAYS),
    "captured-zero1": Row(
        *(2, f"{EVALUATIONS} --bf16", f"{OVERLAP} --data-parallel-sharding-strategy optim"),
        *("0.19.2", None, GRAPHS, REPLAYS),
    ),
    "double-buffer": Row(2, fsdp=f"{OVERLAP} --fsdp-double-buffer"),
    "hybrid": Row(4, fsdp="--num-distributed-optimizer-instances 2"),
    "hybrid-optim": Row(4, fsdp=HYBRID_OPTIM),
    "per-token": Row(2, "--calculate-per-token-loss"),
    "tp": Row(4, "--tensor-model-parallel-size 2"),
    "tp-sp": Row(4, SP),
    "pp": Row(4, "--pipeline-model-parallel-size 2"),
    "vpp": Row(4, VPP, OVERLAP),
    "cp": Row(4, "--context-parallel-size 2"),
    "mla": Row(4, f"{SP} {MLA}"),
    "bf16": Row(2, "--bf16"),
    "ep": Row(4, f"{MOE} --expert-model-parallel-size 2"),
    "offload": Row(2, fsdp="--optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    "ep-overlap": Row(4, f"{MOE} --expert-model-parallel-size 2 --bf16 {ALL_TO_ALL}", HIDDEN),
    "ep-tp": Row(4, f"{MOE} {SP} --expert-model-parallel-size 2"),
    "ep-zero2": Row(
        4,
        f"{MOE} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
        "--data-parallel-sharding-strategy optim_grads",
    ),
    "hybrid-model": Row(2, HYBRID_MODEL, since="0.19.2"),
    "fp8-compute": Row(2, FP8),
    "fp8": Row(2, FP8_WEIGHTS),
    "fp8-zero1": Row(2, FP8_WEIGHTS, "--data-parallel-sharding-strategy optim"),
    "fp8-tensorwise-bf16-ends": Row(
        2,
        f"{FP8_WEIGHTS} --fp8-recipe tensorwise --first-last-layers-bf16"
        " --num-layers-at-end-in-bf16 0",
    ),
    "fp8-blockwise-tp-sp": Row(4, f"{FP8_WEIGHTS} --fp8-recipe blockwise {SP}"),
    "fp8-mxfp8": Row(2, f"{FP8_WEIGHTS} --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag"),
    "fp8-pp": Row(4, f"{FP8_WEIGHTS} --pipeline-model-parallel-size 2"),
    "fp8-hybrid-optim": Row(4, FP8_WEIGHTS, HYBRID_OPTIM),
    "fp8-ep": Row(
        4,
        f"{FP8_WEIGHTS} {MOE} --expert-model-parallel-size 2 --moe-grouped-gemm"
        " --moe-token-dispatcher-type alltoall",
    ),
    "fp4": Row(
        2,
        "--bf16 --transformer-impl transformer_engine --fp4-format e2m1 --fp4-param-gather"
        " --use-distributed-optimizer",
    ),
    "resume-precision-aware": Row(2, AWARE, since="0.19.2", resumed_at=2),
    "resume": Row(2, resumed_at=2),
    "resume-double-buffer": Row(2, fsdp=f"{OVERLAP} --fsdp-double-buffer", resumed_at=2),
    "resume-bf16": Row(2, "--bf16", resumed_at=2),
    "resume-hybrid": Row(4, fsdp="--num-distributed-optimizer-instances 2", resumed_at=2),
    "resume-hybrid-optim": Row(4, fsdp=HYBRID_OPTIM, resumed_at=2),
    "resume-ep": Row(4, f"{MOE} --expert-model-parallel-size 2", resumed_at=2),
    "resume-vpp": Row(4, VPP, resumed_at=2),
    "resume-vpp-bf16": Row(
        4, f"{VPP} --bf16", f"{OVERLAP} --data-parallel-sharding-strategy optim", resumed_at=2
    ),
    "resume-tp-pp": Row(
        4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", resumed_at=2
    ),
    "resume-hybrid-model": Row(2, HYBRID_MODEL, since="0.19.2", resumed_at=2),
}


def compare(name: str, release: str, on_model: str | None = None) -> tuple[float, float] | str:
    """Run a row of `ROWS` on a release.

    Args:
        name: of the row.
        release: of Megatron-Core.
        on_model: see `loop_ranks.run`.

    Returns:
        The largest relative differences of losses and of gradient norms, or what failed.
    """
    row = ROWS[name]
    loop = ReleasedLoop(release, row.with_engine, row.ranks)
    ours = (*MODEL.split(), *row.layout.split(), "--use-megatron-fsdp", *row.fsdp.split())
    if row.graphs:
        results = [loop.run(ours, on_model)]
        ours = (*ours, *row.graphs.split())
    else:
        results = [reference(loop, row.layout)]
    if row.resumed_at is None:
        results.append(loop.run(ours, on_model))
    else:
        with tempfile.TemporaryDirectory() as folder:
            step = str(row.resumed_at)
            ours = (*ours, "--save", folder, "--save-interval", step)
            results.append(loop.run((*ours, "--exit-interval", step), on_model))
            results.append(loop.run((*ours, "--load", folder), on_model))
    return differences(results, row)


@dataclass(frozen=True)
class ReleasedLoop:
    """Megatron-LM's loop of a release, with layers of Transformer Engine or without."""

    release: str
    with_engine: bool
    ranks: int

    def run(self, flags: Sequence[str], on_model: str | None = None) -> dict[str, Any]:
        """Return what `loop_ranks.run` does."""
        packages = Packages(self.release, BLACKWELL if self.with_engine else None)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (self.ranks, flags, Path(folder), on_model)
            return run_apart(_run, *arguments, packages=packages, timeout=TIMEOUT)


@functools.cache
def reference(loop: ReleasedLoop, layout: str) -> dict[str, Any]:
    """Return the run with DDP, once for all rows that have it."""
    return loop.run((*MODEL.split(), *layout.split()))


def _run(*arguments: Any) -> dict[str, Any]:
    """Job: import the loop, which no test process may do, and run it."""
    from benchmarks.parity import loop_ranks

    return loop_ranks.run(*arguments)


def differences(results: Sequence[dict[str, Any]], row: Row) -> tuple[float, float] | str:
    """Return the largest relative differences of losses and norms of the last run to the first.

    The last run has to have all steps after the one at which it resumes, and no others.
    """
    first = row.resumed_at or 0
    errors = [result["error"] for result in results if result["error"]]
    if errors:
        return str(errors[0])
    expected = {step[0]: step[1:] for step in results[0]["steps"] if step[0] > first}
    found = {step[0]: step[1:] for step in results[-1]["steps"]}
    if not found or found.keys() != expected.keys():
        return f"steps {sorted(found)} instead of {sorted(expected)}"
    if row.num_replays and results[-1]["replays"] != [row.num_replays]:
        return f"{results[-1]['replays']} replays instead of {row.num_replays}"
    evaluations = zip(results[-1]["evaluations"], results[0]["evaluations"], strict=True)
    columns = []
    for column, others in enumerate((evaluations, ())):
        values = [(found[step][column], expected[step][column]) for step in found]
        values += others
        columns.append(max(abs(ours - theirs) / abs(theirs) for ours, theirs in values))
    return columns[0], columns[1]


def is_equal(result: tuple[float, float] | str) -> bool:
    return not isinstance(result, str) and all(
        math.isfinite(value) and value <= TOLERANCE for value in result
    )


def with_cells(table: str, release: str, results: Mapping[str, tuple[float, float] | str]) -> str:
    """Return the text of the table of results with the cells of a release, rows as in `ROWS`."""
    before, bar, rest = table.partition("| row |")
    lines = (bar + rest).splitlines()
    cells: dict[str, list[str]] = {}
    for line in lines[2:]:
        name, _, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        cells[name] = columns
    for name, result in results.items():
        columns = cells.setdefault(name, [""] * len(RELEASES))
        columns[RELEASES.index(release)] = "fails" if isinstance(result, str) else short(*result)
    for name, row in ROWS.items():
        columns = cells.get(name, [""] * len(RELEASES))
        cells[name] = [name, str(row.ranks), *columns]
    rows = [f"| {' | '.join(cells[name])} |" for name in ROWS]
    return before + "\n".join([*lines[:2], *rows]) + "\n"


def short(*differences: float) -> str:
    return " / ".join(f"{each:.1e}" if each else "0" for each in differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[-1])
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all of the release")
    parser.add_argument("--on-model", action="store_true", help="of a CUDA device")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    start = time.monotonic()
    found = [name for name, row in ROWS.items() if row.since <= args.release]
    rows = args.rows or [name for name in found if args.on_model or not ROWS[name].graphs]
    results = {name: compare(name, args.release, "" if args.on_model else None) for name in rows}
    print(f"megatron-core {args.release}, {time.monotonic() - start:.0f} s")
    print("| row | loss | gradient norm |\n|---|---|---|")
    for name, result in results.items():
        if isinstance(result, str):
            print(f"| {name} | {result} |")
        else:
            print(f"| {name} | {short(result[0])} | {short(result[1])} |")
    if args.write:
        RESULTS.write_text(with_cells(RESULTS.read_text(), args.release, results))
    sys.exit(not all(map(is_equal, results.values())))


if __name__ == "__main__":
    main()

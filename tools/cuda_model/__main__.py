# SPDX-License-Identifier: Apache-2.0
"""Run a training program on the model of a CUDA device, and print what it does out of order.

    python -m tools.cuda_model program.py [arguments]
    python -m tools.cuda_model -m package.program [arguments]
    torchrun --nproc_per_node 2 -m tools.cuda_model program.py [arguments]

The program may name the device "cuda" and the backend "nccl". The exit status is 1 if there is a
report, or if the program fails.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tools.cuda_model.machine import CudaModel, cuda_model


def main(words: list[str]) -> int:
    """Run the program that the command line names; return the exit status."""
    is_module = words[:1] == ["-m"]
    if len(words) <= is_module or words[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 2
    name, *arguments = words[is_module:]
    run: Callable[..., object] = runpy.run_module if is_module else runpy.run_path
    sys.argv[:] = [name, *arguments]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # what is compiled cannot be looked into
    sys.path[0] = "" if is_module else str(Path(name).resolve().parent)
    destroy, has_failed = dist.destroy_process_group, False
    with cuda_model(compares_order=False, names_cuda=True) as model:
        try:
            run(name, run_name="__main__")
        except SystemExit as end:
            has_failed = end.code not in (None, 0)
        except Exception:
            traceback.print_exc()
            has_failed = True
    if dist.is_initialized():
        if not has_failed:
            model.detector.launches.compare()
        destroy()
    print_reports(model)
    return int(has_failed or bool(model.reports))


def print_reports(model: CudaModel) -> None:
    """Print the reports of this rank."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    lines = [f"{rank}report {number}: {each}" for number, each in enumerate(model.reports, 1)]
    events, streams = model.detector.num_events, len(model.streams.names)
    lines.append(f"{rank}{len(model.reports)} reports of {events} kernels on {streams} streams")
    print("\n".join(lines), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

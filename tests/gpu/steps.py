# SPDX-License-Identifier: Apache-2.0
"""The steps of a first day on GPUs, which `tests/gpu/check.py` runs in this order."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True)
class Step:
    """A command of the table below.

    Attributes:
        name: also that of its file in the folder of logs.
        command: its words; `{ranks}`, `{folder}` and `{python}` are filled in.
        rehearsal: words that a rehearsal adds.
        cannot_rehearse: the reason why a rehearsal skips it, if it does.
        on_cpu: what a rehearsal runs instead of CUDA and NCCL.
        needs: modules and programs without which it is skipped.
        environment: variables of its own.
        figures: a pattern of the lines that the report quotes.
        files: what it writes into the folder.
        fault: the number of the suspected fault that it settles, if it does.
        limit: seconds after which it hangs, if that is less than the option says.
    """

    name: str
    command: str
    rehearsal: str = ""
    cannot_rehearse: str = ""
    on_cpu: str = "CPU ranks over gloo"
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    figures: str = r"passed|failed|Error"
    files: tuple[str, ...] = ()
    fault: int | None = None
    limit: float = inf


SUSPECTED = {
    1: "copies of offload overlap compute",
    2: "--optimizer-cpu-offload starts with NCCL",
    3: "user buffers are registered on a full GPU",
    4: "kernels of high-priority groups go first",
    5: "offload pins the bytes that it needs",
    6: "no rank has a context on another's GPU",
    7: "the host does not wait in clipping",
    8: "groups that sent objects alone are used",
    9: "some stages alone make groups",
    10: "main weights are not in use while gathered",
}
"""What is right, by the number of the suspected fault; measured by `tests/gpu/suspected.py`."""
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc_per_node {ranks}"
SMALL = " --layers 2 --hidden 64 --length 32 --batch 1"
LARGE = " --layers 12 --hidden 1024 --length 1024 --batch 4"
PRETRAIN = (
    " pretrain_gpt.py --use-megatron-fsdp --bf16 --mock-data --vocab-size 512 --num-layers 4"
    " --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
    " --global-batch-size {samples} --lr 1e-3 --train-iters 10 --log-interval 5 --eval-iters 0"
)
FEW_ITERATIONS = " --train-iters 2 --log-interval 1 --num-layers 1 --seq-length 32"
HANGING_SECONDS = 300.0
"""Time in which a measurement ends on any machine."""
NOT_MEASURED = "not measured: "
"""How a line begins that says why a measurement was not made."""


def measurement(fault: int) -> Step:
    """Return the step that settles a suspected fault."""
    name = f"fault {fault}, {SUSPECTED[fault]}"
    if fault == 2:
        command = TORCHRUN + PRETRAIN + " --optimizer-cpu-offload"
        return Step(
            name,
            command,
            rehearsal=FEW_ITERATIONS,
            needs=("megatron.core",),
            figures="lm loss",
            fault=fault,
            limit=HANGING_SECONDS,
        )
    # What memory is in use while gathers run is seen by torch's sanitizer.
    environment = {"TORCH_CUDA_SANITIZER": "1"} if fault == 10 else {}
    command = f"{TORCHRUN} -m tests.gpu.suspected {fault}"
    return Step(
        name,
        command,
        environment=environment,
        figures="^figure: ",
        fault=fault,
        limit=HANGING_SECONDS,
    )


STEPS = (
    Step(
        "driver",
        "nvidia-smi",
        cannot_rehearse="the model of a CUDA device has no driver",
        needs=("nvidia-smi",),
        figures=r"Driver Version|MiB",
    ),
    Step(
        "tests", "{python} -m pytest -q -m '' tests/gpu", needs=("pytest",), figures=r" in [\d.]+s"
    ),
    Step(
        "sanitizer",
        TORCHRUN + " -m tests.gpu.training --streams",
        rehearsal=" level3",
        on_cpu="the model of a CUDA device, over gloo",
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
    Step(
        "training loop",
        TORCHRUN + " examples/fully_shard_training_loop.py --checkpoints {folder}/checkpoints",
        rehearsal=" --steps 2",
        figures="loss",
        files=("checkpoints",),
    ),
    Step(
        "comparison with FSDP2",
        "{python} benchmarks/compare.py --ranks {ranks} --dtypes bfloat16 --variants plain" + LARGE,
        rehearsal=SMALL + " --rounds 1 --steps 1",
        figures=r"^\|",
    ),
    Step(
        "profiler trace and memory snapshot",
        TORCHRUN + " -m tests.gpu.profiled_step {folder}" + LARGE,
        rehearsal=SMALL,
        figures="^figure",
        files=("trace.json", "memory.pickle"),
    ),
    Step(
        "a step beside its plan",
        TORCHRUN + " -m tests.gpu.planned_step {folder}" + LARGE,
        rehearsal=SMALL + " --kind h100",
        needs=("megatron.core",),
        figures="^figure",
        files=("measured_run.jsonl",),
    ),
    Step(
        "Megatron-Core",
        TORCHRUN + PRETRAIN,
        rehearsal=FEW_ITERATIONS,
        needs=("megatron.core",),
        figures="lm loss",
    ),
    *map(measurement, SUSPECTED),
)

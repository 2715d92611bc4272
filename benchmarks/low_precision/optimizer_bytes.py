# SPDX-License-Identifier: Apache-2.0
"""Bytes a parameter of main weights, gradients and moments with the precision-aware optimizer.

    python -m benchmarks.low_precision.optimizer_bytes

Two CPU ranks at level 3, with Transformer Engine's kernels emulated in torch. Prints a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from tests.support.transformer_engine.ranks import ranks

FSDP = "--use-megatron-fsdp"
AWARE = f"{FSDP} --use-precision-aware-optimizer"
MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
FP8_MOMENTS = MOMENTS.replace("bf16", "fp8")
GRADIENTS = "--main-grads-dtype bf16"
ROWS = {
    "without the flag": FSDP,
    "without the flag, `--megatron-fsdp-main-grads-dtype bf16`": (
        f"{FSDP} --megatron-fsdp-main-grads-dtype bf16"
    ),
    "`--use-precision-aware-optimizer`": AWARE,
    "with `--main-params-dtype fp16`": f"{AWARE} --main-params-dtype fp16",
    f"with `{GRADIENTS}`": f"{AWARE} {GRADIENTS}",
    f"with `{MOMENTS}`": f"{AWARE} {MOMENTS}",
    f"with `{FP8_MOMENTS}`": f"{AWARE} {FP8_MOMENTS}",
    "with bf16 gradients and moments": f"{AWARE} {MOMENTS} {GRADIENTS}",
    "and `--megatron-fsdp-main-params-dtype auto`": (
        f"{AWARE} {MOMENTS} {GRADIENTS} --megatron-fsdp-main-params-dtype auto"
    ),
    "and fp8 moments instead": (
        f"{AWARE} {FP8_MOMENTS} {GRADIENTS} --megatron-fsdp-main-params-dtype auto"
    ),
}


def bytes_of_run(run: Any) -> tuple[int, int, int]:
    """Return the bytes on this rank of main weights, of gradients before a step, and of moments."""
    from megatron.mcore_adapter.precision_aware import gradient_of

    chunk = run.model[0]
    chunk.finish_grad_sync()
    state = run.optimizer.optimizer.state.values()
    parts: tuple[Iterable[Any], ...] = (
        chunk.parameters(),
        map(gradient_of, chunk.parameters()),
        chain.from_iterable(slots.values() for slots in state),
    )
    weights, gradients, moments = (sum(map(_nbytes, part)) for part in parts)
    return weights, gradients, moments


def _nbytes(dtensor: Any) -> int:
    local = dtensor._local_tensor
    return int(getattr(local, "_data", local).nbytes)  # fp8 tensors call themselves fp32


def measure(command_line: str) -> list[float]:
    """Job: bytes a parameter over all ranks."""
    import torch
    import torch.distributed as dist

    from tests.support.pretrain import training_runs

    run = training_runs.build(command_line)
    total = torch.tensor(bytes_of_run(run))
    dist.all_reduce(total)
    return (total / sum(each.numel() for each in run.model[0].parameters())).tolist()


def main() -> None:
    # Later: ranks import Transformer Engine before Megatron-Core.
    from tests.support.pretrain.training_runs import write_counting_corpus
    from tests.support.transformer_engine.training import LAYERS

    write_counting_corpus()
    print("| flags | main weights | gradients | moments | together |\n|---|---|---|---|---|")
    run = ranks(2)
    for name, flags in ROWS.items():
        parts = run(measure, f"{LAYERS} --hidden-size 256 {flags}")[0]
        cells = " | ".join(f"{number:.2f}" for number in (*parts, sum(parts)))
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

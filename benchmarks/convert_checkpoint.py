# SPDX-License-Identifier: Apache-2.0
"""Time and memory of conversions between checkpoint formats, compared with copying the files.

    OMP_NUM_THREADS=1 python benchmarks/convert_checkpoint.py [--gigabytes 8] [--ranks 2]

Makes a synthetic torch_dist checkpoint (a Llama of the given size in bf16 with fp32 main weights
and both moments), copies it with fsync, and converts it to fsdp_dtensor and back by the command
line, on one process and on --ranks of torchrun. Prints a table in Markdown: seconds, MB/s of input,
the time as a multiple of the copy, and the peak memory of the largest process. It needs about four
times the size on disk, and removes everything it wrote.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.core.key_rules import expected_shape
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.param_groups import for_any_optimizer
from megatron.checkpoint.core.spelling import choose_spelling
from megatron.checkpoint.core.training_state import OptimizerParamGroup, TrainingState
from megatron.checkpoint.store import directory
from megatron.checkpoint.torch_dist import checkpoint as torch_dist

INSPECTOR = Path(__file__).parents[1] / "tools" / "checkpoint" / "checkpoint_inspector.py"
BYTES_OF_PARAMETER = 14  # bf16 weight, fp32 main weight and two moments
TO_FSDP_DTENSOR = "convert-torch-dist-to-fsdp-dtensor"
TO_TORCH_DIST = "convert-fsdp-dtensor-to-torch-dist"
MODULES_OF_LAYER = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
)


def arguments(num_layers: int, hidden_size: int) -> argparse.Namespace:
    """Return a model whose layers, at 4096, have Llama-3-8B's attention and a narrower MLP."""
    return argparse.Namespace(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=2 * hidden_size,
        num_attention_heads=32,
        num_query_groups=8,
        group_query_attention=True,
        kv_channels=hidden_size // 32,
        swiglu=True,
        padded_vocab_size=8192,
        multi_latent_attention=False,
        transformer_impl="transformer_engine",
        params_dtype=torch.bfloat16,
        bf16=True,
        moe_layer_freq=1,
    )


def synthetic(gigabytes: float, hidden_size: int) -> TrainingState:
    """Return the state of a run whose torch_dist checkpoint has about this size."""
    per_layer = 17 * hidden_size**2 // 2  # 1 + 3 / 2 of attention, 3 * 2 of the MLP
    embeddings = 2 * 8192 * hidden_size
    num_layers = math.ceil((gigabytes * 1e9 / BYTES_OF_PARAMETER - embeddings) / per_layer)
    args = arguments(num_layers, hidden_size)
    modules = []
    for number in range(num_layers):
        modules += [f"decoder.layers.{number}.{module}" for module in MODULES_OF_LAYER]
    modules += ["embedding.word_embeddings", "decoder.final_layernorm", "output_layer"]
    names = [f"{module}.weight" for module in modules]
    shapes = {name: expected_shape(name, args) for name in names}
    state = TrainingState(
        {name: random_tensor(shapes[name], seed) for seed, name in enumerate(names)},
        args=args,
        iteration=1,
    )
    state.compute_dtype = dict.fromkeys(names, torch.bfloat16)
    state.moments = {
        name: {
            slot: random_tensor(shapes[name], -seed - offset)
            for offset, slot in enumerate(("exp_avg", "exp_avg_sq"))
        }
        for seed, name in enumerate(names)
    }
    fields = for_any_optimizer(
        {"is_expert_parallel": False, "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}, step=1.0
    )
    flat = {name for name in names if len(shapes[name]) == 1}
    state.groups = [
        OptimizerParamGroup(
            {**fields, "wd_mult": 1.0}, [name for name in names if name not in flat]
        ),
        OptimizerParamGroup({**fields, "wd_mult": 0.0}, sorted(flat)),
    ]
    return state


def random_tensor(shape: tuple[int, ...], seed: int) -> LazyTensor:
    """Return a tensor of numbers from 0 to 1, the same at every read."""

    def read_rows(start: int, stop: int) -> torch.Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed % 2**31))[start:stop]

    return LazyTensor(shape, torch.float32, read_rows)


def copy(source: Path, target: Path) -> None:
    """Copy a directory, and wait until the disk has it."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def inspector(ranks: int, *words: str | Path) -> None:
    """Run a command of the checkpoint tool on so many ranks."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    subprocess.run([*command, str(INSPECTOR), *map(str, words), "--quiet"], check=True)


def measured(action: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of an action, and the peak memory in MiB of its largest subprocess."""
    code = os.fork()
    if code == 0:  # a child of our own: the peak of its children is not that of earlier ones
        start = time.perf_counter()
        action()
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        Path(RESULT).write_text(f"{time.perf_counter() - start} {peak}")
        os._exit(0)
    _, status = os.waitpid(code, 0)
    if status:
        raise SystemExit("a conversion failed; its error stands above")
    seconds, peak = Path(RESULT).read_text().split()
    return float(seconds), float(peak)


RESULT = os.path.join(tempfile.gettempdir(), f"convert_checkpoint_{os.getpid()}")


@click.command(help=__doc__)
@click.option("--gigabytes", default=8.0, show_default=True)
@click.option("--hidden-size", default=4096, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where to work. Default: a temporary folder."
)
def main(gigabytes: float, hidden_size: int, ranks: int, folder: Path | None) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        state = synthetic(gigabytes, hidden_size)
        source = work / "torch_dist"
        conversion.convert(
            torch_dist.target(state, choose_spelling(state)),
            directory.new_checkpoint(source, 1),
            show_progress=False,
        )
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        largest = max(tensor.num_bytes for tensor in state.weights.values())
        print(
            f"{size / 1e9:.2f} GB, largest tensor {largest / 2**20:.0f} MiB,"
            f" {state.args.num_layers} layers"
        )
        print("\n| | seconds | MB/s | times the copy | peak memory of a process, MiB |")
        print("|---|---|---|---|---|")
        copied, _ = measured(partial(copy, source, work / "copy"))
        shutil.rmtree(work / "copy")
        print(f"| copy, fsync | {copied:.1f} | {size / copied / 1e6:.0f} | 1 | |", flush=True)
        for count in sorted({1, ranks}):
            there, back = work / f"fsdp_dtensor_{count}", work / f"back_{count}"
            print_row(TO_FSDP_DTENSOR, count, source, there, size, copied)
            print_row(TO_TORCH_DIST, count, there, back, size, copied)
            inspector(1, "diff", source, back)  # exit code 1, and so an error, if anything differs
            shutil.rmtree(there)
            shutil.rmtree(back)
        os.unlink(RESULT)


def print_row(
    command: str, ranks: int, source: Path, target: Path, size: int, copied: float
) -> None:
    """Convert, and print the row of the table.

    Args:
        command: of the checkpoint tool.
        ranks: processes that share the work.
        source: the checkpoint that is converted.
        target: the new checkpoint.
        size: bytes of the source.
        copied: seconds that a copy of the source took.
    """
    seconds, peak = measured(partial(inspector, ranks, command, source, target))
    title = command.removeprefix("convert-")
    print(
        f"| {title}, {ranks} rank{'s' * (ranks > 1)} | {seconds:.1f} | {size / seconds / 1e6:.0f}"
        f" | {seconds / copied:.2f} | {peak:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

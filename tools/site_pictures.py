# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the documentation from the code that they explain.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 tools/site_pictures.py docs/pictures

The layout and the memory are computed by the engine's own functions; the timeline is a trace of the
last of three steps on these ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click
import torch
import torch.distributed as dist
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.comparison.model import CausalLayer, Gpt, Workload, build
from benchmarks.trace_picture import draw
from megatron.fsdp import Strategy, trace
from megatron.fsdp.engine.layout import plan
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, ShardingStrategy
from megatron.pretrain.memory_estimate import AxisSizes, MemoryPlan, estimate_memory
from megatron_fsdp import fully_shard

PARTS = ("weights", "gradients", "optimizer_state", "gathered", "local_gradients")
"""Parts of a memory estimate, from the bottom of a bar to its top."""
RANKS = 64


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Draw all pictures; the first rank writes them."""
    dist.init_process_group("gloo")
    events = traced_step()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        draw_layout(folder / "layout.png")
        draw_memory(folder / "memory.png")
        draw(events, folder / "timeline.png", begin=0.0, end=None)
    dist.barrier()
    dist.destroy_process_group()


def draw_layout(path: Path, num_ranks: int = 4) -> None:
    """Draw the flat buffer of one transformer layer, with the shards of the ranks."""
    parameters = dict(CausalLayer(64).named_parameters())
    layout = plan([tuple(parameter.shape) for parameter in parameters.values()], num_ranks)
    figure, panel = one_panel(width=11, height=2.6)
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]  # of a list of colours
    for position, name, colour in zip(layout.positions, parameters, colours):
        panel.barh(
            0, position.numel, left=position.start, color=colour, edgecolor="black", label=name
        )
    for rank in range(num_ranks):
        begin = rank * layout.shard_size
        panel.axvline(begin, color="black", linewidth=2)
        panel.text(begin + layout.shard_size / 2, 0.5, f"rank {rank}", ha="center")
    panel.set_xlim(0, layout.numel)
    panel.set_ylim(-0.45, 0.7)
    panel.set_yticks([])
    panel.set_xlabel(f"elements of the flat buffer, {layout.numel} in all")
    figure.legend(loc="outside lower center", ncols=6, fontsize=7)
    figure.savefig(path)


def draw_memory(path: Path) -> None:
    """Draw the bytes of a rank at every level, for a model of 1.3 billion parameters."""
    with torch.device("meta"):
        model = Gpt(Workload(24, 2048, 2048, 1, 51200, "bfloat16", 1, False)).bfloat16()
    precision = MixedPrecisionPolicy(torch.float32, torch.float32, None)
    estimates = {
        f"{level.value}\n{level}": estimate_memory(
            model, MemoryPlan([CausalLayer], Strategy(level=level), precision, AxisSizes(RANKS))
        )
        for level in ShardingStrategy
    }
    figure, panel = one_panel(width=8, height=4)
    below = [0.0] * len(estimates)
    for part in PARTS:
        sizes = [getattr(estimate, part) / 2**30 for estimate in estimates.values()]
        panel.bar(list(estimates), sizes, bottom=below, label=part.replace("_", " "))
        below = [low + size for low, size in zip(below, sizes)]
    for number, total in enumerate(below):
        panel.text(number, total, f"{total:.1f}", ha="center", va="bottom")
    panel.set_ylabel(f"GiB on each of {RANKS} ranks")
    panel.legend()
    figure.savefig(path)


def one_panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one panel; sizes in inches."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def traced_step() -> list[list[dict[str, object]]]:
    """Train three steps at level 3 and return the events of the last one, of every rank."""
    workload = Workload(4, 256, 128, 2, 256, "float32", 1, False)
    gpt = build(workload, "cpu")
    adam = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    model, optimizer = fully_shard(gpt, adam, fsdp_unit_modules=[CausalLayer])
    tokens = torch.randint(workload.vocabulary, (workload.batch, workload.length))

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    with trace.record(folder[0]):
        step()
    dist.barrier()
    paths = sorted(Path(folder[0]).glob("rank*.json"), key=lambda path: int(path.stem[4:]))
    return [json.loads(path.read_text())["traceEvents"] for path in paths]


if __name__ == "__main__":
    main()

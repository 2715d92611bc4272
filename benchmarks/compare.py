# SPDX-License-Identifier: Apache-2.0
"""This engine at every level, FSDP2, DDP and Megatron-Core's DDP on the same GPT, side by side.

    python benchmarks/compare.py            the whole table, which takes about an hour
    python benchmarks/compare.py --ranks 2 --dtypes float32 --variants plain

Starts torchrun once per number of ranks, dtype and variant. In each run every round times one
wrapper after the other, so that a machine whose speed drifts treats all alike. Printed are medians
over the rounds; the ratio is the median of each round's ratio to FSDP2. Losses after the last step
must agree. With ``--output`` the table is also written as Markdown, JSON and PNG, after the worlds
that the folder has from earlier calls.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from itertools import chain
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from benchmarks.comparison.model import Workload
from benchmarks.comparison.wrappers import REFERENCE, WRAPPERS

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {"plain": (1, False), "accumulation": (4, False), "recomputation": (1, True)}
"""Microbatches per step, and whether activations are recomputed."""

COLUMNS = {
    "ms": ".0f",
    "time ratio": ".2f",
    "tokens/s": ".0f",
    "live MB": ".1f",
    "live ratio": ".2f",
    "resident MB": ".0f",
    "page faults": ".0f",
    "copied MB": ".1f",
    "collectives": ".0f",
    "wire MB": ".1f",
    "loss": ".4f",
}
"""Columns of the table, with their formats."""

Figures = dict[str, dict[str, float]]


def run(ranks: int, workload: Workload, wrappers: list[str], rounds: int, steps: int) -> Figures:
    """Run one world and return the figures of its first rank, by wrapper."""
    job = {"workload": asdict(workload), "wrappers": wrappers, "rounds": rounds, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "figures.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(ranks), "-m", "benchmarks.comparison.rank"),
            *(json.dumps(job), str(output)),
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"{ranks} ranks, {workload.label}: {done.stderr[-3000:]}")
        figures: Figures = json.loads(output.read_text())
    for each in figures.values():
        each["live ratio"] = each["live MB"] / figures.get(REFERENCE, each)["live MB"]
    return figures


def table(title: str, figures: Figures) -> str:
    """Return the figures of one world as a Markdown table."""
    lines = [
        f"### {title}",
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, values in figures.items():
        cells = [format(values[column], form) for column, form in COLUMNS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def plot(results: dict[str, Figures], path: Path) -> None:
    """Draw the ratios of time and memory to FSDP2, a group of bars for every world."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(4 + 2.5 * len(results), 7), sharex=True)
    names = list(dict.fromkeys(chain.from_iterable(results.values())))
    width = 0.8 / len(names)
    for axis, column in zip(axes, ("time ratio", "live ratio")):
        for number, name in enumerate(names):
            heights = [figures.get(name, {}).get(column, 0) for figures in results.values()]
            positions = [place + number * width for place in range(len(results))]
            axis.bar(positions, heights, width, label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel(f"{column.split()[0]} / {REFERENCE}")
    labels = [title.replace(", ", "\n") for title in results]
    axes[1].set_xticks([place + 0.4 for place in range(len(results))], labels, fontsize="small")
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=3)
    figure.savefig(path, dpi=120)


def description() -> str:
    """Return the machine, the software and the commit, in one paragraph."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (
        f"{date.today()}, commit {commit}, {os.cpu_count()} cores, {device}, torch"
        f" {torch.__version__}, Python {platform.python_version()}."
    )


def listed(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    """Split a list that is separated by commas."""
    return [each.strip() for each in value.split(",") if each.strip()]


@click.command()
@click.option("--ranks", default="1,2,4", show_default=True, callback=listed)
@click.option("--dtypes", default="float32,bfloat16", show_default=True, callback=listed)
@click.option("--variants", default=",".join(VARIANTS), show_default=True, callback=listed)
@click.option("--layers", default=8, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--length", default=256, show_default=True, help="tokens per sequence")
@click.option("--batch", default=1, show_default=True, help="sequences per rank and microbatch")
@click.option("--vocabulary", default=512, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="after one that does not count")
@click.option("--steps", default=2, show_default=True, help="per timing")
@click.option("--output", type=click.Path(path_type=Path), help="a folder, made or added to")
def main(
    ranks: list[str],
    dtypes: list[str],
    variants: list[str],
    layers: int,
    hidden: int,
    length: int,
    batch: int,
    vocabulary: int,
    rounds: int,
    steps: int,
    output: Path | None,
) -> None:
    """Compare all wrappers in every world, and print a table for each."""
    results = earlier_results(output)
    for dtype in dtypes:
        for variant in variants:
            microbatches, recompute = VARIANTS[variant]
            workload = Workload(
                layers, hidden, length, batch, vocabulary, dtype, microbatches, recompute
            )
            for number in ranks:
                title = f"{number} ranks, {workload.label}"
                results[title] = run(int(number), workload, list(WRAPPERS), rounds, steps)
                print(table(title, results[title]), flush=True)
                if output is not None:
                    write(results, output)


def earlier_results(folder: Path | None) -> dict[str, Figures]:
    """Return the worlds that a folder has from earlier calls."""
    if folder is None or not (folder / "compare.json").exists():
        return {}
    found: dict[str, Figures] = json.loads((folder / "compare.json").read_text())
    return found


def write(results: dict[str, Figures], folder: Path) -> None:
    """Write the worlds measured so far as Markdown, JSON and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = [table(title, figures) for title, figures in results.items()]
    page = f"# Comparison\n\n{description()}\n\n" + "\n".join(pages)
    (folder / "compare.md").write_text(page)
    (folder / "compare.json").write_text(json.dumps(results, indent=1))
    plot(results, folder / "compare.png")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Memory, steps, messages and failures of large models on 64 to 65,536 GPUs, on paper.

    OMP_NUM_THREADS=1 python benchmarks/scale.py [--no-worlds] [--no-simulation]

Writes ``scale.md`` with its pictures, and ``scale.tsv`` with all rows, to benchmarks/results. All
numbers are plans by the formulas of ``tools/plan.py``; the engine simulates some of them too.
``--no-worlds`` leaves out the output of ``benchmarks/world_size.py``, and ``--no-simulation`` the
engine's simulations: both take minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run directly, without installation
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # see pretrain_gpt.py
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from megatron.mcore_adapter.run.logging_setup import set_up_logging  # noqa: E402

set_up_logging()

from benchmarks.scaling import tables, words  # noqa: E402
from benchmarks.scaling.confirmed import measured_lines, simulated_lines  # noqa: E402
from benchmarks.scaling.models import MODELS  # noqa: E402
from benchmarks.scaling.pictures import (  # noqa: E402
    draw_goodput,
    draw_memory_of_gpus,
    draw_speed,
)
from benchmarks.scaling.strategies import NUMBERS, ScaleRow, sweep, with_rings  # noqa: E402
from benchmarks.scaling.summary import summary_lines  # noqa: E402
from megatron.planning.machine import MACHINES  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/scale.py"
WORLDS = ("8", "64", "512", "4096", "8192")
WIDTH = 130
"""Columns of a line of text."""

TREES = "trees"
RINGS = "rings"


@dataclass(frozen=True)
class ScaleResults:
    """Everything that the page shows.

    Attributes:
        sweeps: rows of all models, by machine and collectives.
        simulated: the table of points that the engine simulates.
        worlds: the table of the engine itself in large worlds.
    """

    sweeps: dict[tuple[str, str], list[ScaleRow]]
    simulated: list[str]
    worlds: list[str]


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=ROOT / "benchmarks/results",
    help="for the page and its pictures",
)
@click.option("--worlds/--no-worlds", default=True, show_default=True)
@click.option("--simulation/--no-simulation", default=True, show_default=True)
def main(folder: Path, worlds: bool, simulation: bool) -> None:
    """Write the page."""
    sweeps = all_sweeps()
    draw_speed(sweeps["h100", TREES], sweeps["h100", RINGS], folder / "scale_speed.png")
    draw_memory_of_gpus(sweeps["h100", TREES], folder / "scale_memory.png")
    draw_goodput(MACHINES["h100"], folder / "scale_goodput.png")
    results = ScaleResults(
        sweeps=sweeps,
        simulated=list(simulated_lines(MACHINES["h100"])) if simulation else [],
        worlds=list(world_lines()) if worlds else [],
    )
    (folder / "scale.tsv").write_text("\n".join([*tables.all_rows(sweeps), ""]))
    (folder / "scale.md").write_text("\n".join([*page(results), ""]))
    click.echo(f"the page is {folder / 'scale.md'}")


def all_sweeps() -> dict[tuple[str, str], list[ScaleRow]]:
    """Return the rows of all models, by machine and collectives."""
    sweeps: dict[tuple[str, str], list[ScaleRow]] = {}
    for name in ("h100", "gb200"):
        for collectives in (TREES, RINGS):
            machine = MACHINES[name]
            if collectives == RINGS:
                machine = with_rings(machine)
            rows: list[ScaleRow] = []
            for model in MODELS:
                rows += sweep(model, machine)
            sweeps[name, collectives] = rows
    return sweeps


def world_lines() -> Iterator[str]:
    """Yield the table of ``benchmarks/world_size.py``."""
    command = [sys.executable, str(ROOT / "benchmarks/world_size.py")]
    for number in WORLDS:
        command += ["--ranks", number]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    yield from done.stdout.splitlines()


def commit() -> str:
    """Return the commit of the code."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def page(results: ScaleResults) -> Iterator[str]:
    """Yield the lines of the page, which is Markdown."""
    yield "# Scale on paper"
    yield ""
    yield f"{date.today()}, code of commit {commit()}. Written by `{COMMAND}`."
    yield from wrapped(words.BEGINNING)
    items = summary_lines(results.sweeps["h100", TREES], results.sweeps["h100", RINGS])
    yield from wrapped("\n".join(items))
    yield from section("Models", words.OF_MODELS, tables.model_lines())
    yield from section("What can be checked", words.OF_CHECKS, measured_lines())
    yield from section("", words.OF_SIMULATION, results.simulated)
    trees = results.sweeps["h100", TREES]
    gb200 = results.sweeps["gb200", TREES]
    title = "Memory, step and messages on H100"
    yield from section(title, words.OF_SWEEP, tables.sweep_lines(trees))
    yield from section("On GB200", words.OF_GB200, tables.fastest_lines(gb200))
    by_title: dict[str, Sequence[ScaleRow]] = {}
    for (machine, collectives), rows in results.sweeps.items():
        by_title[f"{machine}, {collectives}"] = rows
    yield from section("Where each strategy stops", words.OF_STOPS, tables.stop_lines(by_title))
    yield from section("What hybrid sharding wins", words.OF_HYBRID, of_hybrid(results))
    yield from of_failures()
    yield from section("The engine itself in large worlds", words.OF_WORLDS, results.worlds)
    yield from section("Assumed", words.ASSUMED, [])


def of_hybrid(results: ScaleResults) -> Iterator[str]:
    """Yield the table of what hybrid sharding wins."""
    yield from tables.header("machine | model | plain", tables.of_numbers(NUMBERS[1:]))
    for machine in ("h100", "gb200"):
        trees = results.sweeps[machine, TREES]
        rings = results.sweeps[machine, RINGS]
        yield from tables.hybrid_lines(machine, trees, rings)


def of_failures() -> Iterator[str]:
    """Yield the section on failures."""
    machine = MACHINES["h100"]
    yield from section("What a failure costs", words.OF_FAILURES, tables.rate_lines())
    yield from section("", words.OF_GOODPUT, tables.failure_lines(machine))
    yield from section("", words.OF_PUBLISHED, tables.published_goodput_lines(machine))


def section(title: str, text: str, lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    """Yield a section of the page.

    Args:
        title: of the section; empty: it goes on.
        text: before the table.
        lines: of the table.
    """
    if title:
        yield f"## {title}"
        yield ""
    yield from wrapped(text)
    lines = list(lines)
    yield from lines
    if lines:
        yield ""


def wrapped(text: str) -> Iterator[str]:
    """Yield paragraphs and lists in lines of the page's width, with an empty line behind each."""
    for paragraph in text.split("\n\n"):
        for item in re.split(r"\n(?=- )", paragraph):
            indent = "  " if item.startswith("- ") else ""
            joined = " ".join(item.split())
            yield from textwrap.wrap(
                joined,
                WIDTH,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        yield ""


if __name__ == "__main__":
    main()

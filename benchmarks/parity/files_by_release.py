# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every release of Megatron-Core, loaded and converted under every other one.

    python -m benchmarks.parity.files_by_release                  every pair of releases
        --releases installed 0.19.2                                    pairs of these
        --models llama --write FILE                                    and as Markdown

Under each release Megatron-Core's DDP trains four steps, and checkpoints are written after two of
them: by DDP in torch_dist with both layouts of its optimizer, and by --use-megatron-fsdp in both
formats. Under each other release the files are loaded and converted, and steps three and four have
to be those of the DDP run that went on, within 1e-5 in fp32 and 2e-3 in bf16. The release
`installed` stands for the one of the virtual environment.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.megatron_release import RELEASES, obstacle
from tests.support.pretrain.parity import DEEPSEEK, GPT2, LLAMA, MTP, Combination
from tests.support.pretrain.release_runs import (
    INSTALLED,
    Convert,
    Record,
    Result,
    Task,
    Train,
    do_on,
)

STEPS, SAVED = 4, 2
DDP = "--use-distributed-optimizer"
RESHARDABLE = f"{DDP} --dist-ckpt-optim-fully-reshardable"
FSDP = "--use-megatron-fsdp"
TO_FSDP, TO_TORCH_DIST = "convert-torch-dist-to-fsdp-dtensor", "convert-fsdp-dtensor-to-torch-dist"

MODELS = {
    "llama": Combination(2, "dp", 3, LLAMA),
    "llama bf16": Combination(2, "dp", 3, f"{LLAMA} --bf16"),
    "gpt2": Combination(2, "pp2", 3, GPT2),
    "deepseek": Combination(2, "ep2", 3, f"{DEEPSEEK} {MTP}", layers=4),
}
"""Gated and plain layers, tied embeddings over two stages, experts, MLA, multi-token prediction."""

FILES = {
    "ddp": DDP,
    "reshardable": RESHARDABLE,
    "fsdp_dtensor": FSDP,
    "torch_dist": f"{FSDP} --ckpt-format torch_dist",
}
"""Name of a file -> flags of the run that writes it."""

REFERENCE = "ddp"
"""The file whose run goes on."""


@dataclass(frozen=True)
class Way:
    """A way to go on from a file.

    Args:
        file: one of `FILES`.
        convert: command that converts it first, under the release that goes on.
        flags: of the run that goes on.
    """

    file: str
    flags: str
    convert: str | None = None

    @property
    def name(self) -> str:
        writer = "FSDP" if FSDP in FILES[self.file] else "DDP"
        layouts = {
            "ddp": "torch_dist, buckets",
            "reshardable": "torch_dist, reshardable",
            "fsdp_dtensor": "fsdp_dtensor",
            "torch_dist": "torch_dist",
        }
        reader = "FSDP" if FSDP in self.flags else "DDP"
        steps = ["converted"] if self.convert else []
        return f"{writer}, {layouts[self.file]} -> {' -> '.join([*steps, reader])}"


WAYS = (
    Way("ddp", DDP),
    Way("reshardable", RESHARDABLE),
    Way("ddp", FSDP),
    Way("fsdp_dtensor", FSDP),
    Way("torch_dist", RESHARDABLE),
    Way("ddp", FSDP, TO_FSDP),
    Way("fsdp_dtensor", RESHARDABLE, TO_TORCH_DIST),
)


Plan = tuple[tuple[str, str, Way], list[Task]]
"""Writer, model and way, and the one or two tasks."""


def folder_of(root: Path, release: str, model: str, file: str) -> Path:
    """Return the folder of a file."""
    return root / release / model.replace(" ", "_") / file


def writes(root: Path, release: str, models: Iterable[str], files: Iterable[str]) -> Iterator[Task]:
    """Yield the runs that write the files of a release."""
    for model, file in itertools.product(models, files):
        combination = MODELS[model].with_few_microbatches()
        folder = folder_of(root, release, model, file)
        last = STEPS if file == REFERENCE else SAVED
        yield Train(
            combination.ranks,
            f"{combination.line} {FILES[file]} --train-iters {STEPS} --exit-interval {last}"
            f" --save {folder} --save-interval {SAVED}",
        )


def reads(
    root: Path, release: str, others: Iterable[str], models: Iterable[str], ways: Iterable[Way]
) -> Iterator[Plan]:
    """Yield what goes on under a release from the files of others."""
    for writer, model, way in itertools.product(others, models, ways):
        combination = MODELS[model].with_few_microbatches()
        source = folder_of(root, writer, model, way.file)
        tasks: list[Task] = []
        if way.convert is not None:
            name = f"{way.file}_converted_from_{writer}"
            target = folder_of(root, release, model, name)
            tasks.append(Convert(way.convert, source / f"iter_{SAVED:07d}", target))
            source = target
        line = (
            f"{combination.line} {way.flags} --train-iters {STEPS} --load {source} --ckpt-step"
            f" {SAVED}"
        )
        tasks.append(Train(combination.ranks, line))
        yield (writer, model, way), tasks


@dataclass(frozen=True)
class Outcome:
    """One way of one file under one release."""

    writer: str
    reader: str
    model: str
    way: Way
    difference: float
    """Largest relative difference of losses and gradient norms; infinite after a failure."""
    failure: str = ""

    @property
    def is_equal(self) -> bool:
        return self.difference <= (2e-3 if "bf16" in self.model else 1e-5)

    def __str__(self) -> str:
        head = "ok  " if self.is_equal else "BAD "
        return (
            f"{head} {self.writer} -> {self.reader}, {self.model}, {self.way.name}:"
            f" {self.difference:.1e} {self.failure}"
        )


def compare(
    releases: Sequence[str], models: Sequence[str], root: Path, ways: Sequence[Way] = WAYS
) -> Iterator[Outcome]:
    """Write files under every release, and go on from each under every other one.

    Args:
        releases: names of releases, :data:`INSTALLED` among them or not.
        models: names of `MODELS`.
        root: an empty folder.
        ways: some of `WAYS`.
    """
    references: dict[tuple[str, str], Result] = {}
    files = [name for name in FILES if name == REFERENCE or name in {way.file for way in ways}]
    for number, release in enumerate(releases):
        # Beside reads of files of those before it: ranks of a release are kept until the next one.
        tasks = [*writes(root, release, models, files)]
        plans = [*reads(root, release, releases[:number], models, ways)]
        results = do_on(release, [*tasks, *itertools.chain(*(own for _, own in plans))])
        for position, model in enumerate(models):
            own = results[position * len(files) : (position + 1) * len(files)]
            failures = [result for result in own if isinstance(result, str)]
            references[release, model] = failures[0] if failures else own[0]
        yield from outcomes_of(release, plans, results[len(tasks) :], references)
    for number, release in enumerate(releases[:-1]):
        plans = [*reads(root, release, releases[number + 1 :], models, ways)]
        results = do_on(release, [*itertools.chain(*(own for _, own in plans))])
        yield from outcomes_of(release, plans, results, references)


def outcomes_of(
    reader: str,
    plans: Sequence[Plan],
    results: Iterable[Result],
    references: Mapping[tuple[str, str], Result],
) -> Iterator[Outcome]:
    """Yield the outcome of each plan from the results of all their tasks."""
    remaining = iter(results)
    for (writer, model, way), tasks in plans:
        done = [next(remaining) for _ in tasks]
        yield outcome(writer, reader, model, way, done, references)


def outcome(
    writer: str,
    reader: str,
    model: str,
    way: Way,
    done: Sequence[Result],
    references: Mapping[tuple[str, str], Result],
) -> Outcome:
    """Compare the steps after a load with those of the run that had not stopped."""
    failures = [result for result in (references[writer, model], *done) if isinstance(result, str)]
    if failures:
        return Outcome(writer, reader, model, way, float("inf"), failures[0])
    expected, found = references[writer, model], done[-1]
    assert isinstance(expected, Record) and isinstance(found, Record)
    if found.column("iteration") != [*range(SAVED + 1, STEPS + 1)]:
        wrong = f"went on with steps {found.column('iteration')}"
        return Outcome(writer, reader, model, way, float("inf"), wrong)
    largest = 0.0
    for name in ("lm loss", "grad-norm"):
        for value, other in zip(found.column(name), expected.column(name)[SAVED:]):
            largest = max(largest, abs(value - other) / abs(other))
    return Outcome(writer, reader, model, way, largest)


def table_of(outcomes: Sequence[Outcome], releases: Sequence[str]) -> list[str]:
    """Return a table in Markdown: largest difference of each way under each release."""
    lines = [
        f"| file -> run | {' | '.join(releases)} |",
        "|---|" + "---|" * len(releases),
    ]
    for way in WAYS:
        cells = []
        for reader in releases:
            own = [each for each in outcomes if (each.way, each.reader) == (way, reader)]
            bad = sum(not each.is_equal for each in own)
            worst = max((each.difference for each in own), default=float("nan"))
            cells.append(f"{bad} of {len(own)} differ" if bad else f"{worst:.1e}")
        lines.append(f"| {way.name} | {' | '.join(cells)} |")
    return lines


def main(words: list[str]) -> int:
    """Print every way with its difference; 1 if any is too large, 2 without a release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = (INSTALLED, *RELEASES)
    parser.add_argument("--releases", nargs="+", choices=known, default=known)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--write", default=None, help="file for the table")
    args = parser.parse_args(words)
    for release in args.releases:
        reason = obstacle(release) if release != INSTALLED else None
        if reason is not None:
            print(reason, file=sys.stderr)
            return 2
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for each in compare(args.releases, args.models, Path(folder)):
            print(each, flush=True)
            outcomes.append(each)
    equal = sum(each.is_equal for each in outcomes)
    print(f"{equal} of {len(outcomes)} go on as the run that wrote the file")
    if args.write:
        Path(args.write).write_text("\n".join(table_of(outcomes, args.releases)) + "\n")
    return 0 if equal == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

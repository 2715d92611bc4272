# SPDX-License-Identifier: Apache-2.0
"""Published runs compared with their plans: the table, and the errors by source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from megatron.planning.published.plan_run import PlannedRun, plan_run
from megatron.planning.published.published_runs import PublishedRun
from megatron.planning.published.run_flags import NotExpressibleError


@dataclass(frozen=True)
class ComparedRun:
    """A published run, and its plan.

    Attributes:
        run: with what was measured.
        plan: with what is predicted.
    """

    run: PublishedRun
    plan: PlannedRun

    @property
    def ratio_of_seconds(self) -> float:
        """The predicted seconds of a step, in those that were measured."""
        return self.plan.seconds / self.run.seconds

    @property
    def ratio_of_memory(self) -> float | None:
        """The predicted memory, in that which was measured; None: it was not published."""
        if self.run.memory_gib is None:
            return None
        return self.plan.memory_gib / self.run.memory_gib

    @property
    def is_above_memory(self) -> bool:
        """True if the plan needs more memory than a GPU has."""
        return self.plan.memory_gib > self.plan.capacity_gib


class NotPlanned(NamedTuple):
    """A run that is not planned, and why."""

    run: PublishedRun
    reason: str


def compare(
    runs: Sequence[PublishedRun], plan: Callable[[PublishedRun], PlannedRun] = plan_run
) -> tuple[list[ComparedRun], list[NotPlanned]]:
    """Plan runs, and return those that were planned, and those that were not.

    Args:
        runs: published ones.
        plan: plans one of them, or raises NotExpressibleError.
    """
    compared: list[ComparedRun] = []
    left_out: list[NotPlanned] = []
    for run in runs:
        try:
            compared.append(ComparedRun(run, plan(run)))
        except NotExpressibleError as error:
            left_out.append(NotPlanned(run, str(error)))
    return compared, left_out


class Errors(NamedTuple):
    """The errors of several plans, as parts of what was measured."""

    number: int
    median: float
    ninetieth: float  # the 90th percentile
    middle: float  # the median of the predicted in the measured


def errors_of(ratios: Sequence[float]) -> Errors | None:
    """Return the errors of ratios of the predicted to the measured; None without any."""
    if not ratios:
        return None
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return Errors(
        number=len(errors),
        median=median(errors),
        ninetieth=percentile(errors, 0.9),
        middle=median(ratios),
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return a percentile of ordered numbers, between the two that are next to it."""
    last = len(ordered) - 1
    place = part * last
    low = int(place)
    high = min(low + 1, last)
    between = ordered[high] - ordered[low]
    return ordered[low] + (place - low) * between


HEADER = (
    "run                                        tokens/s/GPU    plan  error   TFLOP/s/GPU   MFU"
    "     GiB    plan  error  seconds by"
)


def table(compared: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield the lines of the table, by source."""
    yield HEADER
    source = ""
    for comparison in sorted(compared, key=lambda comparison: comparison.run.source):
        if comparison.run.source != source:
            source = comparison.run.source
            yield f"# {source}"
        yield _line(comparison)


def _line(comparison: ComparedRun) -> str:
    run = comparison.run
    plan = comparison.plan
    tokens = run.tokens_of_step / run["gpus"]
    measured = tokens / run.seconds
    planned = tokens / plan.seconds
    line = (
        f"{run.name:<42} {measured:>12,.0f} {planned:>7,.0f}"
        f" {comparison.ratio_of_seconds - 1:>+6.0%}"
        f" {plan.flops_per_second / 1e12:>13.0f} {plan.utilization:>5.1%}"
    )
    memory = comparison.ratio_of_memory
    if memory is None or run.memory_gib is None:
        line += f" {'':>7} {plan.memory_gib:>7.1f} {'':>6}"
    else:
        line += f" {run.memory_gib:>7.1f} {plan.memory_gib:>7.1f} {memory - 1:>+6.0%}"
    way = "formulas"
    if plan.is_simulated:
        way = "engine"
    return f"{line}  {way}"


def error_table(compared: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield lines with the errors of each source, and of all."""
    yield (
        "errors of the step: median, 90th percentile   of memory            runs  middle of"
        " plan/measured"
    )
    sources = sorted({comparison.run.source for comparison in compared})
    for source in sources:
        of_source = [comparison for comparison in compared if comparison.run.source == source]
        yield _errors_line(of_source, source)
    yield _errors_line(compared, "all")


def _errors_line(compared: Sequence[ComparedRun], title: str) -> str:
    ratios_of_memory: list[float] = []
    for comparison in compared:
        if comparison.ratio_of_memory is not None:
            ratios_of_memory.append(comparison.ratio_of_memory)
    seconds = errors_of([comparison.ratio_of_seconds for comparison in compared])
    memory = errors_of(ratios_of_memory)
    if seconds is None:
        return f"  {title}: none"
    of_memory = f"{'':>13}"
    if memory is not None:
        of_memory = f"{memory.median:>6.1%} {memory.ninetieth:>6.1%}"
    return (
        f"  {seconds.median:>6.1%} {seconds.ninetieth:>6.1%}   {of_memory}"
        f"   {seconds.number:>4}   {seconds.middle:>5.2f}   {title}"
    )

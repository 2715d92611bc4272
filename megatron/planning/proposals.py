# SPDX-License-Identifier: Apache-2.0
"""Proposals: what would make a model fit that fits with no settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron.planning.candidates import Choices
from megatron.planning.costs.update_bytes import CLIPPED
from megatron.planning.machine import Cluster
from megatron.planning.search import GIB, Prediction, estimates_of, model_arguments, search

CHANGES = (
    "--optimizer-cpu-offload",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--optimizer muon",
)
"""Flags that change what lies on the device, of which each is tried alone."""

QUANTIZED = {"AdamW8bit": 2.05, "AdamW4bit": 1.08}
"""Optimizers of torchao, and the bytes of their state for each parameter, as
``benchmarks/results/optimizer_memory.md`` has them; AdamW has 8."""


@dataclass(frozen=True)
class Proposal:
    """A change with which a model fits.

    Attributes:
        text: what it is, and what it costs.
        prediction: its settings; None if pretrain_gpt.py has no flags for it.
    """

    text: str
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Plan:
    """The arguments of a search."""

    words: list[str]
    args: argparse.Namespace
    num_gpus: int
    machine: Cluster
    memory_limit: float
    choices: Choices


def proposals(plan: Plan) -> Iterator[Proposal]:
    """Yield the changes with which the model of a plan fits, those of flags first."""
    for flags in CHANGES:
        found = _fastest(plan, flags.split(), plan.machine)
        if found is not None:
            yield Proposal(f"{flags}: {described(found)}", found)
    yield from _in_files(plan)
    yield from _quantized(plan)


def fixed(value: float, decimals: int) -> str:
    """Return a number with so many decimals, or two more where it would look like nothing."""
    if value < 10**-decimals:
        decimals += 2
    return f"{value:,.{decimals}f}"


def described(found: Prediction) -> str:
    """Return the memory and the time of a prediction."""
    text = f"{fixed(found.peak_bytes / GIB, 1)} GiB of each GPU, {fixed(found.seconds, 2)} s a step"
    return "; ".join([text, *costs_of_update(found)])


def costs_of_update(found: Prediction) -> Iterator[str]:
    """Yield what the update of the optimizer needs in addition to the device's memory."""
    machine = found.machine
    num_gpus = found.args.world_size
    if found.host_bytes:
        node = found.host_bytes * machine.ranks_of_node(num_gpus) / GIB
        copies = max(stage.copy_seconds for stage in found.stages)
        update = max(stage.update.host.update_seconds for stage in found.stages)
        yield (
            f"{fixed(node, 1)} GiB of each host; copies take {fixed(copies, 2)} s of a step, the"
            f" update there {fixed(update, 2)} s"
        )
    owners = [stage.update for stage in found.stages if stage.update.owners]
    if owners:
        slowest = max(owners, key=lambda update: update.seconds)
        yield (
            f"the update takes {fixed(slowest.seconds, 2)} s of a step, in which the owner with the"
            f" most work has {slowest.imbalance:.2f} times the mean"
        )


def _fastest(
    plan: Plan,
    flags: Sequence[str],
    machine: Cluster,
) -> Prediction | None:
    """Return the fastest settings with further flags, if the program takes them and they fit."""
    names = {word for word in flags if word.startswith("--")}
    if names & {word.split("=")[0] for word in plan.words}:
        return None
    if "--optimizer-cpu-offload" in names and machine.host is None:
        return None
    words = [*plan.words, *flags]
    args = model_arguments(words, [], plan.args.expert_imbalance)
    if args is None:
        return None
    found = search(
        words=words,
        args=args,
        num_gpus=plan.num_gpus,
        machine=machine,
        memory_limit=plan.memory_limit,
        choices=plan.choices,
        num_wanted=1,
        log=_log_nothing,
    )
    return found[0] if found else None


def _log_nothing(line: str) -> None:
    """Drop a line about a search."""


def _in_files(plan: Plan) -> Iterator[Proposal]:
    """Yield the proposal of state in files, for loops of the user's own."""
    machine = plan.machine
    if machine.host is None:
        return
    flags = ["--optimizer-cpu-offload", "--no-pin-cpu-grads"]
    endless = replace(machine, host=replace(machine.host, memory_bytes=inf))
    found = _fastest(plan, flags, endless)
    if found is None:
        return
    ranks = machine.ranks_of_node(plan.num_gpus)
    traffic = 0
    for stage in found.stages:
        of_files = CLIPPED * stage.update.host.num_elements
        traffic = max(traffic, ranks * (stage.copied_bytes + of_files))
    text = (
        "Memory(offload=folder), in a loop of your own:"
        f" {fixed(found.peak_bytes / GIB, 1)} GiB of each GPU and files of"
        f" {fixed(ranks * found.host_bytes / GIB, 1)} GiB on each node, of which"
        f" {fixed(traffic / GIB, 1)} GiB are read or written in a step"
    )
    if machine.host.disk_bytes_per_second is not None:
        seconds = traffic / machine.host.disk_bytes_per_second
        text += f", {fixed(seconds, 1)} s where the host's memory caches none of it"
    yield Proposal(text)


def _quantized(plan: Plan) -> Iterator[Proposal]:
    """Yield the proposal of quantized state, for loops of the user's own."""
    if plan.args.optimizer != "adam" or plan.args.optimizer_cpu_offload:
        return
    every = estimates_of(plan.args, plan.num_gpus, plan.machine, plan.choices)
    for name, num_bytes in QUANTIZED.items():
        saved = 1 - num_bytes / 8
        least = inf
        for estimate in every:
            needed = estimate.num_bytes - saved * estimate.state_bytes
            least = min(least, needed)
        if least <= plan.memory_limit:
            yield Proposal(
                f"{name} of torchao, in a loop of your own: about {fixed(least / GIB, 1)} GiB of"
                " each GPU"
            )
            break

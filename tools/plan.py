# SPDX-License-Identifier: Apache-2.0
r"""Find the settings with which a model fits the memory of GPUs, and trains fastest.

    python tools/plan.py --model llama-3-70b --machine h100
    python tools/plan.py --gpus 16 --picture step.png --num-layers 24 --hidden-size 2048 ...
    python tools/plan.py --check published_runs.jsonl --report published_runs.md

The model is a published one, or given by the flags of pretrain_gpt.py; flags beside --model replace
the model's own. Sizes of the mesh, the ZeRO level, recomputation and microbatches are searched. The
best settings are simulated by the engine itself on the meta device: no GPU is needed. --check plans
published runs, and compares the plans with what was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # see pretrain_gpt.py
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from megatron.mcore_adapter.run.logging_setup import set_up_logging

set_up_logging()

from megatron.checkpoint.commands.command import Program  # noqa: E402
from megatron.checkpoint.store import durable  # noqa: E402
from megatron.planning.candidates import Choices, candidates, no_mesh  # noqa: E402
from megatron.planning.costs.model_sizes import sizes_of_arguments  # noqa: E402
from megatron.planning.layer_costs import (  # noqa: E402
    recompute_of_arguments,
    software_of_arguments,
)
from megatron.planning.machine import MACHINES, Cluster, find_machine  # noqa: E402
from megatron.planning.picture import draw_plan  # noqa: E402
from megatron.planning.presets import PRESETS  # noqa: E402
from megatron.planning.proposals import Plan, costs_of_update, fixed, proposals  # noqa: E402
from megatron.planning.published.compared_runs import compare  # noqa: E402
from megatron.planning.published.comparison_report import (  # noqa: E402
    draw_comparison,
    report_lines,
    result_lines,
)
from megatron.planning.published.published_runs import read_runs  # noqa: E402
from megatron.planning.search import GIB, Prediction, model_arguments, search  # noqa: E402
from megatron.planning.sharding_choice import choice_lines, choices_of  # noqa: E402

USABLE = 0.9
"""Part of a GPU's memory that a plan may use: the rest is for CUDA, NCCL and fragments."""

NEEDED_TO_RUN = {"--lr": "1e-4", "--train-iters": "1000", "--mock-data": None}
"""Flags that a run needs and that change no plan, with values if none are given."""

NOT_BY_FORMULAS = {
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "fp8_param_gather": "--fp8-param-gather",
    "fp4_param": "--fp4-param-gather",
    "expert_data_parallel_sharding_strategy": "--expert-data-parallel-sharding-strategy",
    "expert_outer_dp_sharding_strategy": "--expert-outer-dp-sharding-strategy",
    "embedding_data_parallel_sharding_strategy": "--embedding-data-parallel-sharding-strategy",
    "window_size": "--window-size",
}
"""Arguments that the engine plans and formulas do not, and their flags."""

GLUE = "\0"
"""Stands for the blank between a flag and its value, where no line is broken."""

HEADER = "    TP  PP  CP  EP  ZeRO  copies  recompute  micro    GiB  step s  exposed  bubble    MFU"


class NumberList(click.ParamType):
    """Numbers above a lowest one, separated by commas."""

    name = "numbers"

    def __init__(self, lowest: int = 1):
        self._lowest = lowest

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...] | str:
        """Return the numbers, or the text if it is none: all problems are told at once."""
        if isinstance(value, tuple):
            return value
        words = value.split(",")
        if all(word.strip().isdigit() and int(word) >= self._lowest for word in words):
            return tuple(int(word) for word in words)
        return value


@click.command(
    cls=Program,
    help=__doc__.split("\n\n")[0] if __doc__ else None,
    epilog="Other flags are those of pretrain_gpt.py.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.option("--model", metavar="NAME", help=f"a published model: {', '.join(PRESETS)}")
@click.option("--gpus", type=int, help="number of GPUs")
@click.option("--machine", default="h100", help=f"{', '.join(MACHINES)}, or a JSON file")
@click.option("--memory-limit", type=float, help=f"GiB of a GPU; default {USABLE:.0%} of them")
@click.option("--tensor", type=NumberList(), default=(), help="tensor-parallel ranks, as 1,2,4")
@click.option("--pipeline", type=NumberList(), default=(), help="pipeline stages")
@click.option("--context", type=NumberList(), default=(), help="context-parallel ranks")
@click.option("--expert", type=NumberList(), default=(), help="expert-parallel ranks")
@click.option("--level", type=NumberList(0), default=(), help="ZeRO levels, 0 to 3")
@click.option("--micro-batch", type=NumberList(), default=(), help="sequences of a microbatch")
@click.option(
    "--expert-imbalance",
    type=float,
    default=1.0,
    show_default=True,
    help="tokens of the busiest expert rank, in those of the mean",
)
@click.option("--show", type=int, default=4, show_default=True, help="settings to show")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG of the best: memory, streams")
@click.option("--beside-ddp", is_flag=True, help="FSDP beside DDP, on 1/4 to 4 times the GPUs")
@click.option("--check", type=click.Path(path_type=Path), help="compare with published runs")
@click.option("--report", type=click.Path(path_type=Path), help="Markdown of the comparison")
@click.pass_context
def main(
    call: click.Context,
    /,
    model: str | None,
    gpus: int | None,
    machine: str,
    memory_limit: float | None,
    expert_imbalance: float,
    show: int,
    picture: Path | None,
    beside_ddp: bool,
    check: Path | None,
    report: Path | None,
    **limits: tuple[int, ...] | str,
) -> None:
    """Print the settings, the fastest first."""
    if check is not None:
        check_runs(check, report, picture, [*problems_of_check(call, report, picture)])
        return
    problems: list[str] = []
    if report is not None:
        problems.append("--report is that of --check, which is not given")
    if model is not None and model not in PRESETS:
        problems.append(f"--model {model} is none of {', '.join(PRESETS)}")
    if model is None and not call.args:
        problems.append("no model: give --model, or flags of pretrain_gpt.py")
    preset = PRESETS.get(model or "")
    num_gpus = gpus if gpus is not None else preset.num_gpus if preset else 0
    problems += problems_of_numbers(num_gpus, show, memory_limit)
    problems += problems_of_picture(picture)
    problems += problems_of_limits(limits)
    described: Cluster | None = None
    try:
        described = find_machine(machine)
    except ValueError as error:
        problems.append(str(error))
    words = words_of(preset.flags if preset else "", call.args)
    args = None
    if preset or call.args:
        args = model_arguments(words, problems, expert_imbalance)
    problems += problems_of_imbalance(expert_imbalance, args)
    if args is not None and args.optimizer_cpu_offload and described and described.host is None:
        problems.append("--optimizer-cpu-offload needs the host in the description of --machine")
    if beside_ddp:
        problems += problems_beside_ddp(call, args)
    if problems or args is None or described is None:
        raise refusal(problems)

    limit = USABLE * described.memory_bytes
    if memory_limit is not None:
        limit = memory_limit * GIB
    choices = Choices(**limits)  # type: ignore[arg-type]  # checked above
    plan = Plan(words, args, num_gpus, described, limit, choices)
    click.echo(f"{num_gpus} GPUs of {described.name}, {limit / GIB:.1f} GiB of each")
    if beside_ddp:
        show_beside_ddp(plan)
    else:
        show_settings(plan, show, picture)


def show_settings(plan: Plan, num_wanted: int, picture: Path | None) -> None:
    """Print the fastest settings that fit, or what would make the model fit.

    Args:
        plan: of the model.
        num_wanted: settings to show.
        picture: PNG of the first one to write; None: none.
    """
    try:
        found = search(
            words=plan.words,
            args=plan.args,
            num_gpus=plan.num_gpus,
            machine=plan.machine,
            memory_limit=plan.memory_limit,
            choices=plan.choices,
            num_wanted=num_wanted,
            log=click.echo,
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if not found:
        propose(plan)
        raise click.ClickException(
            "nothing fits: give more GPUs, another --machine or a larger --memory-limit"
        )
    for line in (*table(found), *commands(found, plan.machine)):
        click.echo(line)
    if picture is not None:
        draw(found[0], plan.memory_limit, picture)


def refusal(problems: list[str]) -> click.UsageError:
    """Return the error that lists everything that is wrong with a command line."""
    lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
    return click.UsageError("\n".join(["these have to be changed:", *lines]))


def check_runs(path: Path, report: Path | None, picture: Path | None, problems: list[str]) -> None:
    """Plan published runs, and print the plans beside what was measured.

    Args:
        path: of the runs.
        report: Markdown to write; None: none.
        picture: PNG to write; None: none.
        problems: of the command line.
    """
    try:
        runs = read_runs(path)
    except ValueError as error:
        problems.append(f"--check: {error}")
    if problems:
        raise refusal(problems)
    compared, left_out = compare(runs)
    for line in result_lines(compared, left_out):
        click.echo(line)
    if report is not None:
        command = f"python tools/plan.py --check {path.name} --report {report.name}"
        with durable.naming(report):
            report.write_text("\n".join([*report_lines(compared, left_out, command), ""]))
        click.echo(f"the report is {report}")
    if picture is not None and compared:
        with durable.naming(picture):
            draw_comparison(compared, picture)
        click.echo(f"the comparison is drawn in {picture}")


def problems_of_check(
    call: click.Context, report: Path | None, picture: Path | None
) -> Iterator[str]:
    """Yield what is wrong with the options beside --check.

    Args:
        call: of the command.
        report: Markdown to write; None: none.
        picture: PNG to write; None: none.
    """
    for name, source in given_options(call).items():
        if name not in ("check", "report", "picture"):
            yield f"{source} does not go with --check, whose runs have their own"
    if call.args:
        yield f"{call.args[0]} does not go with --check, whose runs have their own models"
    if report is not None and not report.absolute().parent.is_dir():
        yield f"--report {report}: there is no folder {report.absolute().parent}"
    yield from problems_of_picture(picture)


def given_options(call: click.Context) -> dict[str, str]:
    """Return the names of the options that were given, and how they are spelled."""
    given: dict[str, str] = {}
    for name in call.params:
        if call.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            given[name] = f"--{name.replace('_', '-')}"
    return given


def problems_of_numbers(num_gpus: int, show: int, memory_limit: float | None) -> Iterator[str]:
    """Yield a problem for every number that is too small.

    Args:
        num_gpus: of --gpus or of the model's preset, 0 if neither has it.
        show: settings to show.
        memory_limit: GiB of a GPU; None: not given.
    """
    if num_gpus < 1:
        yield "--gpus expects the number of GPUs, at least 1"
    if show < 1:
        yield f"--show expects at least 1 but got {show}"
    if memory_limit is not None and not 0 < memory_limit < math.inf:
        yield f"--memory-limit expects GiB above 0 but got {memory_limit:g}"


def problems_of_imbalance(
    expert_imbalance: float, args: argparse.Namespace | None
) -> Iterator[str]:
    """Yield what is wrong with the imbalance of experts.

    Args:
        expert_imbalance: tokens of the busiest expert rank, in those of the mean.
        args: the completed arguments of the model; None: there are none.
    """
    if not 1 <= expert_imbalance < math.inf:
        yield f"--expert-imbalance expects a number of at least 1 but got {expert_imbalance:g}"
    elif expert_imbalance > 1 and args is not None and not args.num_experts:
        yield "--expert-imbalance is that of experts, which the model has not"


def problems_of_picture(picture: Path | None) -> Iterator[str]:
    """Yield what stands in the way of a picture."""
    if picture is None:
        return
    if not picture.absolute().parent.is_dir():
        yield f"--picture {picture}: there is no folder {picture.absolute().parent}"
    if importlib.util.find_spec("matplotlib") is None:
        yield "--picture needs matplotlib, which is not installed"


def problems_beside_ddp(call: click.Context, args: argparse.Namespace | None) -> Iterator[str]:
    """Yield what --beside-ddp cannot plan.

    Args:
        call: of the command.
        args: the completed arguments of the model; None: there are none.
    """
    given = given_options(call)
    for name in ("level", "show", "picture"):
        if name in given:
            yield f"{given[name]} does not go with --beside-ddp, which compares levels 3 and 1"
    if args is None:
        return
    if args.optimizer != "adam":
        yield f"--optimizer {args.optimizer}: --beside-ddp plans adam alone; leave it out"
    for name, flag in NOT_BY_FORMULAS.items():
        if getattr(args, name):
            yield f"{flag} cannot be planned by --beside-ddp; leave one of them out"


def show_beside_ddp(plan: Plan) -> None:
    """Print the fastest layouts of FSDP and of DDP, on fewer and on more GPUs too."""
    args = plan.args
    per_node = plan.machine.gpus_per_node
    if next(candidates(args, plan.num_gpus, per_node, plan.choices), None) is None:
        raise click.ClickException(no_mesh(args, plan.num_gpus, per_node, plan.choices))
    numbers = {plan.num_gpus * 2**power // 4 for power in range(5)}
    numbers.discard(0)
    found = choices_of(
        sizes=sizes_of_arguments(args),
        global_batch=args.global_batch_size,
        machine=plan.machine,
        software=replace(software_of_arguments(args), overlaps_data=True),
        memory_limit=plan.memory_limit,
        gpus=sorted(numbers),
        recompute=recompute_of_arguments(args),
        choices=plan.choices,
    )
    for line in choice_lines(found):
        click.echo(line)


def draw(found: Prediction, limit: float, picture: Path) -> None:
    """Draw a step that was found, and say where."""
    with durable.naming(picture):
        draw_plan(found, limit, picture)
    click.echo(f"the first one is drawn in {picture}")


def propose(plan: Plan) -> None:
    """Print what would make the model fit, with command lines where there are flags for it."""
    found = [*proposals(plan)]
    if found:
        click.echo("it fits with one of these:")
    for number, each in enumerate(found, 1):
        lines = textwrap.wrap(each.text, 94, break_long_words=False, break_on_hyphens=False)
        click.echo(f"{number:>2}. " + "\n    ".join(lines))
    with_flags = [each.prediction for each in found if each.prediction is not None]
    for line in commands(with_flags, plan.machine):
        click.echo(line)


def problems_of_limits(limits: dict[str, tuple[int, ...] | str]) -> Iterator[str]:
    """Yield a problem for every option that does not list numbers."""
    for name, numbers in limits.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(numbers, str):
            yield f"{flag} expects numbers such as 1,2,4 but got {numbers}"
        elif name == "level" and any(number > 3 for number in numbers):
            yield f"{flag} expects levels from 0 to 3 but got {','.join(map(str, numbers))}"


def words_of(of_model: str, given: list[str]) -> list[str]:
    """Return the flags of a model, those that were given, and what every run needs."""
    words = [*shlex.split(of_model), *given]
    names = {word.split("=")[0] for word in words}
    needed: list[str] = []
    for flag, value in NEEDED_TO_RUN.items():
        has_data = flag == "--mock-data" and "--data-path" in names
        has_length = flag == "--train-iters" and "--train-samples" in names
        if flag not in names and not has_data and not has_length:
            needed += [flag] if value is None else [flag, value]
    return [*words, *needed]


def table(found: list[Prediction]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield HEADER
    for number, each in enumerate(found, 1):
        chosen = each.candidate
        recompute = each.args.recompute_granularity or "none"
        yield (
            f"{number:>2}. {chosen.tensor:>2}  {chosen.pipeline:>2}  {chosen.context:>2}"
            f"  {chosen.expert:>2}  {chosen.level:>4}  {chosen.outer:>6}  {recompute:>9}"
            f"  {chosen.micro_batch:>5}  {fixed(each.peak_bytes / GIB, 1):>5}"
            f"  {fixed(each.seconds, 2):>6}"
            f"  {each.exposed_seconds / each.seconds:>7.1%}"
            f"  {each.bubble_seconds / each.seconds:>6.1%}  {each.utilization:>5.1%}"
        )


def commands(found: list[Prediction], machine: Cluster) -> Iterator[str]:
    """Yield the command line of each settings."""
    for number, each in enumerate(found, 1):
        per_node = min(machine.gpus_per_node, each.args.world_size)
        nodes = -(-each.args.world_size // per_node)
        text = f"torchrun --nnodes {nodes} --nproc_per_node {per_node} pretrain_gpt.py"
        if each.host_bytes and machine.host is not None:  # torchrun gives a rank one thread
            threads = max(1, machine.host.cores // machine.gpus_per_node)
            text = f"OMP_NUM_THREADS={threads} {text}"
        for word in [*each.flags, "--use-megatron-fsdp"]:
            is_value = not word.startswith("--")
            text += (GLUE if is_value else " ") + shlex.quote(word)
        lines = textwrap.wrap(text, 94, break_long_words=False, break_on_hyphens=False)
        yield ""
        yield f"# {number}."
        for cost in costs_of_update(each):
            yield f"# {cost}"
        yield " \\\n    ".join(lines).replace(GLUE, " ")


if __name__ == "__main__":
    main()

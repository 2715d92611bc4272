# SPDX-License-Identifier: Apache-2.0
"""The parser of the command line, which reports all problems at once, and its rules in order."""

import argparse
import copy
import difflib
import functools
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import megatron.core

from megatron.checkpoint.store import durable
from megatron.pretrain.arguments.check import Check, CommandLineError, Machine
from megatron.pretrain.arguments.checkpoint_rules import (
    check_directories,
    check_names,
    check_saves,
    replace_urls,
    take_checkpoint_arguments,
)
from megatron.pretrain.arguments.config_flags import absent_flags, all_flags, known_flags
from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from megatron.pretrain.arguments.data_rules import check_data
from megatron.pretrain.arguments.flag_rules import (
    check_needs,
    check_numbers,
    note_idle_flags,
    note_what_is_the_same,
    refuse_values,
)
from megatron.pretrain.arguments.flags import EMPTY_IS_NONE
from megatron.pretrain.arguments.help_text import help_text
from megatron.pretrain.arguments.low_precision_rules import (
    check_low_precision,
    forget_precision_aware,
)
from megatron.pretrain.arguments.machine_rules import check_observing, fit_to_machine
from megatron.pretrain.arguments.model_rules import complete_model, complete_sizes
from megatron.pretrain.arguments.parallel_rules import (
    check_microbatches,
    choose_data_parallelism,
    complete_parallelism,
)
from megatron.pretrain.arguments.training_rules import (
    choose_precision,
    complete_batch,
    complete_length,
    complete_schedule,
)


class CommandLineParser(argparse.ArgumentParser):
    """A parser that raises CommandLineError instead of ending the process.

    --help and --help-all still print and exit.
    """

    def error(self, message: str) -> NoReturn:
        """Raise the message as CommandLineError."""
        raise CommandLineError([message])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every known flag, with Megatron-LM's destinations and defaults."""
    parser = CommandLineParser(
        prog="pretrain_gpt.py",
        description="Train a GPT model with Megatron-Core.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=PrintHelp, nargs=0, dest="help")
    parser.add_argument("--help-all", action=PrintHelp, nargs=0, dest="help")
    for flags in all_flags().values():
        for flag in flags:
            flag.add_to(parser)
    return parser


@functools.cache
def parser_of_given_flags() -> argparse.ArgumentParser:
    """Return a parser that reports given flags only.

    It is built once: that takes four fifths of the time of a command line, and a process of the
    tests or of a plan reads hundreds.
    """
    parser = build_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


class PrintHelp(argparse.Action):
    """Prints the flags that people need, or all with --help-all, and ends the process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print and exit."""
        with durable.standard_output():
            print(help_text(all_flags(), option_string == "--help-all"), flush=True)
        parser.exit()


def parse_arguments(
    argv: Sequence[str],
    *,
    world_size: int,
    cuda: bool,
    transformer_engine: bool,
    fused_weight_gradient: bool | None = None,
    expert_dispatch: bool | None = None,
    emerging_optimizers: bool | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[argparse.Namespace, list[str]]:
    """Parse, complete and check the command line of a run.

    Args:
        argv: the command line without the program's name.
        world_size: number of ranks.
        cuda: there are GPUs.
        transformer_engine: Transformer Engine can be imported.
        fused_weight_gradient: the kernel of --gradient-accumulation-fusion is installed; None to
            look for it.
        expert_dispatch: the kernels of --moe-token-dispatcher-type flex are installed; None to look
            for them.
        emerging_optimizers: this package is installed; None to look for it.
        environment: the environment variables; None for `os.environ`.

    Returns:
        The completed namespace, all of whose values can be pickled, and notes to print, one line
        each. Nothing changes the namespace during a run.

    Raises:
        CommandLineError: with all problems.
    """
    given, refused, problems = parse_given(list(argv))
    if fused_weight_gradient is None:
        fused_weight_gradient = has_package("fused_weight_gradient_mlp_cuda")
    if expert_dispatch is None:
        expert_dispatch = cuda and has_package("deep_ep")
    if emerging_optimizers is None:
        emerging_optimizers = has_package("emerging_optimizers")
    machine = Machine(
        world_size=world_size,
        cuda=cuda,
        transformer_engine=transformer_engine,
        fused_weight_gradient=fused_weight_gradient,
        expert_dispatch=expert_dispatch,
        emerging_optimizers=emerging_optimizers,
        environment=os.environ if environment is None else environment,
    )
    args = argparse.Namespace(**(default_values() | given))
    check = Check(args, given, known_flags(), machine, refused, problems)
    apply_rules(check)
    if check.problems:
        raise CommandLineError(check.problems)
    return args, check.notes


def default_values() -> dict[str, Any]:
    """Return the default of every destination; lists belong to the caller."""
    return {dest: copy.copy(flag.default) for dest, flag in known_flags().items()}


def dry_run_ranks(argv: Sequence[str]) -> int | None:
    """Return the number of ranks that --dry-run-ranks gives, which the rules need first."""
    ranks = None
    for words in one_flag_each(list(argv)):
        name, _, value = " ".join(words).replace("=", " ").partition(" ")
        if name == "--dry-run-ranks" and value.isdecimal() and int(value) > 0:
            ranks = int(value)  # of several, the last one counts, as for argparse
    return ranks


def has_package(name: str) -> bool:
    """Return True if a package is installed."""
    return importlib.util.find_spec(name) is not None


def parse_given(argv: list[str]) -> tuple[dict[str, Any], set[str], list[str]]:
    """Return the values that the command line gives by destination, and problems of single flags.

    Between them come the destinations whose values were refused.

    argparse stops at the first bad value, so flags are parsed one at a time, each with the words
    that follow it.
    """
    parser = parser_of_given_flags()
    known = parser._option_string_actions
    absent = absent_flags() - known.keys()
    given: dict[str, Any] = {}
    refused: set[str] = set()
    problems: list[str] = []
    for words in one_flag_each(argv):
        name = words[0].split("=", 1)[0]
        if not name.startswith("--") and name != "-h":
            problems.append(f"{' '.join(words)}: does not belong to any flag")
        elif name in absent:
            problems.append(
                f"{name}: Megatron-Core {megatron.core.__version__} has no such setting; leave it"
                " out, or install a release that has it"
            )
        elif name not in known:
            problems.append(f"{name}: unknown flag{suggestion(name, known)}")
        elif words[0] == f"{name}=" or "" in words:
            dest = known[name].dest
            if EMPTY_IS_NONE not in known_flags()[dest].rules:
                problems.append(f"{name}: its value is empty, as that of an unset shell variable")
                refused.add(dest)
        else:
            try:
                namespace, rest = parser.parse_known_args(words)
            except CommandLineError as error:
                problems += error.problems
                refused.add(known[name].dest)
                continue
            given |= vars(namespace)
            if rest:
                problems.append(f"{name}: does not take {' '.join(rest)}")
    return given, refused, problems


def one_flag_each(argv: list[str]) -> list[list[str]]:
    """Divide the words into one list for each flag, which it begins.

    A word that begins with a single dash, such as a negative number, is a value.
    """
    flags: list[list[str]] = []
    for word in argv:
        if not flags or word.startswith("--") or word == "-h":
            flags.append([])
        flags[-1].append(word)
    return flags


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known flag that is spelled most like `name`, or nothing."""
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.7)
    return f", did you mean {close[0]}?" if close else ""


def apply_rules(check: Check) -> None:
    """Complete and check the arguments."""
    check_names(check)
    replace_urls(check)
    take_checkpoint_arguments(check)
    refuse_values(check)
    note_what_is_the_same(check)
    has_sizes = check_numbers(check)
    choose_data_parallelism(check)
    choose_precision(check)
    complete_length(check)
    complete_model(check)
    if has_sizes:
        complete_parallelism(check)
        complete_sizes(check)
        complete_batch(check)
        check_microbatches(check)
    complete_schedule(check)
    check_data(check)
    check_directories(check)
    check_saves(check)
    check_observing(check)
    fit_to_machine(check)
    check_low_precision(check)
    check_needs(check)
    forget_precision_aware(check)
    note_idle_flags(check)
    if has_sizes:
        check_configs(check)


def check_configs(check: Check) -> None:
    """Apply Megatron-Core's own rules, which the constructors of its config objects check."""
    for make in (transformer_config, optimizer_config, ddp_config):
        try:
            make(check.args)
        except (ValueError, AssertionError, RuntimeError, ImportError) as error:
            check.problems.append(f"Megatron-Core refuses these arguments: {error}")

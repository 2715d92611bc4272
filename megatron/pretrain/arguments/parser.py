# SPDX-License-Identifier: Apache-2.0
"""The parser of the command line, which reports all problems at once, and its rules in order."""

import argparse
import copy
import difflib
import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import megatron.core

from megatron.checkpoint.store import durable
from megatron.pretrain.arguments.check import Check, CommandLineError, Machine
from megatron.pretrain.arguments.checkpoint_rules import (
    check_directories,
    check_names,
    check_saves,
    note_flags_without_effect,
    replace_urls,
    take_checkpoint_arguments,
)
from megatron.pretrain.arguments.config_flags import absent_flags, field_flags
from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from megatron.pretrain.arguments.data_rules import check_data
from megatron.pretrain.arguments.flags import Flag, help_text
from megatron.pretrain.arguments.low_precision_rules import (
    check_low_precision,
    forget_precision_aware,
)
from megatron.pretrain.arguments.machine_rules import check_observing, fit_to_machine
from megatron.pretrain.arguments.model_rules import complete_model, complete_sizes
from megatron.pretrain.arguments.not_built import (
    check_needs,
    note_what_is_the_same,
    refusal,
    refuse_not_built,
)
from megatron.pretrain.arguments.parallel_rules import (
    check_microbatches,
    choose_data_parallelism,
    complete_parallelism,
)
from megatron.pretrain.arguments.program_flags import PROGRAM_GROUPS
from megatron.pretrain.arguments.training_rules import (
    check_numbers,
    choose_precision,
    complete_batch,
    complete_length,
    complete_schedule,
)

Rule = Callable[[Check], None]

RULES_OF_FLAGS: tuple[Rule, ...] = (
    choose_data_parallelism,
    choose_precision,
    complete_length,
    complete_model,
)
RULES_OF_SIZES: tuple[Rule, ...] = (
    complete_parallelism,
    complete_sizes,
    complete_batch,
    check_microbatches,
)
"""Rules that compute with sizes, and wait until these are there and positive."""
LAST_RULES: tuple[Rule, ...] = (
    complete_schedule,
    check_data,
    check_directories,
    check_saves,
    check_observing,
    fit_to_machine,
    check_low_precision,
    check_needs,
    forget_precision_aware,
    note_flags_without_effect,
)
EMPTY_FOR_NONE = ("config_logger_dir", "wandb_project", "wandb_entity", "wandb_exp_name")
"""Destinations for which an empty text says that there is none, as in Megatron-LM."""
TITLES = (
    *("data parallelism", "optimizer", "model", "multi-latent attention", "mixture of experts"),
    *("low precision and graphs", "model parallelism"),
)
"""Titles of groups in --help that come first, in this order."""


class CommandLineParser(argparse.ArgumentParser):
    """A parser that raises CommandLineError instead of ending the process.

    --help and --help-all still print and exit.
    """

    def error(self, message: str) -> NoReturn:
        """Raise the message as CommandLineError."""
        raise CommandLineError([message])


def all_flags() -> dict[str, list[Flag]]:
    """Return all flags by the title of their group in --help.

    Flags of Megatron-Core's configs come before those of the program.
    """
    groups: dict[str, list[Flag]] = {title: [] for title in TITLES}
    fields = field_flags([*chain.from_iterable(PROGRAM_GROUPS.values())])
    for title, named in fields.items():
        groups.setdefault(title, []).extend(named.values())
    for title, flags in PROGRAM_GROUPS.items():
        groups.setdefault(title, []).extend(flags)
    return groups


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
    for flag in chain.from_iterable(all_flags().values()):
        flag.add_to(parser)
    return parser


@functools.cache
def parser_of_given_flags() -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """Return a parser that reports given flags only, and the default of every destination.

    It is built once: that takes four fifths of the time of a command line, and a process of the
    tests or of a plan reads hundreds.
    """
    parser = build_parser()
    defaults = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser, defaults


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
            print(help_text(all_flags(), refusal, option_string == "--help-all"), flush=True)
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
    parser, defaults = parser_of_given_flags()
    defaults = copy.deepcopy(defaults)  # a default that is a list belongs to one run
    names = {action.dest: action.option_strings[0] for action in parser._actions}
    given, refused, problems = parse_given(parser, list(argv))
    args = argparse.Namespace(**(defaults | given))
    if fused_weight_gradient is None:
        fused_weight_gradient = has_package("fused_weight_gradient_mlp_cuda")
    if expert_dispatch is None:
        expert_dispatch = cuda and has_package("deep_ep")
    if emerging_optimizers is None:
        emerging_optimizers = has_package("emerging_optimizers")
    environment = os.environ if environment is None else environment
    machine = Machine(
        world_size,
        cuda,
        transformer_engine,
        fused_weight_gradient,
        expert_dispatch,
        emerging_optimizers,
        environment,
    )
    check = Check(args, given, names, defaults, machine, refused, problems)
    apply_rules(check)
    if check.problems:
        raise CommandLineError(check.problems)
    return args, check.notes


def dry_run_ranks(argv: Sequence[str]) -> int | None:
    """Return the number of ranks that --dry-run-ranks gives, which the rules need first."""
    for words in one_flag_each(list(argv)):
        name, _, value = " ".join(words).replace("=", " ").partition(" ")
        if name == "--dry-run-ranks" and value.isdecimal() and int(value) > 0:
            return int(value)
    return None


def has_package(name: str) -> bool:
    """Return True if a package is installed."""
    return importlib.util.find_spec(name) is not None


def parse_given(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """Return the values that the command line gives by destination, and problems of single flags.

    Between them come the destinations whose values were refused.

    argparse stops at the first bad value, so flags are parsed one at a time, each with the words
    that follow it.
    """
    known = set(parser._option_string_actions)
    absent = absent_flags() - known
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
        else:
            dest = parser._option_string_actions[name].dest
            is_empty = words[0] == f"{name}=" or "" in words
            if is_empty and dest in EMPTY_FOR_NONE:
                continue
            if is_empty:
                problems.append(f"{name}: its value is empty, as that of an unset shell variable")
                refused.add(dest)
                continue
            try:
                namespace, rest = parser.parse_known_args(words)
            except CommandLineError as error:
                problems.extend(error.problems)
                refused.add(dest)
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


def suggestion(name: str, known: set[str]) -> str:
    """Return a hint at the known flag that is spelled most like `name`, or nothing."""
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.7)
    return f", did you mean {close[0]}?" if close else ""


def apply_rules(check: Check) -> None:
    """Complete and check the arguments."""
    check_names(check)
    replace_urls(check)
    take_checkpoint_arguments(check)
    refuse_not_built(check)
    note_what_is_the_same(check)
    has_sizes = check_numbers(check)
    sizes = RULES_OF_SIZES if has_sizes else ()
    for rule in (*RULES_OF_FLAGS, *sizes, *LAST_RULES):
        rule(check)
    if has_sizes:
        check_configs(check)


def check_configs(check: Check) -> None:
    """Apply Megatron-Core's own rules, which the constructors of its config objects check."""
    for make in (transformer_config, optimizer_config, ddp_config):
        try:
            make(check.args)
        except (ValueError, AssertionError, RuntimeError, ImportError) as error:
            check.problems.append(f"Megatron-Core refuses these arguments: {error}")

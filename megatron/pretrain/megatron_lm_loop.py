# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's training loop, started by pretrain_gpt.py: the same command line, data and model.

The loop is that of the installed Megatron-Core. Flags that it requires and that our own loop's
command line may leave out are added: positions, a tokenizer, and data.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.mcore_adapter.megatron_lm.loop_flags import LoopFlagError, value_of
from megatron.mcore_adapter.releases import tested
from megatron.mcore_adapter.run.environment import environment_world_size, log
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.logging_setup import leave_logging
from megatron.pretrain.arguments.check import CommandLineError
from megatron.pretrain.arguments.parser import default_values, dry_run_ranks
from megatron.pretrain.data import gpt_datasets
from megatron.pretrain.data.gpt_datasets import BuildDatasets
from megatron.pretrain.data.tokenizer_choice import OF_TYPES, TokenizerChoice
from megatron.pretrain.data.tokenizers import NUM_BYTES, build_tokenizer
from megatron.pretrain.dry_run import print_dry_run
from megatron.pretrain.ranks import SINGLE_RANK

FLAG = "--loop"
VARIABLE = "MEGATRON_LOOP"
OWN = "own"
MEGATRON_LM = "megatron-lm"
DRY_RUN = "--dry-run"
DRY_RUN_RANKS = "--dry-run-ranks"
EVAL_INTERVAL = "1000"
"""The loop's default before 0.19, which has none and fails without."""
NEVER = str(10**9)
NOT_HERE = {
    "--sft": "this program has no data of conversations (examples/finetune has)",
    "--fim-data": "this program rearranges no documents",
    "--heterogeneous-layers-config-path": "this program builds equal layers",
}
"""Flags of Megatron-LM's programs that this one would ignore, and why."""
OF_BUILDERS = ("--spec", "--experimental-attention-variant", "--hybrid-layer-pattern")
BUILDERS_SINCE = (0, 19, 0)
"""The first release whose loop builds the model of a command line by itself."""
BYTES = "ByteTokenizer"
"""The tokenizer without files, which the loop knows as its NullTokenizer with as many ids."""
NUMBERS = "NullTokenizer"
END_COUNTED_SINCE = (0, 18, 0)
"""The first release whose NullTokenizer has the end of a document within ``--vocab-size``."""
VOCAB_SIZE = "--vocab-size"
TOKENIZER_TYPE = "--tokenizer-type"


def chosen_loop(words: Sequence[str]) -> str:
    """Return the loop that a command line, or else the environment, asks for.

    Another value of the flag is refused with all other problems of the command line.
    """
    chosen = os.environ.get(VARIABLE) or OWN
    if chosen not in (OWN, MEGATRON_LM):
        tested.end_program(
            f"pretrain_gpt.py: error: {VARIABLE}={chosen} in the environment: expected is {OWN} or"
            f" {MEGATRON_LM}",
            2,
        )
    return value_of(words, FLAG) or chosen


def main(words: Sequence[str], build: BuildDatasets) -> int:
    """Train with Megatron-LM's loop, and return the exit code.

    Args:
        words: the command line, with the flag that has chosen this loop.
        build: makes the datasets of the files that the arguments name.
    """
    problem = obstacle(words)
    if problem is not None:
        tested.end_program(f"pretrain_gpt.py: error: {problem}", 2)
    leave_logging()
    tokenizer = value_of(words, TOKENIZER_TYPE) or BYTES
    if DRY_RUN in words:
        return dry_run(words)
    for name, value in SINGLE_RANK.items():
        os.environ.setdefault(name, value)
    sys.argv[1:] = completed(words)
    try:
        from megatron.mcore_adapter import drop_in

        drop_in.install()
    except (LoopFlagError, RuntimeError, tested.ReleaseError) as error:
        tested.end_program(f"pretrain_gpt.py: error: {error}", 2)
    from megatron.mcore_adapter.megatron_lm import gpt_program

    def build_for_loop(args: Any, num_samples: Sequence[Any]) -> Sequence[Any]:
        try:
            return build_datasets(args, tokenizer, num_samples, build)
        except (ValueError, OSError) as error:
            raise RunError(str(error)) from error  # reported without a traceback

    gpt_program.run(build_for_loop)
    return 0


def obstacle(words: Sequence[str]) -> str | None:
    """Return why the loop cannot run a command line: it is missing, or a flag is not built."""
    core = tested.check()
    if not tested.has_loop():
        return (
            f"{FLAG} {MEGATRON_LM}: Megatron-Core {core} has no training loop: pip install"
            f" 'megatron-core>={tested.FIRST_WITH_LOOP}' (for Python 3.12 and newer), or put a"
            " checkout of Megatron-LM on PYTHONPATH"
        )
    missing = dict(NOT_HERE)
    if core.numbers < BUILDERS_SINCE:
        missing |= dict.fromkeys(OF_BUILDERS, "the loop builds such models since 0.19")
    problems = []
    for flag, reason in missing.items():
        if value_of(words, flag) is not None:
            problems.append(f"{flag}: {reason}")
    if not problems:
        return None
    return (
        f"{'; '.join(problems)}. torchrun -m megatron.mcore_adapter PROGRAM.py starts a program of"
        " Megatron-LM that has it"
    )


def completed(words: Sequence[str]) -> list[str]:
    """Return the command line as the loop takes it."""
    kept = _without([word for word in words if word != DRY_RUN], FLAG)
    kept = _without(kept, DRY_RUN_RANKS)
    kind = value_of(words, TOKENIZER_TYPE) or BYTES
    size = value_of(words, VOCAB_SIZE)
    if kind == BYTES:
        kept = _without(kept, TOKENIZER_TYPE)
        kept += [TOKENIZER_TYPE, NUMBERS]
        size = size or str(NUM_BYTES + 1)
    if size is not None:
        with suppress(ValueError):  # the loop refuses what is no number
            size = str(int(size) + size_difference(kind))
        kept = _without(kept, VOCAB_SIZE)
        kept += [VOCAB_SIZE, size]
    length = value_of(words, "--seq-length")
    if length is not None and value_of(words, "--max-position-embeddings") is None:
        kept += ["--max-position-embeddings", length]
    if value_of(words, "--eval-interval") is None:
        kept += ["--eval-interval", EVAL_INTERVAL]
    if value_of(words, "--save") is not None and value_of(words, "--save-interval") is None:
        kept += ["--save-interval", value_of(words, "--train-iters") or NEVER]  # one at the end
    return kept


def size_difference(kind: str) -> int:
    """Return by how much the loop's ``--vocab-size`` is above that of this program.

    With the end of a document, 257 ids are a size of 257 of a ByteTokenizer here, and of 256 of a
    NullTokenizer. The loop's NullTokenizer has them with a size of 257; before 0.18, of 256.
    """
    counts_end = tested.check().numbers >= END_COUNTED_SINCE
    if kind == BYTES and not counts_end:
        return -1
    if kind == NUMBERS and counts_end:
        return 1
    return 0


def dry_run(words: Sequence[str]) -> int:
    """Check the command line as the loop does, print what follows from it, and return 0."""
    given = value_of(words, DRY_RUN_RANKS)
    num_ranks = dry_run_ranks(words)
    if given is None:
        num_ranks = environment_world_size()
    try:
        if num_ranks is None:
            raise CommandLineError([f"{DRY_RUN_RANKS} expects a positive number but got {given}"])
        args = loop_arguments(words, num_ranks)
        print_dry_run(args, log)
    except CommandLineError as error:
        tested.end_program(f"pretrain_gpt.py: error: {error.problems[0]}", 2)
    except (ValueError, NotImplementedError, OSError, RunError) as error:
        tested.end_program(f"pretrain_gpt.py: error: {error}", 1)
    return 0


def loop_arguments(words: Sequence[str], num_ranks: int) -> argparse.Namespace:
    """Return the arguments as the loop completes and checks them, for a run of so many ranks.

    Flags of this program that the loop does not have get their defaults. No rank is contacted, and
    the environment, the command line and torch's deterministic switch are restored. Without CUDA,
    what ``cpu.install()`` replaces stays replaced.

    Args:
        words: the command line of ``pretrain_gpt.py``.
        num_ranks: number of ranks of the run.

    Raises:
        CommandLineError: there is no loop, or it refuses them.
        RuntimeError: the drop-in is active, for the command line of the process.
    """
    problem = obstacle(words)
    if problem is not None:
        raise CommandLineError([problem])
    from megatron.mcore_adapter import drop_in

    if drop_in.is_active():
        raise RuntimeError(
            "the drop-in is active for the command line of this process, and another one cannot be"
            " checked: call drop_in.uninstall() first"
        )
    errors = io.StringIO()
    try:
        # The first stream gets a list of all arguments.
        with process_restored(), redirect_stdout(io.StringIO()), redirect_stderr(errors):
            os.environ.update(SINGLE_RANK, RANK="0", WORLD_SIZE=str(num_ranks))
            sys.argv[1:] = completed(words)
            with drop_in.install():
                from megatron.training import arguments

                args = arguments.parse_args()
                arguments.validate_args(args)
    except SystemExit:  # by the loop's parser, or one of its assertions
        problem = errors.getvalue().strip().rpartition("error: ")[2]
        raise CommandLineError([problem]) from None
    except (LoopFlagError, RuntimeError, ValueError, tested.ReleaseError) as error:
        raise CommandLineError([str(error)]) from None
    kind = value_of(words, TOKENIZER_TYPE) or BYTES
    choice = asdict(tokenizer_choice(args, kind))
    translated = {
        **choice,
        # The model may have more rows than the tokenizer needs.
        "vocab_size": own_vocab_size(args, kind),
        "rope_type": args.rope_type or "yarn",  # of latent attention alone, as in its config
    }
    return argparse.Namespace(**{**default_values(), **vars(args), **translated})


def build_datasets(
    args: argparse.Namespace,
    kind: str,
    num_samples: Sequence[Any],
    build: BuildDatasets,
) -> Sequence[Any]:
    """Return the data for training, validation and test, as our own loop builds it; a collective.

    Args:
        args: arguments of the loop.
        kind: type of the tokenizer of the command line.
        num_samples: those of the three splits that the loop wants, None for one epoch.
        build: makes the datasets.

    Raises:
        ValueError: the data is missing, damaged or too small, or has tokens that the model lacks;
            the same on every rank.
    """
    tokenizer = build_tokenizer(tokenizer_choice(args, kind))
    if tokenizer.vocab_size > args.padded_vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model"
            f" {args.padded_vocab_size}: give --padded-vocab-size {tokenizer.vocab_size}"
        )
    args = with_paths_of_files(args)
    source = gpt_datasets.find_data(args, tokenizer, tuple(num_samples))
    if source is not None:
        for line in source.lines:
            log(line)
    return build(args, tokenizer, source)


def with_paths_of_files(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the data paths that stand in files, as Megatron-LM reads them."""
    paths: dict[str, list[str]] = {}
    if args.data_args_path is not None:
        paths["data_path"] = Path(args.data_args_path).read_text().split()
    if args.per_split_data_args_path is not None:
        of_splits = json.loads(Path(args.per_split_data_args_path).read_text())
        for split in ("train", "valid", "test"):
            words = of_splits[split]
            if isinstance(words, str):
                words = words.split()
            paths[f"{split}_data_path"] = words
    return argparse.Namespace(**{**vars(args), **paths})


def tokenizer_choice(args: argparse.Namespace, kind: str) -> TokenizerChoice:
    """Return a type of tokenizer with its settings; the loop has those of all types."""
    settings = {}
    for name, kinds in OF_TYPES.items():
        if kind in kinds:
            settings[name] = getattr(args, name)
    if "vocab_size" in settings:
        settings["vocab_size"] = own_vocab_size(args, kind)
    return TokenizerChoice(kind, **settings)


def own_vocab_size(args: argparse.Namespace, kind: str) -> int | None:
    """Return the loop's ``--vocab-size`` as this program counts it; None without it."""
    if args.vocab_size is None:
        return None
    return int(args.vocab_size) - size_difference(kind)


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore the environment, the command line and torch's deterministic switch at the end."""
    environment = dict(os.environ)
    words = list(sys.argv)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        for name in set(os.environ).difference(environment):
            del os.environ[name]
        os.environ.update(environment)
        sys.argv[:] = words
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without a flag and its values."""
    kept = []
    is_value = False
    for word in words:
        name, is_joined, _ = word.partition("=")
        if is_value:
            is_value = False
        elif name == flag:
            is_value = not is_joined
        else:
            kept.append(word)
    return kept

# SPDX-License-Identifier: Apache-2.0
"""Say which functional tests of a Megatron-LM checkout have a command line that is taken here.

For example:

    python tools/functional_configs.py ../Megatron-LM
    python tools/functional_configs.py ../Megatron-LM --json > taken.json
    PYTHONPATH=.:../Megatron-LM python tools/functional_configs.py ../Megatron-LM --loop megatron-lm

Every GPT and MoE configuration is turned into flags as Megatron-LM's run script does, and checked
as pretrain_gpt.py would on GPUs with Transformer Engine, with its own loop or with Megatron-LM's.
Files that it names need not be there.
"""

import json
import os
import re
import shlex
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import chain, pairwise
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import yaml  # type: ignore[import-untyped]
from packaging.version import Version

with warnings.catch_warnings():
    # Megatron-Core warns of every GPU library that is absent; checking flags needs none of them.
    warnings.simplefilter("ignore", UserWarning)
    from megatron.pretrain import megatron_lm_loop
    from megatron.pretrain.arguments import CommandLineError, parse_arguments

CASES = "tests/functional_tests/test_cases"
PATTERNS = ("gpt*/**/model_config.yaml", "moe*/**/model_config.yaml")
RANKS_OF_A_NODE = 8
PREFIXES = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
FILES = ("--vocab-file", "--merge-file", "--tokenizer-model")
REPETITION = "1"
"""What the run script's variable REPEAT is in the first run of a test."""
KERNELS = {
    "megatron.core.models.common.embeddings.rope_utils": """fused_apply_rotary_pos_emb
        fused_apply_rotary_pos_emb_thd""",
    "megatron.core.transformer.moe.moe_utils": """fused_permute fused_permute_with_probs
        fused_sort_chunks_by_index fused_sort_chunks_by_index_with_probs fused_unpermute""",
}
"""Modules of Megatron-Core -> kernels of Transformer Engine that its configs look for there."""

ENGINE_VERSION = "2.9"
ON_GPUS = {
    "torch.cuda.is_available": True,
    "torch.cuda.get_device_capability": (10, 0),
    "torch.cuda.get_device_properties": SimpleNamespace(major=10),
}
"""Functions, and what Megatron-LM's loop is told by them of the machine."""


def configurations(checkout: Path) -> dict[str, dict[str, Any]]:
    """Return the content of every GPT and MoE configuration, by the name of its test.

    Raises:
        click.ClickException: the checkout has none.
    """
    root = checkout / CASES
    paths = sorted(chain.from_iterable(root.glob(pattern) for pattern in PATTERNS))
    if not paths:
        raise click.ClickException(f"{root} has no {' and no '.join(PATTERNS)}")
    return {str(path.parent.relative_to(root)): yaml.safe_load(path.read_text()) for path in paths}


def words_of(arguments: dict[str, Any], files: Path) -> list[str]:
    """Return the words of a command line, as Megatron-LM's run script makes them.

    Args:
        arguments: flag -> value, the section MODEL_ARGS.
        files: a directory that stands for those that environment variables name.
    """
    line: list[str] = []
    for flag, value in arguments.items():
        # The YAML of the tests writes numbers such as 1e-2, which are strings to this parser.
        text = str("null" if value is None else value).strip()
        text = re.sub(r"\$\{?REPEAT\b\}?", REPETITION, text)
        text = re.sub(r"\$\{?[A-Z_]+\}?", str(files), text)
        if value is True:
            line.append(flag)
        elif re.fullmatch(r"\(.*\)", text):
            line += [flag, text]
        elif re.fullmatch(r"\[.*\]", text):
            line += [flag, *shlex.split(text[1:-1])]
        else:
            # The script and its `eval` each take one level of quotes and backslashes away.
            words = shlex.split(" ".join(shlex.split(text)))
            line += [flag, *(words if flag in PREFIXES else [" ".join(words)])]
    return line


def make_files(line: list[str]) -> None:
    """Make empty files where a command line names data and vocabularies."""
    for flag, word in pairwise(line):
        suffixes = (".bin", ".idx") if flag in PREFIXES else ("",) if flag in FILES else ()
        for suffix in suffixes:
            path = Path(word + suffix)
            if path.is_absolute() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()


def num_ranks(arguments: dict[str, Any], ranks_of_a_node: int = RANKS_OF_A_NODE) -> int:
    """Return the least number of ranks, of whole nodes, that the parallel sizes divide.

    It is fewer than a node where a node's data-parallel ranks do not divide the batch: such a test
    is for a part of a node.
    """

    def size(name: str, default: int = 1) -> int:
        value = str(arguments.get(f"--{name}", default))
        return int(value) if value.isdecimal() and int(value) else default

    tensor, pipeline = size("tensor-model-parallel-size"), size("pipeline-model-parallel-size")
    experts = size("expert-model-parallel-size") * size("expert-tensor-parallel-size", tensor)
    model = tensor * pipeline * size("context-parallel-size")
    least = lcm(model, experts * pipeline if "--num-experts" in arguments else 1)
    whole = lcm(ranks_of_a_node, least)
    microbatch, batch = size("micro-batch-size"), size("global-batch-size", 0)
    for ranks in range(whole, 0, -least):
        if batch % (microbatch * (ranks // model)) == 0:
            return ranks
    return whole


def ranks_of_a_node(content: dict[str, Any]) -> int:
    """Return the number of GPUs of a node that a configuration asks for, by default a whole one."""
    asked = (content.get("MODEL_ENV_VARS") or {}).get("MODEL_ARGS") or {}
    return int(asked.get("GPUS_PER_NODE", RANKS_OF_A_NODE))


@contextmanager
def with_transformer_engine() -> Iterator[None]:
    """Let Megatron-Core find Transformer Engine and its kernels where there are none."""
    with ExitStack() as stack:
        stack.enter_context(
            patch("megatron.core.utils.get_te_version", return_value=Version(ENGINE_VERSION))
        )
        for module, names in KERNELS.items():
            for name in names.split():
                if getattr(import_module(module), name, None) is None:
                    stack.enter_context(patch(f"{module}.{name}", object(), create=True))
        yield


@contextmanager
def loop_on_gpus(environment: dict[str, str]) -> Iterator[None]:
    """Let Megatron-LM's loop find GPUs, Transformer Engine and environment variables."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(patch("megatron.mcore_adapter.megatron_lm.loop_program.HAVE_TE", True))
        for function, result in ON_GPUS.items():
            stack.enter_context(patch(function, return_value=result))
        yield


def problems_of(content: dict[str, Any], files: Path, loop: str) -> list[str]:
    """Return the problems of a configuration's command line; none if it is taken.

    Args:
        content: of its file.
        files: a directory that stands for those that environment variables name.
        loop: ``own`` or ``megatron-lm``, which stops at the first problem.
    """
    arguments = content.get("MODEL_ARGS")
    if not isinstance(arguments, dict):
        return ["the file has no section MODEL_ARGS"]
    line = words_of(arguments, files)
    make_files(line)
    environment = {name: str(value) for name, value in (content.get("ENV_VARS") or {}).items()}
    try:
        with warnings.catch_warnings(), with_transformer_engine():
            warnings.simplefilter("ignore")
            ranks = num_ranks(arguments, ranks_of_a_node(content))
            if loop == megatron_lm_loop.MEGATRON_LM:
                with loop_on_gpus(environment):
                    megatron_lm_loop.loop_arguments(line, ranks)
                return []
            parse_arguments(
                line,
                world_size=ranks,
                cuda=True,
                transformer_engine=True,
                fused_weight_gradient=True,
                environment=environment,
            )
    except CommandLineError as error:
        return [problem.replace(str(files), "...") for problem in error.problems]
    return []


def check_all(contents: dict[str, dict[str, Any]], loop: str) -> dict[str, list[str]]:
    """Return the problems of each configuration with a loop, none for one that is taken."""
    problems = {}
    with tempfile.TemporaryDirectory() as files:
        for name, content in contents.items():
            problems[name] = problems_of(content, Path(files), loop)
    return problems


def grouped(problems: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the tests that each problem stops, the problem of most tests first."""
    stopped: dict[str, list[str]] = defaultdict(list)
    for name, found in problems.items():
        for problem in dict.fromkeys(found):
            stopped[problem].append(name)
    return dict(sorted(stopped.items(), key=lambda item: -len(item[1])))


def report(problems: dict[str, list[str]]) -> Iterable[str]:
    """Yield the lines of the report."""
    taken = sum(not found for found in problems.values())
    yield f"{taken} of {len(problems)} configurations are taken"
    stopped = grouped(problems)
    if stopped:
        yield "why the others are not, and how many each reason stops (alone):"
    for problem, names in stopped.items():
        alone = sum(len(problems[name]) == 1 for name in names)
        yield f"{len(names):5} ({alone})  {problem}"


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the problems of each test as JSON.")
@click.option(
    "--loop",
    type=click.Choice([megatron_lm_loop.OWN, megatron_lm_loop.MEGATRON_LM]),
    default=megatron_lm_loop.OWN,
    show_default=True,
    help="The loop that checks them; Megatron-LM's is that of the Megatron-Core at hand.",
)
def main(checkout: Path, as_json: bool, loop: str) -> None:
    """Print how many GPT and MoE tests of the Megatron-LM in CHECKOUT are taken, and why not."""
    problems = check_all(configurations(checkout), loop)
    if as_json:
        click.echo(json.dumps(problems, indent=1))
        return
    for line in report(problems):
        click.echo(line)


if __name__ == "__main__":
    main()

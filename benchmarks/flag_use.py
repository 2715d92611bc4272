# SPDX-License-Identifier: Apache-2.0
"""Count how many of Megatron-LM's functional tests use each flag of pretrain_gpt.py.

    python -m benchmarks.flag_use ../Megatron-LM

prints the flags of the program, not those of Megatron-Core's configs, that fewer than one in fifty
configurations of GPT and MoE models give, and whether they are kept or refused.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import click
import yaml  # type: ignore[import-untyped]

from megatron.pretrain.arguments.tables import PROGRAM_GROUPS

CASES = "tests/functional_tests/test_cases"
PATTERNS = ("gpt*/**/model_config.yaml", "moe*/**/model_config.yaml")
ONE_IN = 50


def flags_of(content: dict[str, Any]) -> set[str]:
    """Return the flags that a configuration gives, without those that it switches off."""
    arguments = content.get("MODEL_ARGS") or {}
    return {flag for flag, value in arguments.items() if value is not False}


def uses(contents: Iterable[dict[str, Any]]) -> tuple[Counter[str], int]:
    """Return how many configurations give each flag, and how many configurations there are."""
    found: Counter[str] = Counter()
    number = 0
    for content in contents:
        found.update(flags_of(content))
        number += 1
    return found, number


def table(found: Counter[str], number: int) -> Iterable[str]:
    """Yield the lines of the table, the flag of most configurations first."""
    yield f"| flag | of {number} configurations | here |"
    yield "|---|---|---|"
    rows = []
    for flags in PROGRAM_GROUPS.values():
        for flag in flags:
            count = sum(found[name] for name in flag.names)
            fate = f"refused: {flag.refusal}" if flag.refusal else "kept"
            if count * ONE_IN < number:
                rows.append((-count, flag.name, fate))
    for negative, name, fate in sorted(rows):
        yield f"| `{name}` | {-negative} | {fate} |"


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(checkout: Path) -> None:
    """Print the table of the Megatron-LM in CHECKOUT."""
    paths = chain.from_iterable((checkout / CASES).glob(pattern) for pattern in PATTERNS)
    for line in table(*uses(yaml.safe_load(path.read_text()) for path in paths)):
        click.echo(line)


if __name__ == "__main__":
    main()

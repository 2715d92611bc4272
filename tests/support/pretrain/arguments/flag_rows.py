# SPDX-License-Identifier: Apache-2.0
"""Rows of the flag tables: a flag, and a change or a test that shows its effect."""

from dataclasses import dataclass, field
from typing import Any

LINE = """--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size
    1 --global-batch-size 8 --mock-data --vocab-size 100"""

TRAIN = f"{LINE} --lr 0.01 --train-iters 20"
SAMPLES = f"{LINE} --lr 0.01 --train-samples 160"


@dataclass(frozen=True)
class FlagRow:
    """One flag as it is written in a command line, and what shows that it does what it says.

    `changes`: what the flag makes of a value that is another one without it, as "place.name" ->
    value.
    `shown_by`: a test below tests/pretrain whose runs show it, where it lies in the training loop.
    """

    flag: str
    beside: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    shown_by: str = ""
    base: str = TRAIN
    gpu: bool = False

    @property
    def name(self) -> str:
        return self.flag.split()[0]


def changes(
    flag: str, beside: str = "", *, base: str = TRAIN, gpu: bool = False, **values: Any
) -> FlagRow:
    """`place__name=value`: the flag changes the value at the place to this one."""
    named = {name.replace("__", ".", 1): value for name, value in values.items()}
    return FlagRow(flag, beside, changes=named, base=base, gpu=gpu)


def shown(table: str) -> list[FlagRow]:
    """Return a row for each flag of a table of tests, each followed by the flags that it shows."""
    rows = []
    test = ""
    for word in table.split():
        if word.startswith("--"):
            rows.append(FlagRow(word, shown_by=test))
        else:
            test = word
    return rows


FSDP = "--use-megatron-fsdp"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
PIPELINE = "--pipeline-model-parallel-size 2"

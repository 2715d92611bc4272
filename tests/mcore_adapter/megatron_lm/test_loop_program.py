# SPDX-License-Identifier: Apache-2.0
"""Settings that the engine reads from the command line of Megatron-LM's loop."""

import sys
from argparse import Namespace
from types import ModuleType

import pytest

from megatron.mcore_adapter.megatron_lm.loop_program import LoopProgram
from megatron.mcore_adapter.releases import tested

WORDS = ["--micro-batch-size", "1", "--use-megatron-fsdp", "--megatron-fsdp-version", "2"]


def program_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> LoopProgram:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setattr(tested, "has_loop", lambda: True)
    return LoopProgram()


def test_the_engine_reads_the_generation_and_the_arguments_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get_args() -> Namespace:
        assert arguments, "there are none yet"
        return arguments[0]

    arguments: list[Namespace] = []
    loop = ModuleType("megatron.training")
    loop.get_args = get_args
    monkeypatch.setitem(sys.modules, "megatron.training", loop)
    program = program_of(WORDS, monkeypatch)
    assert program.settings() == {"megatron_fsdp_version": 2}
    arguments.append(Namespace(optimizer="muon", optimizer_cpu_offload=False))
    assert program.settings() == {
        "megatron_fsdp_version": 2,
        "megatron_fsdp_granularity": "prefer_tensors",
    }


def test_other_programs_have_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program_of(WORDS[2:], monkeypatch).settings() == {}

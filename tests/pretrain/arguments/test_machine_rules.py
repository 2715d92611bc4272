# SPDX-License-Identifier: Apache-2.0
"""Records that a machine cannot make are refused by name, with the reason."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from megatron.pretrain.arguments import machine_rules
from tests.support.pretrain.arguments.command_lines import MOCK, parse, problems


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str) -> ModuleSpec | None:
        return None if name == "wandb" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert problems(f"{MOCK} --wandb-project counting") == [
        "--wandb-project needs the package wandb: pip install wandb"
    ]


def test_late_weight_gradients_need_a_release_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "--delay-wgrad-compute needs Transformer Engine 2.8 or newer"
    assert not any(reason in problem for problem in problems(f"{MOCK} --delay-wgrad-compute"))
    monkeypatch.setattr(machine_rules, "HAS_LATE_GRADIENTS", False)
    assert any(reason in problem for problem in problems(f"{MOCK} --delay-wgrad-compute"))


def test_timers_that_are_off_are_told_with_the_way_to_turn_them_on() -> None:
    _, notes = parse(f"{MOCK} --tensorboard-dir board --log-timers-to-tensorboard")
    told = "--log-timers-to-tensorboard: no effect with --timing-log-level 0; can be left out"
    assert told in notes


def test_a_directory_alone_saves_at_the_end() -> None:
    args, _ = parse(f"{MOCK} --save checkpoints")
    assert args.save_interval is None
    (problem,) = problems(f"{MOCK} --save checkpoints --save-retain-interval 10")
    assert problem == "--save-retain-interval needs --save-interval"


def test_deprecated_flags_say_that_they_change_nothing() -> None:
    _, notes = parse(f"{MOCK} --log-batch-size-to-tensorboard --log-learning-rate-to-tensorboard")
    assert [note for note in notes if "deprecated, is the default" in note] == [
        "--log-batch-size-to-tensorboard: deprecated, is the default; leave it out",
        "--log-learning-rate-to-tensorboard: deprecated, is the default; leave it out",
    ]


def test_barriers_of_level_1_are_the_default() -> None:
    assert parse(MOCK)[0].barrier_with_L1_time
    assert parse(f"{MOCK} --barrier-with-L1-time")[0].barrier_with_L1_time
    assert not parse(f"{MOCK} --no-barrier-with-level-1-timing")[0].barrier_with_L1_time


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.pretrain.arguments.machine_rules.device_count", lambda: 2)
    started = {"world_size": 4, "cuda": True, "transformer_engine": True}
    (problem,) = problems(MOCK, **started, environment={"LOCAL_WORLD_SIZE": "4"})
    assert "4 ranks on a machine of 2 GPUs" in problem and "--nproc-per-node" in problem
    parse(MOCK, **started, environment={"LOCAL_WORLD_SIZE": "2"})


def test_muon_names_its_package_and_what_it_does_not_go_with() -> None:
    line = f"{MOCK} --optimizer muon"
    package, precision, *others = problems(
        f"{line} --fp16 --use-distributed-optimizer --dump-param-to-param-group-map map",
        emerging_optimizers=False,
    )
    assert "pip install emerging-optimizers" in package and "Python 3.12" in package
    assert "--fp16" in precision
    assert [text.split()[0] for text in others] == [
        "--use-distributed-optimizer",
        "--dump-param-to-param-group-map",
    ]
    (offload,) = problems(f"{line} --use-megatron-fsdp --optimizer-cpu-offload")
    assert "--optimizer-cpu-offload, which is for adam" in offload
    (layerwise,) = problems(f"{MOCK} --optimizer dist_muon")
    assert "--optimizer dist_muon needs --use-megatron-fsdp" in layerwise

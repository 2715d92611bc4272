# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine that follow from the arguments of Megatron-LM's loop."""

import argparse
from typing import Any

import pytest

from megatron.mcore_adapter.megatron_lm.loop_optimizers import settings_of, validate_args

ADAM = {"optimizer": "adam", "optimizer_cpu_offload": False, "use_megatron_fsdp": True}


def test_the_engine_gets_settings_that_no_release_has_a_field_for() -> None:
    assert settings_of(argparse.Namespace(**ADAM)) == {}
    offloaded = argparse.Namespace(
        **ADAM | {"optimizer_cpu_offload": True},
        pin_cpu_grads=False,
        pin_cpu_params=True,
        optimizer_offload_fraction=0.5,
    )
    policy = settings_of(offloaded)["megatron_fsdp_offload_policy"]
    assert (policy.fraction, policy.pins) == (0.5, False)
    muon = settings_of(argparse.Namespace(**ADAM | {"optimizer": "muon"}))
    assert muon == {"megatron_fsdp_granularity": "prefer_tensors"}


def test_the_loop_checks_other_optimizers_as_adam_on_the_device() -> None:
    seen: list[dict[str, Any]] = []
    words = {"optimizer": "dist_muon", "optimizer_cpu_offload": True}
    args = argparse.Namespace(**ADAM | words)
    validate_args(lambda args: seen.append(dict(vars(args))), {"args": args})
    assert seen == [ADAM]
    assert (args.optimizer, args.optimizer_cpu_offload) == ("muon", True)


@pytest.mark.parametrize("has_fsdp", [True, False], ids=["fsdp", "ddp"])
def test_an_assertion_of_the_loop_ends_the_program_with_its_message(
    has_fsdp: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def original(args: argparse.Namespace) -> None:
        raise AssertionError("sgd only")

    words = {"optimizer": "muon", "optimizer_cpu_offload": True, "use_megatron_fsdp": has_fsdp}
    args = argparse.Namespace(**words)
    with pytest.raises(SystemExit) as ended:
        validate_args(original, {"args": args})
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: sgd only ({__file__}:")
    assert vars(args) == words


def test_without_fsdp_the_loop_checks_the_optimizer_of_the_command_line() -> None:
    seen: list[dict[str, Any]] = []
    words = {"optimizer": "dist_muon", "optimizer_cpu_offload": True, "use_megatron_fsdp": False}
    args = argparse.Namespace(**words)
    validate_args(lambda args: seen.append(dict(vars(args))), {"args": args})
    assert seen == [words] and vars(args) == words

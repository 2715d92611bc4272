# SPDX-License-Identifier: Apache-2.0
"""Pipelines on the CPU: virtual stages, and how messages between stages are sent."""

import zlib

import pytest
import torch
from megatron.core.transformer.module import MegatronModule

from megatron.pretrain.arguments.configs import transformer_config
from tests.support.pretrain.parity import LLAMA, Combination
from tests.support.pretrain.training_runs import (
    Record,
    assert_close,
    name_of,
    prepare,
    pretrain_with,
)
from tests.support.rank_pool import run_ranks


def fill_by_name(model: list[MegatronModule]) -> None:
    """Weights that follow from their names, so that they are the same under every layout."""
    for chunk in model:
        weights = {}
        for name, parameter in chunk.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name_of(name).encode()))
            random = torch.randn(parameter.shape, generator=generator)
            weights[name.removeprefix("module.")] = (
                1 + 0.1 * random if "norm" in name else 0.1 * random
            )
        chunk.load_state_dict(weights)


def losses_of_filled(*command_lines: str) -> list[Record]:
    """Job: runs from the same weights."""
    return [pretrain_with(command_line, fill_by_name)[0] for command_line in command_lines]


@pytest.mark.exhaustive
def test_virtual_stages_on_two_ranks_do_not_mix_up_their_messages() -> None:
    # A batch of messages between the same two ranks confuses forward and backward.
    flags = "--train-iters 3 --overlap-grad-reduce --global-batch-size 4"
    lines = [
        Combination(2, layout, 3, LLAMA, flags, layers=4).ours for layout in ("pp2", "pp2 vpp2")
    ]
    plain, interleaved = run_ranks(2, losses_of_filled, *lines)[0]
    assert_close(interleaved.losses, plain.losses, 1e-5)
    assert_close(interleaved.column("grad-norm"), plain.column("grad-norm"), 1e-5)


def schedule_settings(command_line: str) -> tuple[bool, ...]:
    args, _ = prepare(command_line)
    config = transformer_config(args)
    return config.overlap_p2p_comm, config.batch_p2p_comm, config.deallocate_pipeline_outputs


def test_the_interleaved_schedule_sends_one_message_at_a_time_and_keeps_outputs_on_gloo() -> None:
    assert run_ranks(2, schedule_settings, Combination(2, "pp2 vpp2", 3, LLAMA, layers=4).ours)[
        0
    ] == (True, False, False)

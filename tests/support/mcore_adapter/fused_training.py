# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program whose layers write weight gradients themselves."""

from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import layers

from megatron.mcore_adapter.fused_gradients import FusedGradient
from tests.support.pretrain import training_runs
from tests.support.pretrain.training_runs import Record, pretrain


def train_fused(command_line: str) -> tuple[Record, int]:
    """Job: train with --gradient-accumulation-fusion; return how often layers wrote a gradient.

    The command line would switch the flag off without its kernel.
    """
    products = []
    prepare, new_product = training_runs.prepare, FusedGradient.new_product

    def prepared(line: str) -> tuple[Any, torch.device]:
        args, device = prepare(line)
        args.gradient_accumulation_fusion = True
        return args, device

    def counted(gradient: FusedGradient) -> torch.Tensor:
        products.append(1)
        return new_product(gradient)

    with (
        patch.object(training_runs, "prepare", prepared),
        patch.object(layers, "_grad_accum_fusion_available", True),
        patch.object(FusedGradient, "new_product", counted),
    ):
        return pretrain(command_line), len(products)

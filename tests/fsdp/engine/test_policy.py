# SPDX-License-Identifier: Apache-2.0
"""Strategies and precision policies: what they take, mean and refuse."""

import re
from typing import Any

import pytest
import torch

from megatron.fsdp.config.settings import Gradients
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, Precision, ShardingStrategy
from megatron_fsdp.translation import precision_policy

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("level", range(4))
def test_strategy_is_a_number_a_name_or_a_member(level: int) -> None:
    name = ["no_shard", "optim", "optim_grads", "optim_grads_params"][level]
    strategy = ShardingStrategy.parse(level)
    assert (
        strategy
        == ShardingStrategy.parse(name)
        == ShardingStrategy.parse(name.upper())
        == ShardingStrategy(level)
        == level
    )
    assert [strategy.shards_optimizer, strategy.shards_gradients, strategy.shards_parameters] == [
        level >= 1,
        level >= 2,
        level >= 3,
    ]


@pytest.mark.parametrize("value", [4, -1, "zero3", "3", True, None, 1.0])
def test_other_strategies_are_refused_by_name(value: Any) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape("outer expects one of no_shard/0, optim/1")
        + f".* but got {re.escape(repr(value))}",
    ):
        ShardingStrategy.parse(value, "outer")


@pytest.mark.parametrize(
    ("policy", "trainable", "expected"),
    [
        (MixedPrecisionPolicy(), True, Precision(BF16, FP32, BF16, BF16)),
        (MixedPrecisionPolicy(), False, Precision(BF16, BF16, BF16, BF16)),
        (MixedPrecisionPolicy(None), True, Precision(BF16, BF16, BF16, BF16)),
        (MixedPrecisionPolicy(FP32, FP32), True, Precision(BF16, FP32, FP32, FP32)),
        (MixedPrecisionPolicy(FP32, FP32, BF16), True, Precision(BF16, FP32, FP32, BF16)),
        (MixedPrecisionPolicy(None, None, FP32), True, Precision(BF16, BF16, BF16, FP32)),
    ],
)
def test_missing_dtypes_follow_the_parameter(
    policy: MixedPrecisionPolicy, trainable: bool, expected: Precision
) -> None:
    assert policy.resolve(BF16, trainable) == expected


@pytest.mark.parametrize("value", [torch.int32, "float32", 32])
def test_values_that_are_no_dtype_are_refused(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"main_grads_dtype expects a floating-point torch.dtype or None"
    ):
        MixedPrecisionPolicy(main_grads_dtype=value)


def test_old_keywords_mean_the_same_as_a_policy() -> None:
    assert precision_policy(None, None, None) == MixedPrecisionPolicy()
    assert precision_policy(None, True, None) == MixedPrecisionPolicy(FP32, FP32, FP32)
    assert precision_policy(None, None, False) == MixedPrecisionPolicy(None)
    assert precision_policy(MixedPrecisionPolicy(FP32, FP32), True, True) == MixedPrecisionPolicy(
        FP32, FP32
    )


@pytest.mark.parametrize(
    ("policy", "reduce_in_fp32", "preserve"),
    [
        (MixedPrecisionPolicy(), None, False),
        (MixedPrecisionPolicy(None), None, True),
        (MixedPrecisionPolicy(FP32, BF16), True, None),
        (MixedPrecisionPolicy(FP32, FP32, BF16), True, None),
        (MixedPrecisionPolicy(FP32, FP32), False, None),
    ],
)
def test_policy_and_contradicting_old_keyword_are_refused(
    policy: MixedPrecisionPolicy, reduce_in_fp32: bool | None, preserve: bool | None
) -> None:
    with pytest.raises(ValueError, match="contradicts mixed_precision_policy"):
        precision_policy(policy, reduce_in_fp32, preserve)


def test_a_sum_cannot_be_averaged_in_the_collective() -> None:
    with pytest.raises(ValueError, match=r"Gradients.sum_only .* Gradients.average_in_collective"):
        Gradients(sum_only=True, average_in_collective=True)

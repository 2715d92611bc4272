# SPDX-License-Identifier: Apache-2.0
"""Moving averages of sharded weights follow those of unsharded weights."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron.fsdp.backends.host_memory import HostMemory
from megatron.fsdp.weight_average import WeightAverage
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.support.fsdp import models
from tests.support.fsdp.reference import Ranks, evaluate, on_ranks
from tests.support.fsdp.state_dicts import assert_equal, sharded, train, whole


def average_by_hand(decay: float, steps: int) -> list[dict[str, Tensor]]:
    """Return the average of the weights, and the weights, of a sharded model."""
    model, optimizer = sharded("tied_across_units", 3)
    average = {key: value.clone() for key, value in whole(model.state_dict()).items()}
    for _ in range(steps):
        train(model, optimizer, 1)
        for key, value in whole(model.state_dict()).items():
            average[key].lerp_(value, 1 - decay)
    return [average, whole(model.state_dict())]


def follow(level: int, path: str) -> None:
    expected, weights = average_by_hand(0.75, 3)
    model, optimizer = sharded("tied_across_units", level)
    average = WeightAverage(model, decay=0.75)
    for _ in range(3):
        train(model, optimizer, 1)
        average.update()
    outputs = evaluate(model, 0)
    with average.applied():
        assert_equal(whole(model.state_dict()), expected, 1e-12)
        others = evaluate(model, 0)
        with pytest.raises(RuntimeError, match="outside of applied"):
            average.update()
    assert_equal(whole(model.state_dict()), weights, 1e-12)
    assert all(torch.equal(left, right) for left, right in zip(evaluate(model, 0), outputs))
    assert not any(torch.equal(left, right) for left, right in zip(others, outputs))

    dcp.save(average.state_dict(), checkpoint_id=path)
    fresh, _ = sharded("tied_across_units", level)
    loaded = WeightAverage(fresh)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=path)
    loaded.load_state_dict(state)
    assert loaded.num_updates == 3
    with loaded.applied():
        assert_equal(whole(fresh.state_dict()), expected, 1e-12)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
def test_an_average_follows_the_weights_and_is_saved(
    ranks: Ranks, level: int, tmp_path: Path
) -> None:
    ranks(2, follow, level, str(tmp_path))


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_an_average_has_what_code_has_just_written_to_weights(level: int) -> None:
    """Write to bfloat16 weights by name before the average is made, and before it is updated."""
    model = fully_shard_model(
        models.build_stack().bfloat16(),
        zero_dp_strategy=level,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32),
    )
    with torch.no_grad():
        model(torch.ones(2, models.WIDTH, dtype=torch.bfloat16))
        model.module.head.weight.fill_(1.0)
        average = WeightAverage(model, decay=0.5)
        model.module.head.weight.fill_(3.0)
    average.update()
    found = average.state_dict()["module.head.weight"].to_local()
    assert torch.equal(found, torch.full_like(found, 2.0)), found


@on_ranks(2)
def test_wrong_arguments_of_an_average_are_named() -> None:
    module = models.build("scalars")
    messages = []
    with pytest.raises(ValueError) as error:
        WeightAverage(module)
    messages.append(str(error.value))
    model = fully_shard_model(module)
    with pytest.raises(ValueError) as error:
        WeightAverage(model, decay=1.5)
    messages.append(str(error.value))
    with pytest.raises(RuntimeError) as error:
        WeightAverage(model).load_state_dict({"num_updates": 1})
    messages.append(str(error.value))
    of_module, of_decay, of_state = messages
    assert "fully_shard" in of_module
    assert "1.5" in of_decay
    assert "module." in of_state


@on_ranks(2)
def test_weights_that_may_still_be_copied_to_the_device_are_waited_for() -> None:
    """Count the units that have another weight already whenever a unit's copies are awaited."""
    model, optimizer = sharded("tied_across_units", 3, offload_policy="host")
    average = WeightAverage(model)
    train(model, optimizer, 1)
    trained = [group.main_shard.clone() for group in model.groups]
    found: list[int] = []

    def count(memory: HostMemory) -> None:
        now = [group.main_shard for group in model.groups]
        found.append(sum(not torch.equal(*pair) for pair in zip(trained, now)))

    with patch.object(HostMemory, "wait", count), average.applied():
        pass
    assert found[: len(found) // 2] == list(range(len(found) // 2)) != [], found

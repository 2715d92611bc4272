# SPDX-License-Identifier: Apache-2.0
"""Entries of the walk: keywords of `fully_shard_model` and of `fully_shard_optimizer`."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.support.fsdp.interface.walk import (
    backward,
    gradient,
    mean_gradient,
    names_of_units,
    shows,
)
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import close
from tests.support.fsdp.watched_communication import watching_collectives, watching_streams
from tests.support.fsdp.wrong_calls import message_of

UNITS: dict[str, Any] = {"fsdp_unit_modules": [ResidualBlock]}


@shows("fully_shard_model", "fsdp_unit_modules")
def shows_fsdp_unit_modules() -> None:
    for units in ([ResidualBlock], ["tests.support.fsdp.models.ResidualBlock"]):
        seen = names_of_units(fully_shard_model(build_stack(), fsdp_unit_modules=units))
        assert "blocks.0" in seen and "blocks.0.up" not in seen
    assert "blocks.0.up" in names_of_units(fully_shard_model(build_stack()))


def is_waited_for_at_once(model: MegatronFSDP, stream: str) -> bool:
    """Return True if nothing happens between a launch on `stream` and its end.

    The second pass is watched, because it knows the order of units.
    """
    backward(model)
    with watching_streams() as events:
        backward(model)
    names = [name for name, _ in events]
    launched = [place for place, name in enumerate(names) if name == stream]
    assert launched
    return all(names[place + 1] == f"waited for {stream}" for place in launched)


@shows("fully_shard_model", "overlap_grad_reduce")
def shows_overlap_grad_reduce() -> None:
    for overlaps in (True, False):
        model = fully_shard_model(build_stack(), **UNITS, overlap_grad_reduce=overlaps)
        assert is_waited_for_at_once(model, "reduce") is not overlaps


@shows("fully_shard_model", "preproc_state_dict_for_dcp_ckpt")
@shows("fully_shard_optimizer", "optimizer", "preproc_state_dict_for_dcp_ckpt")
def shows_preproc_state_dict_for_dcp_ckpt() -> None:
    def is_ready(value: Any) -> bool:
        return hasattr(value._local_tensor, "__create_chunk_list__")

    for wanted in (True, False):
        model = fully_shard_model(build_stack(), preproc_state_dict_for_dcp_ckpt=wanted)
        assert {is_ready(value) for value in model.state_dict().values()} == {wanted}
        plain = torch.optim.AdamW(model.parameters())
        optimizer = fully_shard_optimizer(plain, wanted)
        assert optimizer is plain
        assert {
            is_ready(slots["exp_avg"]) for slots in optimizer.state_dict()["state"].values()
        } == {wanted}


@shows("fully_shard_model", "average_in_collective")
def shows_average_in_collective() -> None:
    for wanted, operation in ((True, dist.ReduceOp.AVG), (False, dist.ReduceOp.SUM)):
        model = fully_shard_model(build_stack(), average_in_collective=wanted)
        with watching_collectives() as calls:
            backward(model)
        assert all(op == operation for kind, _, op in calls if kind == "reduce")
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("fully_shard_model", "disable_bucketing", "enable_fine_grained_param_gather")
def shows_other_units() -> None:
    assert len(names_of_units(fully_shard_model(build_stack(), **UNITS))) == 4
    one = fully_shard_model(build_stack(), **UNITS, disable_bucketing=True)
    assert names_of_units(one) == {"root"}
    many = fully_shard_model(build_stack(), **UNITS, enable_fine_grained_param_gather=True)
    assert "blocks.0.up" in names_of_units(many)


@shows("fully_shard_model", "use_decoupled_grad")
def shows_use_decoupled_grad() -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.bfloat16)
    model = fully_shard_model(
        build_stack().bfloat16(), use_decoupled_grad=True, mixed_precision_policy=policy
    )
    backward(model, dtype=torch.bfloat16)
    assert all(
        parameter.grad is None and parameter.decoupled_grad.dtype == torch.bfloat16
        for parameter in model.parameters()
    )


@shows("fully_shard_model", "maxpool_double_buffer")
def shows_slots_of_one_size() -> None:
    model = fully_shard_model(build_stack(), **UNITS, maxpool_double_buffer=True)
    backward(model)
    model.install_optimized_model_weights()
    slots = model.memory_slots
    assert len(slots["weights"]) == 3 and len(set(slots["weights"])) == 1


@shows("fully_shard_model", "nccl_ub")
def shows_nccl_ub() -> None:
    assert "nccl_ub" in message_of(ValueError, fully_shard_model, build_stack(), nccl_ub=True)

# SPDX-License-Identifier: Apache-2.0
"""Entries of the walk: members of `MegatronFSDP`."""

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

from megatron.fsdp.backends.slot_memory import allocate_slots
from megatron.fsdp.config import memory
from megatron.fsdp.module import builder, checks
from megatron_fsdp import (
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
)
from tests.support.fsdp.interface.walk import (
    backward,
    gradient,
    mean_gradient,
    shows,
    whole,
    wrapped,
)
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import close
from tests.support.fsdp.watched_communication import (
    watching_collectives,
    watching_dtypes,
    watching_streams,
)
from tests.support.fsdp.watched_memory import look_at
from tests.support.fsdp.wrong_calls import message_of


@shows("members", "manual_buffer_registration")
@shows("fully_shard_model", "fsdp_manual_registration")
def shows_manual_registration() -> None:
    """Show that slots are assigned by the call; registration itself needs NCCL."""
    units = {"fsdp_unit_modules": [ResidualBlock]}
    with (
        mock.patch.object(memory, "problems_of_nccl", return_value=[]),
        mock.patch.object(checks, "problems_of_nccl", return_value=[]),
        mock.patch.object(builder, "NcclMemory") as nccl,
    ):
        nccl.return_value.allocate.side_effect = partial(allocate_slots, torch.device("cpu"))
        nccl.return_value.register.return_value = []
        for manual in (False, True):
            model = fully_shard_model(
                build_stack(), nccl_ub=True, fsdp_manual_registration=manual, **units
            )
            if manual:
                assert "a step first" in message_of(RuntimeError, model.manual_buffer_registration)
            backward(model)
            model.install_optimized_model_weights()
            assert bool(model.memory_slots["weights"]) is not manual
            if manual:
                model.manual_buffer_registration()
                assert len(model.memory_slots["weights"]) == 3
            backward(model)
    fully_shard_model(build_stack()).manual_buffer_registration()  # nothing was left to it
    refused = {"fsdp_manual_registration": True}
    assert "needs nccl_ub" in message_of(ValueError, fully_shard_model, build_stack(), **refused)


@shows("members", "sync")
def shows_sync() -> None:
    model = MegatronFSDP(build_stack(), FSDPDistributedIndex(mesh_of("dp")))
    backward(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.zero_grad()
    with model.sync():
        backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)
    model.zero_grad()
    backward(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@shows("members", "start_param_sync", "synchronize_param_gather")
def shows_start_param_sync() -> None:
    for arguments in ({"force_dispatch": True}, {"force_sync": True, "force_dispatch": True}):
        model = wrapped(build_stack(), fsdp_unit_modules=[ResidualBlock])
        model.start_param_sync()
        assert look_at(model).gathered == []  # level 3 gathers unit by unit
        model.start_param_sync(**arguments)
        model.synchronize_param_gather()
        assert len(look_at(model).gathered) == 3  # beside the root, which the head belongs to
        assert torch.equal(model.module.head.weight, build_stack().head.weight)
        backward(model)
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("members", "start_grad_sync", "finish_grad_sync", "synchronize_gradient_reduce")
def shows_gradient_members() -> None:
    for level in (1, 3):
        model = fully_shard_model(
            build_stack(), mesh_of("dp"), zero_dp_strategy=level, sync_model_each_microbatch=False
        )
        with model.no_sync():
            backward(model)
        with watching_collectives() as calls:
            model.start_grad_sync()
            assert level == 3 or calls
        model.synchronize_gradient_reduce()
        assert all(parameter.grad is None for parameter in model.parameters())
        model.attach_grad_to_optimizer_state()
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)
        model.finish_grad_sync()
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)
        assert "force_all_reduce" in message_of(
            NotImplementedError, model.finish_grad_sync, force_all_reduce=True
        )
    model = fully_shard_model(
        build_stack(), mesh_of("dp"), zero_dp_strategy=0, sync_model_each_microbatch=False
    )
    backward(model)
    model.finish_grad_sync(force_all_reduce=True)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("members", "zero_grad_buffer")
def shows_gradient_buffers() -> None:
    model = wrapped(build_stack(), sync_model_each_microbatch=False)
    for forget in (model.zero_grad_buffer, model.zero_grad):
        backward(model)
        forget()
        backward(model)
        model.finish_grad_sync()
        model.scale_gradients(0.25)
        close(gradient(model), 0.25 * mean_gradient(2), "gradient", 1e-5)
        forget()
        assert all(parameter.grad is None for parameter in model.parameters())


@shows("members", "broadcast_params")
def shows_broadcast_params() -> None:
    model = fully_shard_model(build_stack(), mesh_of("dp"), zero_dp_strategy=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(dist.get_rank())
    model.broadcast_params()
    weight = model.module.head.weight.full_tensor().detach().double()
    close(weight, build_stack().head.weight.detach(), "weight", 1e-6)


@shows("members", "stop_communication")
def shows_stop_communication() -> None:
    model = wrapped(build_stack(), sync_model_each_microbatch=False)
    with model.no_sync():
        backward(model)
    model.start_grad_sync()
    model.start_param_sync(force_dispatch=True)
    with watching_streams() as events:
        model.stop_communication()
        model.synchronize_param_gather()
        model.synchronize_gradient_reduce()
    assert not events  # what was launched before is not watched, and nothing new begins
    assert torch.equal(model.module.head.weight, build_stack().head.weight)


@shows("members", "mixed_precision_context", "reset_mixed_precision_policy")
def shows_mixed_precision_context() -> None:
    model = wrapped(
        build_stack().float(),
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
    )

    def travels() -> set[torch.dtype]:
        with watching_dtypes() as dtypes:
            backward(model, dtype=torch.float32)
        return set(dtypes)

    with model.mixed_precision_context(
        MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    ):
        assert travels() == {torch.bfloat16}
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert travels() == {torch.float32}
    model.reset_mixed_precision_policy(MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16))
    assert travels() == {torch.bfloat16}


@shows(
    "members",
    "sharded_params",
    "groups",
    "initialiser",
    "checkpoint_ready",
    "is_param_fsdp_distributed",
)
def shows_what_a_module_has() -> None:
    model = wrapped(build_stack())
    assert model.is_param_fsdp_distributed
    assert list(map(id, model.module.parameters())) == list(map(id, model.parameters()))
    assert all(one is two for one, two in zip(model.parameters(), model.parameters(), strict=True))
    model.load_state_dict({name: value * 2 for name, value in build_stack().state_dict().items()})
    weight = whole(model.state_dict()["module.head.weight"]).double()
    close(weight, 2 * build_stack().head.weight.detach(), "weight", 1e-5)
    assert len(model.sharded_params) == sum(len(group.names) for group in model.groups)

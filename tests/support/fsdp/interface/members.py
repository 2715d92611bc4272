# SPDX-License-Identifier: Apache-2.0
"""Entries of the walk: keywords of the sharded optimizer and members of `MegatronFSDP`."""

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fsdp import builder, checks
from megatron.fsdp.backends import memory_slots
from megatron.fsdp.backends.memory_slots import allocate_slots
from megatron_fsdp import (
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
)
from tests.support.fsdp.interface.mesh_arguments import shows_index_and_config
from tests.support.fsdp.interface.walk import (
    Make,
    backward,
    gradient,
    mean_gradient,
    shows,
    whole,
    wrapped,
)
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import batch, close
from tests.support.fsdp.watched_communication import (
    watching_collectives,
    watching_dtypes,
    watching_streams,
)
from tests.support.fsdp.watched_memory import look_at
from tests.support.fsdp.wrong_calls import message_of


def with_optimizer(
    dtype: torch.dtype = torch.float64, **arguments: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = build_stack().to(dtype)
    return fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.5),
        mesh_of("dp"),
        fsdp_unit_modules=[ResidualBlock],
        **arguments,
    )


def head_weight(model: nn.Module) -> Tensor:
    return whole(model.state_dict()["module.head.weight"]).double()


@shows("members", "is_param_fsdp_distributed")
def shows_is_param_fsdp_distributed(make: Make) -> None:
    model = wrapped(build_stack())
    assert model.is_param_fsdp_distributed
    assert list(map(id, model.module.parameters())) == list(map(id, model.parameters()))


@shows("step", "closure")
def shows_closure(make: Make) -> None:
    model, optimizer = with_optimizer(preserve_fp32_weights=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        backward(model)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    close(head_weight(model), build_stack().head.weight.detach() - 0.5 * mean_gradient(2), "weight")


@shows("step", "sync_grad_before_optimizer_step")
def shows_sync_grad_before_optimizer_step(make: Make) -> None:
    for wanted in (True, False):
        model, optimizer = with_optimizer(
            sync_model_each_microbatch=False, preserve_fp32_weights=False
        )
        before = head_weight(model)
        backward(model)
        optimizer.step(sync_grad_before_optimizer_step=wanted)
        assert torch.equal(head_weight(model), before) is not wanted


@shows("step", "install_optimized_model_weights")
@shows("members", "install_optimized_model_weights")
def shows_install_optimized_model_weights(make: Make) -> None:
    x = batch(0, 0, 0).bfloat16()
    model, optimizer = with_optimizer(torch.bfloat16)
    with torch.no_grad():
        before = model(x)
    backward(model, dtype=torch.bfloat16)
    optimizer.step(install_optimized_model_weights=False)
    with torch.no_grad():
        assert torch.equal(model(x), before)
    model.install_optimized_model_weights()
    with torch.no_grad():
        assert not torch.equal(model(x), before)


@shows("zero_grad", "set_to_none", "zero_grad_buffer")
def shows_zero_grad(make: Make) -> None:
    for keep, factor in ((True, 1), (False, 2)):
        model, optimizer = with_optimizer(sync_model_each_microbatch=False)
        backward(model)
        optimizer.zero_grad(zero_grad_buffer=keep)
        backward(model)
        model.finish_grad_sync()
        close(gradient(model), factor * mean_gradient(2), "gradient", 1e-5)
    optimizer.zero_grad(set_to_none=False)
    assert not any(parameter.grad.to_local().any() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@shows("members", "module", "ddp_config", "forward", "get_distributed_index")
def shows_plain_members(make: Make) -> None:
    shows_index_and_config(make)
    x = batch(0, 0, 0)
    model = wrapped(build_stack())
    assert torch.equal(model.forward(x), build_stack()(x)) and torch.equal(
        model(x=x, step=0), build_stack()(x)
    )


@shows("members", "manual_buffer_registration")
@shows("fully_shard_model", "fsdp_manual_registration")
def shows_manual_registration(make: Make) -> None:
    """Show that slots are assigned by the call; registration itself needs NCCL."""
    units = {"fsdp_unit_modules": [ResidualBlock]}
    with (
        mock.patch.object(memory_slots, "problems_of_nccl", return_value=[]),
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


@shows("members", "unshard", "reshard")
def shows_unshard_and_reshard(make: Make) -> None:
    model = wrapped(build_stack(), fsdp_unit_modules=[ResidualBlock])
    block, buffer = model.module.blocks[1], model._units[2].groups[0].compute
    for gather in (model.unshard, partial(model.unshard, async_op=True)):
        gather(block)
        assert buffer.is_allocated
        model.reshard(block)
        assert not buffer.is_allocated
    assert "'blocks.1'" in message_of(ValueError, model.unshard, block.up)


@shows("members", "memory_slots")
def shows_memory_slots(make: Make) -> None:
    model = wrapped(build_stack(), fsdp_unit_modules=[ResidualBlock], fsdp_double_buffer=True)
    assert model.memory_slots == {"weights": [], "gradients": []}
    backward(model)
    model.install_optimized_model_weights()
    assert model.memory_slots == {"weights": [896, 896, 512], "gradients": [896]}
    assert wrapped(build_stack()).memory_slots == {}


@shows("members", "no_sync", "is_last_microbatch")
def shows_no_sync(make: Make) -> None:
    model = wrapped(build_stack())
    assert model.is_last_microbatch is True
    with model.no_sync():
        assert model.is_last_microbatch is False
        backward(model)
    assert model.is_last_microbatch is True and all(
        parameter.grad is None for parameter in model.parameters()
    )
    backward(model)
    close(gradient(model), 2 * mean_gradient(2), "gradient", 1e-5)


@shows("members", "sync", "set_model_auto_sync")
def shows_sync(make: Make) -> None:
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
    model.zero_grad()
    model.set_model_auto_sync(True)
    backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("members", "start_param_sync", "synchronize_param_gather")
def shows_start_param_sync(make: Make) -> None:
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


@shows(
    "members",
    *("pre_forward", "post_forward", "pre_backward", "post_backward"),
    *("post_forward_release_module", "post_backward_release_module"),
)
def shows_calls_of_an_outside_schedule(make: Make) -> None:
    block = ResidualBlock().double()
    model = wrapped(nn.Sequential(block), fsdp_unit_modules=[ResidualBlock])
    storage = model._units[1].groups[0].compute.flat.untyped_storage()
    model.pre_forward()
    model.pre_forward(block)
    loss = block.down(block.up(block.norm(batch(0, dist.get_rank(), 0)))).sum()
    model.post_forward_release_module(block)
    assert not storage.nbytes()
    model.post_forward()
    model.pre_backward()
    model.pre_backward(block)
    assert storage.nbytes()
    loss.backward()
    model.post_backward_release_module(block)
    assert not storage.nbytes()
    model.post_backward()
    assert all(whole(parameter.grad).any() for parameter in model.parameters())


@shows(
    "members",
    "start_grad_sync",
    "finish_grad_sync",
    "synchronize_gradient_reduce",
    "attach_grad_to_optimizer_state",
)
def shows_gradient_members(make: Make) -> None:
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


@shows("members", "zero_grad_buffer", "scale_gradients", "zero_grad")
def shows_gradient_buffers(make: Make) -> None:
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
def shows_broadcast_params(make: Make) -> None:
    model = fully_shard_model(build_stack(), mesh_of("dp"), zero_dp_strategy=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(dist.get_rank())
    model.broadcast_params()
    weight = model.module.head.weight.full_tensor().detach().double()
    close(weight, build_stack().head.weight.detach(), "weight", 1e-6)


@shows("members", "stop_communication")
def shows_stop_communication(make: Make) -> None:
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
def shows_mixed_precision_context(make: Make) -> None:
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
    "named_parameters",
    "state_dict",
    "load_state_dict",
    "sharded_params",
    "groups",
    "initialiser",
    "checkpoint_ready",
)
def shows_what_a_module_has(make: Make) -> None:
    model = wrapped(build_stack())
    assert all(one is two for one, two in zip(model.parameters(), model.parameters(), strict=True))
    model.load_state_dict({name: value * 2 for name, value in build_stack().state_dict().items()})
    close(head_weight(model), 2 * build_stack().head.weight.detach(), "weight", 1e-5)
    assert len(model.sharded_params) == sum(len(group.names) for group in model.groups)

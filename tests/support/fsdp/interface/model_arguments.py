# SPDX-License-Identifier: Apache-2.0
"""Entries of the walk: arguments of the model, its wrapper and its precision policy."""

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron.fsdp import builder
from megatron.fsdp.gradient_sync import GradientError
from megatron_fsdp import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.support.fsdp.interface.walk import (
    REFUSED,
    Make,
    backward,
    gradient,
    mean_gradient,
    names_of_units,
    num_local,
    refusal,
    shows,
    shows_both,
    whole,
    wrapped,
)
from tests.support.fsdp.models import BATCH, WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import close
from tests.support.fsdp.watched_communication import (
    watching_collectives,
    watching_dtypes,
    watching_streams,
)
from tests.support.fsdp.watched_memory import look_at, peak_in_units, watching
from tests.support.fsdp.wrong_calls import message_of


@shows_both("fsdp_unit_modules")
def shows_fsdp_unit_modules(make: Make) -> None:
    for units in ([ResidualBlock], ["tests.support.fsdp.models.ResidualBlock"]):
        seen = names_of_units(make(build_stack(), fsdp_unit_modules=units))
        assert "blocks.0" in seen and "blocks.0.up" not in seen
    assert "blocks.0.up" in names_of_units(make(build_stack()))


@shows("fully_shard_model", "zero_dp_strategy")
def shows_zero_dp_strategy(make: Make) -> None:
    sizes = {}
    for names in (
        (0, "no_shard", ShardingStrategy.NO_SHARD),
        (3, "optim_grads_params", ShardingStrategy.OPTIM_GRADS_PARAMS),
        (1, "optim"),
        (2, "optim_grads"),
    ):
        models_of = [make(build_stack(), zero_dp_strategy=name) for name in names]
        assert len({num_local(model) for model in models_of}) == 1
        model = models_of[0]
        sizes[names[0]] = (num_local(model), look_at(model).bytes)
        backward(model)
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)
    assert sizes[0][0] > sizes[1][0] == sizes[2][0] == sizes[3][0]
    assert sizes[3][1] < sizes[2][1]


@shows_both("device")
def shows_device(make: Make) -> None:
    model = make(build_stack(), device="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    if make is fully_shard_model:
        assert "'abacus'" in message_of(ValueError, make, build_stack(), device="abacus")


@shows_both("init_model_with_meta_device")
def shows_init_model_with_meta_device(make: Make) -> None:
    with torch.device("meta"):
        module = build_stack()
    assert "init_model_with_meta_device" in message_of(ValueError, make, copy.deepcopy(module))
    torch.manual_seed(5)
    model = make(module, init_model_with_meta_device=True, fsdp_unit_modules=[ResidualBlock])
    torch.manual_seed(5)
    first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    close(
        whole(model.state_dict()["module.embed.weight"]).double(),
        first.weight.detach(),
        "what reset_parameters gives",
        1e-6,
    )
    backward(model)
    assert all(torch.isfinite(parameter.grad.to_local()).all() for parameter in model.parameters())


@shows_both("mixed_precision_policy")
@shows("MixedPrecisionPolicy", "main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
def shows_mixed_precision_policy(make: Make) -> None:
    make = make if make in (fully_shard_model, wrapped) else fully_shard_model
    for policy, head_weight, travels in (
        (MixedPrecisionPolicy(), torch.float32, torch.bfloat16),
        (MixedPrecisionPolicy(None), torch.bfloat16, torch.bfloat16),
        (MixedPrecisionPolicy(torch.float64, torch.float32), torch.float64, torch.float32),
        (
            MixedPrecisionPolicy(torch.float32, torch.float32, torch.float16),
            torch.float32,
            torch.float16,
        ),
    ):
        model = make(build_stack().bfloat16(), mixed_precision_policy=policy)
        with watching_dtypes() as dtypes:
            backward(model, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {head_weight}
        assert set(dtypes) == {travels}
        assert {group.gradients.shard.dtype for group in model.groups} == {
            policy.main_grads_dtype or torch.bfloat16
        }


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


def most_units_gathered(model: MegatronFSDP) -> int:
    """Return the most units gathered at once in the second forward, which knows their order."""
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        with watching(model) as samples:
            model(x)
    return peak_in_units(samples, "gathered")


@shows("fully_shard_model", "overlap_grad_reduce")
def shows_overlap_grad_reduce(make: Make) -> None:
    assert is_waited_for_at_once(
        make(build_stack(), fsdp_unit_modules=[ResidualBlock], overlap_grad_reduce=False), "reduce"
    )
    assert not is_waited_for_at_once(
        make(build_stack(), fsdp_unit_modules=[ResidualBlock]), "reduce"
    )


@shows("fully_shard_model", "overlap_param_gather")
def shows_overlap_param_gather(make: Make) -> None:
    assert (
        most_units_gathered(
            make(build_stack(), fsdp_unit_modules=[ResidualBlock], overlap_param_gather=False)
        )
        == 1
    )
    assert most_units_gathered(make(build_stack(), fsdp_unit_modules=[ResidualBlock])) == 2


@shows_both("sync_model_each_microbatch")
def shows_sync_model_each_microbatch(make: Make) -> None:
    model = make(build_stack(), sync_model_each_microbatch=True)
    backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)
    model = make(build_stack(), sync_model_each_microbatch=False)
    backward(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.finish_grad_sync()
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("fully_shard_model", "param_init_fn")
def shows_param_init_fn(make: Make) -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.25)

    with torch.device("meta"):
        module = build_stack()
    model = make(module, init_model_with_meta_device=True, param_init_fn=fill)
    assert all((whole(parameter) == 0.25).all() for parameter in model.parameters())
    message = message_of(ValueError, make, build_stack(), param_init_fn="zeros")
    assert "param_init_fn" in message and "'zeros'" in message


@shows("fully_shard_model", "find_unused_parameters")
def shows_find_unused_parameters(make: Make) -> None:
    for wanted in (False, True):
        module = build_stack()
        module.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        model = make(module, find_unused_parameters=wanted)
        backward(model)
        missing = [name for name, each in model.named_parameters() if each.grad is None]
        assert missing == (["module.unused"] if wanted else [])


@shows("fully_shard_model", "granularity")
def shows_granularity(make: Make) -> None:
    for wanted in ("prefer_rows", "rows"):
        model = make(nn.Linear(1001, 3, bias=False), granularity=wanted)
        (weight,) = model.parameters()
        assert weight.to_local().ndim == (2 if wanted == "rows" else 1)
    (weight,) = make(nn.Linear(1001, 3, bias=False), granularity=3003).parameters()
    assert weight.to_local().numel() in (0, 3003)
    pair = nn.Sequential(nn.Linear(48, 30, bias=False), nn.Linear(30, 48, bias=False))
    model = make(pair, granularity="prefer_tensors", disable_bucketing=True)
    assert all(each.to_local().numel() in (0, 1440) for each in model.parameters())
    message = message_of(ValueError, make, build_stack(), granularity="columns")
    assert "granularity" in message and "'columns'" in message


@shows("fully_shard_model", "preproc_state_dict_for_dcp_ckpt")
@shows("fully_shard_optimizer", "optimizer", "preproc_state_dict_for_dcp_ckpt")
def shows_preproc_state_dict_for_dcp_ckpt(make: Make) -> None:
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


@shows_both("report_nan_in_param_grad")
def shows_report_nan_in_param_grad(make: Make) -> None:
    check_report(make, "report_nan_in_param_grad")


@shows("fully_shard_model", "check_for_nan_in_grad")
def shows_check_for_nan_in_grad(make: Make) -> None:
    check_report(make, "check_for_nan_in_grad")


def check_report(make: Make, argument: str) -> None:
    for wanted in (True, False):
        module = build_stack()
        module.head.weight.register_hook(lambda value: value * float("nan"))
        model = make(module, **{argument: wanted})
        if wanted:
            assert "head.weight" in message_of(GradientError, backward, model)
        else:
            backward(model)


@shows("fully_shard_model", "average_in_collective")
def shows_average_in_collective(make: Make) -> None:
    for wanted, operation in ((True, dist.ReduceOp.AVG), (False, dist.ReduceOp.SUM)):
        model = make(build_stack(), average_in_collective=wanted)
        with watching_collectives() as calls:
            backward(model)
        assert all(op == operation for kind, _, op in calls if kind == "reduce")
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows_both("disable_bucketing")
def shows_disable_bucketing(make: Make) -> None:
    assert names_of_units(
        make(build_stack(), fsdp_unit_modules=[ResidualBlock], disable_bucketing=True)
    ) == {"root"}
    assert len(names_of_units(make(build_stack(), fsdp_unit_modules=[ResidualBlock]))) == 4


@shows_both("calculate_per_token_loss")
def shows_calculate_per_token_loss(make: Make) -> None:
    model = make(build_stack(), calculate_per_token_loss=True)
    backward(model)
    close(gradient(model), 2 * mean_gradient(2), "gradient", 1e-5)


@shows("fully_shard_model", "enable_fine_grained_param_gather")
def shows_enable_fine_grained_param_gather(make: Make) -> None:
    assert "blocks.0.up" in names_of_units(
        make(
            build_stack(), fsdp_unit_modules=[ResidualBlock], enable_fine_grained_param_gather=True
        )
    )


@shows("fully_shard_model", "use_decoupled_grad")
def shows_use_decoupled_grad(make: Make) -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.bfloat16)
    model = make(build_stack().bfloat16(), use_decoupled_grad=True, mixed_precision_policy=policy)
    backward(model, dtype=torch.bfloat16)
    assert all(
        parameter.grad is None and parameter.decoupled_grad.dtype == torch.bfloat16
        for parameter in model.parameters()
    )


@shows("fully_shard_model", "grad_reduce_in_fp32")
def shows_grad_reduce_in_fp32(make: Make) -> None:
    for wanted, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = make(build_stack().bfloat16(), grad_reduce_in_fp32=wanted)
        backward(model, dtype=torch.bfloat16)
        assert {group.gradients.shard.dtype for group in model.groups} == {dtype}


@shows("fully_shard_model", "preserve_fp32_weights")
def shows_preserve_fp32_weights(make: Make) -> None:
    for wanted, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        assert {
            p.dtype
            for p in make(build_stack().bfloat16(), preserve_fp32_weights=wanted).parameters()
        } == {dtype}


@shows_both("keep_fp8_transpose_cache")
def shows_keep_fp8_transpose_cache(make: Make) -> None:
    """Show that other weights change nothing; tests of quantized ones show the effect."""
    model = make(build_stack(), keep_fp8_transpose_cache=True)
    backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)
    message = message_of(ValueError, make, build_stack(), keep_fp8_transpose_cache="sometimes")
    assert "keep_fp8_transpose_cache expects True or False" in message


for _name, _kind in REFUSED.items():
    shows_both(_name)(refusal(_name, _kind))


def slots_of(make: Make, **arguments: Any) -> dict[str, list[int]]:
    """Return the bytes of the memory slots after one step."""
    model = make(build_stack(), fsdp_unit_modules=[ResidualBlock], **arguments)
    backward(model)
    model.install_optimized_model_weights()
    return model.memory_slots


@shows_both("fsdp_double_buffer")
def shows_double_buffer(make: Make) -> None:
    assert slots_of(make) == {}
    slots = slots_of(make, fsdp_double_buffer=True)
    assert [len(sizes) for sizes in slots.values()] == [3, 1]  # two blocks, the root; gradients
    assert slots["weights"][0] > slots["weights"][2]


@shows_both("fsdp_db_use_persist_buf_on_alloc_fail")
def shows_own_storage(make: Make) -> None:
    with mock.patch.object(builder, "allocate_slots", side_effect=RuntimeError("none left")):
        assert "bytes" in message_of(RuntimeError, slots_of, make, fsdp_double_buffer=True)
        slots_of(make, fsdp_double_buffer=True, fsdp_db_use_persist_buf_on_alloc_fail=True)


@shows_both("disable_symmetric_registration")
def shows_nothing_to_register(make: Make) -> None:
    """Show that the flag says how ``nccl_ub`` registers, and changes nothing without it."""
    model = make(build_stack(), disable_symmetric_registration=True)
    backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("fully_shard_model", "ignored_params")
def shows_ignored_params(make: Make) -> None:
    module = build_stack()
    model = make(module, ignored_params=module.embed.parameters())
    plain = [name for name, each in model.named_parameters() if type(each) is nn.Parameter]
    assert plain == ["module.embed.weight", "module.embed.bias"]
    assert "ignored_params" in message_of(ValueError, make, build_stack(), ignored_params=["embed"])


@shows("fully_shard_model", "offload_policy")
def shows_offload_policy(make: Make) -> None:
    model = make(build_stack(), offload_policy=CPUOffloadPolicy())
    assert all(group.memory.is_offloaded for group in model.groups)
    backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)
    assert "offload_policy" in message_of(ValueError, make, build_stack(), offload_policy=3)


@shows("fully_shard_model", "cuda_graph_mode")
def shows_cuda_graph_mode(make: Make) -> None:
    assert slots_of(make, cuda_graph_mode=True) == slots_of(make, fsdp_double_buffer=True)


@shows("fully_shard_model", "maxpool_double_buffer")
def shows_slots_of_one_size(make: Make) -> None:
    slots = slots_of(make, maxpool_double_buffer=True)
    assert len(slots["weights"]) == 3 and len(set(slots["weights"])) == 1


@shows("fully_shard_model", "suggested_communication_unit_size")
def shows_communication_unit_size(make: Make) -> None:
    stack = {"fsdp_unit_modules": [ResidualBlock]}
    # A block has 896 bytes with its padding; one is in use, and what fits is gathered ahead.
    for size, gathered in ((1, 1), (900, 2), (1800, 3)):
        model = make(build_stack(), **stack, suggested_communication_unit_size=size)
        assert most_units_gathered(model) == gathered
    small = make(build_stack(), **stack, suggested_communication_unit_size=1)
    assert names_of_units(small) - names_of_units(make(build_stack(), **stack)) == {"embed", "head"}


shows("MegatronFSDP", "fine_grained_recurse_module_types")(
    refusal("fine_grained_recurse_module_types")
)


@shows(
    "MegatronFSDP",
    "enable_fine_grained_param_gather_hook",
    "enable_fine_grained_param_gather_backward_hook",
)
def shows_fine_grained_hooks(make: Make) -> None:
    both = (
        "enable_fine_grained_param_gather_hook",
        "enable_fine_grained_param_gather_backward_hook",
    )
    assert "blocks.0.up" in names_of_units(
        make(build_stack(), fsdp_unit_modules=[ResidualBlock], **dict.fromkeys(both, True))
    )
    for name in both:
        assert name in message_of(NotImplementedError, make, build_stack(), **{name: True})

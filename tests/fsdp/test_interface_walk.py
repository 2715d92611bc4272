# SPDX-License-Identifier: Apache-2.0
"""A walk through the published interface: every argument, field, keyword and member does what its page says, which is seen from
outside, or is refused by name. A new one without an entry here fails.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron.fsdp.engine import collectives
from megatron.fsdp.engine.device import CpuStreams, Pending
from megatron.fsdp.gradient_sync import GradientError
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.fsdp import models
from tests.fsdp.models import BATCH, WIDTH, Block
from tests.fsdp.reference import batch, close, loss_of
from tests.fsdp.test_errors import message_of
from tests.fsdp.test_memory import look_at, peak_in_units, watching

Ranks = Callable[..., list[Any]]
Make = Callable[..., MegatronFSDP]
OWNERS: dict[str, Any] = {
    "fully_shard_model": fully_shard_model,
    "fully_shard_optimizer": fully_shard_optimizer,
    "MegatronFSDP": MegatronFSDP,
    "FSDPDistributedIndex": FSDPDistributedIndex,
    "DistributedDataParallelConfig": DistributedDataParallelConfig,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "step": None,
    "zero_grad": None,
    "members": None,
}
WALK: dict[str, dict[str, tuple[int, Callable[..., None]]]] = defaultdict(dict)
"""By owner and name: how many ranks it takes, and the function that shows the effect to one of them."""


def shows(
    owner: str, *names: str, world_size: int = 2
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated function shows what each of `names` of `owner` does."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            WALK[owner][name] = (world_size, function)
        return function

    return register


def shows_both(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An argument of both ways in: the function is handed one that makes a sharded model."""
    return lambda function: shows("MegatronFSDP", name)(shows("fully_shard_model", name)(function))


def mesh_of(*axes: str, sizes: tuple[int, ...] = ()) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=axes)


def wrapped(module: nn.Module, **arguments: Any) -> MegatronFSDP:
    """By the class, which synchronises on request only; the function does so after every backward."""
    return MegatronFSDP(
        module,
        FSDPDistributedIndex(mesh_of("dp")),
        **{"sync_model_each_microbatch": True, **arguments},
    )


def stack() -> nn.Module:
    return models.build("several_units")


def backward(model: nn.Module, rank: int | None = None, dtype: torch.dtype = torch.float64) -> None:
    loss_of(model(batch(0, dist.get_rank() if rank is None else rank, 0).to(dtype))).backward()


def whole(value: Tensor) -> Tensor:
    return uneven_dtensor_to_full_tensor(value) if isinstance(value, DTensor) else value


def gradient(model: nn.Module) -> Tensor:
    """The whole gradient of one weight; main weights are in fp32 unless something else is asked for."""
    return whole(dict(model.named_parameters())["module.head.weight"].grad).double()


def mean_gradient(num_ranks: int) -> Tensor:
    reference = stack()
    for rank in range(num_ranks):
        (loss_of(reference(batch(0, rank, 0))) / num_ranks).backward()
    return reference.head.weight.grad


def names_of_units(model: MegatronFSDP) -> set[str]:
    """What is seen to be gathered by itself."""
    with watching(model) as samples, torch.no_grad():
        model(torch.randn(BATCH, WIDTH, dtype=torch.float64))
    return {name for sample in samples for name in sample.gathered}


def num_local(model: nn.Module) -> int:
    return sum(parameter.to_local().numel() for parameter in model.parameters())


def num_on_all_ranks(model: nn.Module) -> int:
    count = torch.tensor(num_local(model))
    dist.all_reduce(count)
    return int(count)


@contextmanager
def watching_collectives() -> Iterator[list[tuple[str, Any, Any]]]:
    """Kind, group and operation of every gather and reduction."""
    calls: list[tuple[str, Any, Any]] = []
    gather, scatter = collectives._all_gather_single, collectives._reduce_scatter_single

    def watched_gather(full: Tensor, part: Tensor, group: Any, async_op: bool) -> Any:
        calls.append(("gather", group, None))
        return gather(full, part, group=group, async_op=async_op)

    def watched_scatter(part: Tensor, full: Tensor, op: Any, group: Any, async_op: bool) -> Any:
        calls.append(("reduce", group, op))
        return scatter(part, full, op=op, group=group, async_op=async_op)

    with patch.multiple(
        collectives, _all_gather_single=watched_gather, _reduce_scatter_single=watched_scatter
    ):
        yield calls


@contextmanager
def watching_dtypes() -> Iterator[list[torch.dtype]]:
    """In which dtypes gradients travel."""
    dtypes: list[torch.dtype] = []
    scatter = collectives._reduce_scatter_single

    def watched(part: Tensor, full: Tensor, **options: Any) -> Any:
        dtypes.append(full.dtype)
        return scatter(part, full, **options)

    with patch.object(collectives, "_reduce_scatter_single", watched):
        yield dtypes


# ---- fully_shard_model and MegatronFSDP
# ------------------------------------------------------------------------------------


@shows_both("module")
def shows_module(make: Make) -> None:
    module = stack()
    model = make(module)
    assert isinstance(model, MegatronFSDP) and model.module is module
    assert [name for name, _ in model.named_parameters()] == [
        "module." + name for name, _ in stack().named_parameters()
    ]


@shows("fully_shard_model", "device_mesh", world_size=4)
@shows("FSDPDistributedIndex", "device_mesh", world_size=4)
def shows_device_mesh(make: Make) -> None:
    mesh = mesh_of("dp", "other", sizes=(2, 2))
    if make is fully_shard_model:
        assert fully_shard_model(nn.Linear(4, 4), mesh["dp"]).get_distributed_index().size == 2
        assert fully_shard_model(nn.Linear(4, 4)).get_distributed_index().size == 4
    assert FSDPDistributedIndex(mesh["dp"]).size == 2
    assert FSDPDistributedIndex().get_root_mesh().size() == 4


@shows("fully_shard_model", "dp_shard_dim", world_size=4)
@shows("FSDPDistributedIndex", "dp_shard_dim", world_size=4)
def shows_dp_shard_dim(make: Make) -> None:
    mesh = mesh_of("a", "b", sizes=(1, 4))
    mesh["a", "b"]._flatten("both")
    for name, size in (("a", 1), ("b", 4), ("both", 4)):
        assert FSDPDistributedIndex(mesh, name).size == size
        assert num_on_all_ranks(fully_shard_model(nn.Linear(4, 7), mesh, name)) == 35 * 4 // size


@shows(
    "fully_shard_model",
    "dp_outer_dim",
    "hybrid_fsdp_group",
    "outer_dp_sharding_strategy",
    world_size=4,
)
@shows(
    "FSDPDistributedIndex", "dp_outer_dim", "hybrid_fsdp_group", "hsdp_outer_dp_shard", world_size=4
)
def shows_hybrid_sharding(make: Make) -> None:
    mesh = mesh_of("outer", "shard", sizes=(2, 2))
    group = mesh["outer", "shard"]._flatten("whole").get_group()
    arguments: dict[str, Any] = {
        "dp_shard_dim": "shard",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": group,
    }
    sizes = []
    for strategy in (0, 1):
        model = fully_shard_model(stack(), mesh, **arguments, outer_dp_sharding_strategy=strategy)
        backward(model)
        close(gradient(model), mean_gradient(4), "gradient", 1e-5)
        sizes.append(num_on_all_ranks(model))
    assert sizes[0] == 2 * sizes[1]
    index = FSDPDistributedIndex(mesh, **arguments, hsdp_outer_dp_shard=True)
    assert index.get_dp_group() is group and index.get_outer_fsdp_group() is mesh.get_group("outer")
    assert num_on_all_ranks(MegatronFSDP(stack(), index)) == sizes[1]
    for without in (fully_shard_model, FSDPDistributedIndex):
        first = (stack(),) if without is fully_shard_model else ()
        assert "dp_outer_dim" in message_of(
            ValueError, without, *first, mesh, "shard", hybrid_fsdp_group=group
        )


@shows("fully_shard_model", "tp_dim", world_size=4)
@shows("FSDPDistributedIndex", "tp_dim", world_size=4)
def shows_tp_dim(make: Make) -> None:
    mesh = mesh_of("dp", "tp", sizes=(2, 2))
    assert FSDPDistributedIndex(mesh, "dp", tp_dim="tp").dense.tensor.size() == 2
    torch.manual_seed(0)
    weight = torch.randn(6, 5)
    module = nn.Linear(5, 6, bias=False)
    module.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    model = fully_shard_model(module, mesh, "dp", tp_dim="tp")
    (value,) = model.state_dict().values()
    assert value.shape == (6, 5) and torch.equal(whole(value), weight)


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](self.dense(x))


@shows(
    "fully_shard_model",
    "expt_device_mesh",
    "hybrid_fsdp_expt_group",
    "fsdp_group_ag",
    "expt_fsdp_group_ag",
    world_size=4,
)
@shows(
    "FSDPDistributedIndex",
    "expt_device_mesh",
    "hybrid_fsdp_expt_group",
    "fsdp_group_ag",
    "expt_fsdp_group_ag",
    world_size=4,
)
def shows_experts_and_gather_groups(make: Make) -> None:
    mesh, expert_mesh = mesh_of("outer", "dp", sizes=(1, 4)), mesh_of("dp", "ep", sizes=(2, 2))
    gather, pairs = dist.new_group([0, 1, 2, 3]), [dist.new_group([0, 2]), dist.new_group([1, 3])]
    expert_gather = pairs[dist.get_rank() % 2]
    arguments: dict[str, Any] = {
        "dp_shard_dim": "dp",
        "dp_outer_dim": "outer",
        "expt_device_mesh": expert_mesh,
    }
    groups = {
        "hybrid_fsdp_expt_group": expert_gather,
        "fsdp_group_ag": gather,
        "expt_fsdp_group_ag": expert_gather,
    }
    index = FSDPDistributedIndex(mesh, **arguments, **groups)
    assert index.get_root_mesh(is_expert_parallel=True) is expert_mesh
    assert index.get_dp_group(is_expert_parallel=True) is expert_gather
    assert index.get_fsdp_group(independent_all_gather=True) is gather
    assert index.get_fsdp_group(True, independent_all_gather=True) is expert_gather
    assert index.get_fsdp_group(True) is expert_mesh.get_group("dp")
    model = fully_shard_model(WithExperts(), mesh, **arguments, **groups)
    own = {name: parameter.device_mesh.size() for name, parameter in model.named_parameters()}
    assert own == {name: 2 if "experts" in name else 4 for name in own}
    with watching_collectives() as calls:
        model(torch.ones(2, 4)).sum().backward()
    assert {id(group) for kind, group, _ in calls if kind == "gather"} == {
        id(gather),
        id(expert_gather),
    }
    assert {id(group) for kind, group, _ in calls if kind == "reduce"} == {
        id(mesh.get_group("dp")),
        id(expert_mesh.get_group("dp")),
    }


@shows_both("fsdp_unit_modules")
def shows_fsdp_unit_modules(make: Make) -> None:
    for units in ([Block], ["tests.fsdp.models.Block"]):
        seen = names_of_units(make(stack(), fsdp_unit_modules=units))
        assert "blocks.0" in seen and "blocks.0.up" not in seen
    assert "blocks.0.up" in names_of_units(make(stack()))


@shows("fully_shard_model", "zero_dp_strategy")
def shows_zero_dp_strategy(make: Make) -> None:
    sizes = {}
    for names in (
        (0, "no_shard", ShardingStrategy.NO_SHARD),
        (3, "optim_grads_params", ShardingStrategy.OPTIM_GRADS_PARAMS),
        (1, "optim"),
        (2, "optim_grads"),
    ):
        models_of = [make(stack(), zero_dp_strategy=name) for name in names]
        assert len({num_local(model) for model in models_of}) == 1
        model = models_of[0]
        sizes[names[0]] = (num_local(model), look_at(model).bytes)
        backward(model)
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)
    assert sizes[0][0] > sizes[1][0] == sizes[2][0] == sizes[3][0]
    assert sizes[3][1] < sizes[2][1]


@shows_both("device")
def shows_device(make: Make) -> None:
    model = make(stack(), device="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    if make is fully_shard_model:
        assert "'abacus'" in message_of(ValueError, make, stack(), device="abacus")


@shows_both("init_model_with_meta_device")
def shows_init_model_with_meta_device(make: Make) -> None:
    with torch.device("meta"):
        module = stack()
    assert "init_model_with_meta_device" in message_of(ValueError, make, copy.deepcopy(module))
    torch.manual_seed(5)
    model = make(module, init_model_with_meta_device=True, fsdp_unit_modules=[Block])
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
    for policy, weight, travels in (
        (MixedPrecisionPolicy(), torch.float32, torch.bfloat16),
        (MixedPrecisionPolicy(None), torch.bfloat16, torch.bfloat16),
        (MixedPrecisionPolicy(torch.float64, torch.float32), torch.float64, torch.float32),
        (
            MixedPrecisionPolicy(torch.float32, torch.float32, torch.float16),
            torch.float32,
            torch.float16,
        ),
    ):
        model = make(stack().bfloat16(), mixed_precision_policy=policy)
        with watching_dtypes() as dtypes:
            backward(model, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {weight}
        assert set(dtypes) == {travels}
        assert {group.gradients.shard.dtype for group in model.groups} == {
            policy.main_grads_dtype or torch.bfloat16
        }


@contextmanager
def watching_streams() -> Iterator[list[tuple[str, int]]]:
    """What is launched and waited for, in order."""
    events: list[tuple[str, int]] = []
    launch, wait = CpuStreams.launch, Pending.wait
    streams: dict[int, str] = {}
    kept: list[Pending] = []

    def watched_launch(self: CpuStreams, stream: str, *collectives_: Any) -> Pending:
        pending = launch(self, stream, *collectives_)
        kept.append(pending)
        streams[id(pending)] = stream
        events.append((stream, len(events)))
        return pending

    def watched_wait(self: Pending) -> None:
        if id(self) in streams:
            events.append(("waited for " + streams.pop(id(self)), len(events)))
        wait(self)

    with (
        patch.object(CpuStreams, "launch", watched_launch),
        patch.object(Pending, "wait", watched_wait),
    ):
        yield events


def is_waited_for_at_once(model: MegatronFSDP, stream: str) -> bool:
    """Whether nothing happens between a launch on `stream` and its end, in the second pass, which knows the order."""
    backward(model)
    with watching_streams() as events:
        backward(model)
    names = [name for name, _ in events]
    launched = [place for place, name in enumerate(names) if name == stream]
    assert launched
    return all(names[place + 1] == f"waited for {stream}" for place in launched)


def most_units_gathered(model: MegatronFSDP) -> int:
    """At once, in the second forward, which knows the order."""
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        with watching(model) as samples:
            model(x)
    return peak_in_units(samples, "gathered")


@shows("fully_shard_model", "overlap_grad_reduce")
def shows_overlap_grad_reduce(make: Make) -> None:
    assert is_waited_for_at_once(
        make(stack(), fsdp_unit_modules=[Block], overlap_grad_reduce=False), "reduce"
    )
    assert not is_waited_for_at_once(make(stack(), fsdp_unit_modules=[Block]), "reduce")


@shows("fully_shard_model", "overlap_param_gather")
def shows_overlap_param_gather(make: Make) -> None:
    assert (
        most_units_gathered(make(stack(), fsdp_unit_modules=[Block], overlap_param_gather=False))
        == 1
    )
    assert most_units_gathered(make(stack(), fsdp_unit_modules=[Block])) == 2


@shows_both("sync_model_each_microbatch")
def shows_sync_model_each_microbatch(make: Make) -> None:
    model = make(stack(), sync_model_each_microbatch=True)
    backward(model)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)
    model = make(stack(), sync_model_each_microbatch=False)
    backward(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.finish_grad_sync()
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("fully_shard_model", "preproc_state_dict_for_dcp_ckpt")
@shows("fully_shard_optimizer", "optimizer", "preproc_state_dict_for_dcp_ckpt")
def shows_preproc_state_dict_for_dcp_ckpt(make: Make) -> None:
    def is_ready(value: Any) -> bool:
        return hasattr(value._local_tensor, "__create_chunk_list__")

    for wanted in (True, False):
        model = fully_shard_model(stack(), preproc_state_dict_for_dcp_ckpt=wanted)
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
        module = stack()
        module.head.weight.register_hook(lambda value: value * float("nan"))
        model = make(module, **{argument: wanted})
        if wanted:
            assert "head.weight" in message_of(GradientError, backward, model)
        else:
            backward(model)


@shows("fully_shard_model", "average_in_collective")
def shows_average_in_collective(make: Make) -> None:
    for wanted, operation in ((True, dist.ReduceOp.AVG), (False, dist.ReduceOp.SUM)):
        model = make(stack(), average_in_collective=wanted)
        with watching_collectives() as calls:
            backward(model)
        assert all(op == operation for kind, _, op in calls if kind == "reduce")
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows_both("disable_bucketing")
def shows_disable_bucketing(make: Make) -> None:
    assert names_of_units(make(stack(), fsdp_unit_modules=[Block], disable_bucketing=True)) == {""}
    assert len(names_of_units(make(stack(), fsdp_unit_modules=[Block]))) == 5


@shows_both("calculate_per_token_loss")
def shows_calculate_per_token_loss(make: Make) -> None:
    model = make(stack(), calculate_per_token_loss=True)
    backward(model)
    close(gradient(model), 2 * mean_gradient(2), "gradient", 1e-5)


@shows("fully_shard_model", "enable_fine_grained_param_gather")
def shows_enable_fine_grained_param_gather(make: Make) -> None:
    assert "blocks.0.up" in names_of_units(
        make(stack(), fsdp_unit_modules=[Block], enable_fine_grained_param_gather=True)
    )


@shows("fully_shard_model", "use_decoupled_grad")
def shows_use_decoupled_grad(make: Make) -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.bfloat16)
    model = make(stack().bfloat16(), use_decoupled_grad=True, mixed_precision_policy=policy)
    backward(model, dtype=torch.bfloat16)
    assert all(
        parameter.grad is None and parameter.decoupled_grad.dtype == torch.bfloat16
        for parameter in model.parameters()
    )


@shows("fully_shard_model", "grad_reduce_in_fp32")
def shows_grad_reduce_in_fp32(make: Make) -> None:
    for wanted, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = make(stack().bfloat16(), grad_reduce_in_fp32=wanted)
        backward(model, dtype=torch.bfloat16)
        assert {group.gradients.shard.dtype for group in model.groups} == {dtype}


@shows("fully_shard_model", "preserve_fp32_weights")
def shows_preserve_fp32_weights(make: Make) -> None:
    for wanted, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        assert {
            p.dtype for p in make(stack().bfloat16(), preserve_fp32_weights=wanted).parameters()
        } == {dtype}


REFUSED = [
    "keep_fp8_transpose_cache",
    "nccl_ub",
    "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration",
]


def refusal(name: str) -> Callable[[Make], None]:
    def shows_refusal(make: Make) -> None:
        assert name in message_of(NotImplementedError, make, stack(), **{name: True})

    return shows_refusal


for _name in REFUSED:
    shows_both(_name)(refusal(_name))
for _name in ("cuda_graph_mode", "maxpool_double_buffer"):
    shows("fully_shard_model", _name)(refusal(_name))
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
        make(stack(), fsdp_unit_modules=[Block], **dict.fromkeys(both, True))
    )
    for name in both:
        assert name in message_of(NotImplementedError, make, stack(), **{name: True})


@shows("MegatronFSDP", "dist_index", "ddp_config")
def shows_index_and_config(make: Make) -> None:
    index, config = (
        FSDPDistributedIndex(mesh_of("dp")),
        DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
    )
    model = MegatronFSDP(stack(), index, config)
    assert (
        model.get_distributed_index() is index
        and model.ddp_config is config
        and model.strategy == 1
    )
    assert MegatronFSDP(stack(), index).strategy == 3


# ---- the configuration object
# ----------------------------------------------------------------------------------------------


def configured(module: nn.Module | None = None, **values: Any) -> MegatronFSDP:
    values = {"data_parallel_sharding_strategy": "optim_grads_params", **values}
    return wrapped(
        stack() if module is None else module,
        fsdp_unit_modules=[Block],
        ddp_config=DistributedDataParallelConfig(**values),
    )


@shows("DistributedDataParallelConfig", "overlap_grad_reduce", "overlap_param_gather")
def shows_overlap_of_config(make: Make) -> None:
    assert is_waited_for_at_once(configured(), "reduce") and most_units_gathered(configured()) == 1
    assert not is_waited_for_at_once(configured(overlap_grad_reduce=True), "reduce")
    assert most_units_gathered(configured(overlap_param_gather=True)) == 2


@shows("DistributedDataParallelConfig", "check_for_nan_in_grad")
def shows_check_for_nan_of_config(make: Make) -> None:
    check_report(configured, "check_for_nan_in_grad")


@shows("DistributedDataParallelConfig", "average_in_collective")
def shows_average_of_config(make: Make) -> None:
    shows_average_in_collective(configured)


@shows("DistributedDataParallelConfig", "data_parallel_sharding_strategy")
def shows_strategy_of_config(make: Make) -> None:
    shows_zero_dp_strategy(
        lambda module, zero_dp_strategy: configured(
            module, data_parallel_sharding_strategy=zero_dp_strategy
        )
    )


@shows("DistributedDataParallelConfig", "outer_dp_sharding_strategy", world_size=4)
def shows_outer_strategy_of_config(make: Make) -> None:
    index = FSDPDistributedIndex(mesh_of("outer", "shard", sizes=(2, 2)), "shard", "outer")
    sizes = []
    for outer in ("no_shard", "optim"):
        config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=3, outer_dp_sharding_strategy=outer
        )
        sizes.append(num_on_all_ranks(MegatronFSDP(stack(), index, config)))
    assert sizes[0] == 2 * sizes[1]


@shows(
    "DistributedDataParallelConfig",
    *(f"megatron_fsdp_{name}_dtype" for name in ("main_params", "main_grads", "grad_comm")),
)
def shows_dtypes_of_config(make: Make) -> None:
    def by_config(module: nn.Module, mixed_precision_policy: MixedPrecisionPolicy) -> MegatronFSDP:
        return configured(
            module,
            **{
                f"megatron_fsdp_{name}": value
                for name, value in vars(mixed_precision_policy).items()
            },
        )

    policy = MixedPrecisionPolicy(torch.float64, torch.float32, torch.float16)
    model = by_config(stack().bfloat16(), policy)
    with watching_dtypes() as dtypes:
        backward(model, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert {group.gradients.shard.dtype for group in model.groups} == {torch.float32}
    assert set(dtypes) == {torch.float16}


@shows("DistributedDataParallelConfig", "megatron_fsdp_use_decoupled_grad")
def shows_decoupled_of_config(make: Make) -> None:
    model = configured(megatron_fsdp_use_decoupled_grad=True)
    backward(model)
    assert all(
        parameter.grad is None and parameter.decoupled_grad is not None
        for parameter in model.parameters()
    )


@shows("DistributedDataParallelConfig", "megatron_fsdp_enable_fine_grained_param_gather")
def shows_fine_grained_of_config(make: Make) -> None:
    assert "blocks.0.up" in names_of_units(
        configured(megatron_fsdp_enable_fine_grained_param_gather=True)
    )


@shows(
    "DistributedDataParallelConfig",
    "bucket_size",
    "gradient_reduce_div_fusion",
    "fsdp_all_gather_in_start_param_sync",
)
def shows_what_has_nothing_to_change(make: Make) -> None:
    """They tune another way of communicating; the class says so."""
    for name, value in {
        "bucket_size": 1,
        "gradient_reduce_div_fusion": False,
        "fsdp_all_gather_in_start_param_sync": False,
    }.items():
        assert f"``{name}``" in DistributedDataParallelConfig.__doc__
        model = configured(**{name: value})
        backward(model)
        close(gradient(model), mean_gradient(2), name, 1e-5)


def refused_field(name: str) -> Callable[[Make], None]:
    def shows_refused_field(make: Make) -> None:
        assert name in message_of(NotImplementedError, configured, **{name: 1})

    return shows_refused_field


for _name in (
    *REFUSED,
    *("fp8_param_gather", "suggested_communication_unit_size", "fsdp_manual_registration"),
    *("megatron_fsdp_cuda_graph_mode", "megatron_fsdp_max_pool_double_buffer"),
):
    shows("DistributedDataParallelConfig", _name)(refused_field(_name))


# ---- the optimizer
# ---------------------------------------------------------------------------------------------------------


def with_optimizer(
    dtype: torch.dtype = torch.float64, **arguments: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = stack().to(dtype)
    return fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.5),
        mesh_of("dp"),
        fsdp_unit_modules=[Block],
        **arguments,
    )


def weight(model: nn.Module) -> Tensor:
    return whole(model.state_dict()["module.head.weight"]).double()


@shows("step", "closure")
def shows_closure(make: Make) -> None:
    model, optimizer = with_optimizer(preserve_fp32_weights=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        backward(model)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    close(weight(model), stack().head.weight.detach() - 0.5 * mean_gradient(2), "weight")


@shows("step", "sync_grad_before_optimizer_step")
def shows_sync_grad_before_optimizer_step(make: Make) -> None:
    for wanted in (True, False):
        model, optimizer = with_optimizer(
            sync_model_each_microbatch=False, preserve_fp32_weights=False
        )
        before = weight(model)
        backward(model)
        optimizer.step(sync_grad_before_optimizer_step=wanted)
        assert torch.equal(weight(model), before) is not wanted


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


# ---- members of MegatronFSDP
# -----------------------------------------------------------------------------------------------


@shows("members", "module", "ddp_config", "forward", "get_distributed_index")
def shows_plain_members(make: Make) -> None:
    shows_index_and_config(make)
    x = batch(0, 0, 0)
    model = wrapped(stack())
    assert torch.equal(model.forward(x), stack()(x)) and torch.equal(model(x=x, step=0), stack()(x))


@shows("members", "no_sync", "is_last_microbatch")
def shows_no_sync(make: Make) -> None:
    model = wrapped(stack())
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
    model = MegatronFSDP(stack(), FSDPDistributedIndex(mesh_of("dp")))
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
        model = wrapped(stack(), fsdp_unit_modules=[Block])
        model.start_param_sync()
        assert look_at(model).gathered == []  # level 3 gathers unit by unit
        model.start_param_sync(**arguments)
        model.synchronize_param_gather()
        assert len(look_at(model).gathered) == 5
        assert torch.equal(model.module.head.weight, stack().head.weight)
        backward(model)
        close(gradient(model), mean_gradient(2), "gradient", 1e-5)


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
            stack(), mesh_of("dp"), zero_dp_strategy=level, sync_model_each_microbatch=False
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
        stack(), mesh_of("dp"), zero_dp_strategy=0, sync_model_each_microbatch=False
    )
    backward(model)
    model.finish_grad_sync(force_all_reduce=True)
    close(gradient(model), mean_gradient(2), "gradient", 1e-5)


@shows("members", "zero_grad_buffer", "scale_gradients", "zero_grad")
def shows_gradient_buffers(make: Make) -> None:
    model = wrapped(stack(), sync_model_each_microbatch=False)
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
    model = fully_shard_model(stack(), mesh_of("dp"), zero_dp_strategy=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(dist.get_rank())
    model.broadcast_params()
    close(model.module.head.weight.detach(), stack().head.weight.detach(), "weight", 1e-6)


@shows("members", "stop_communication")
def shows_stop_communication(make: Make) -> None:
    model = wrapped(stack(), sync_model_each_microbatch=False)
    with model.no_sync():
        backward(model)
    model.start_grad_sync()
    model.start_param_sync(force_dispatch=True)
    with watching_streams() as events:
        model.stop_communication()
        model.synchronize_param_gather()
        model.synchronize_gradient_reduce()
    assert not events  # what was launched before is not watched, and nothing new begins
    assert torch.equal(model.module.head.weight, stack().head.weight)


@shows("members", "mixed_precision_context", "reset_mixed_precision_policy")
def shows_mixed_precision_context(make: Make) -> None:
    model = wrapped(
        stack().float(), mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32)
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
)
def shows_what_a_module_has(make: Make) -> None:
    model = wrapped(stack())
    assert all(one is two for one, two in zip(model.parameters(), model.parameters(), strict=True))
    model.load_state_dict({name: value * 2 for name, value in stack().state_dict().items()})
    close(weight(model), 2 * stack().head.weight.detach(), "weight", 1e-5)
    assert len(model.sharded_params) == sum(len(group.names) for group in model.groups)


# ---- the walk
# --------------------------------------------------------------------------------------------------------------


def walk(owner: str, name: str) -> None:
    _, function = WALK[owner][name]
    function(wrapped if owner == "MegatronFSDP" else fully_shard_model)


STEPS = [(owner, name) for owner, names in WALK.items() for name in names]


def _shared(owner: str, name: str) -> bool:
    """Whether an earlier step runs the same function the same way."""
    _, function = WALK[owner][name]
    makes_wrapped = owner == "MegatronFSDP"
    earlier = STEPS[: STEPS.index((owner, name))]
    return any(
        WALK[one][two][1] is function and (one == "MegatronFSDP") == makes_wrapped
        for one, two in earlier
    )


RUNS = [step for step in STEPS if not _shared(*step)]


@pytest.mark.parametrize(("owner", "name"), RUNS, ids=[".".join(step) for step in RUNS])
def test_what_the_page_says_is_seen_from_outside(ranks: Ranks, owner: str, name: str) -> None:
    world_size, _ = WALK[owner][name]
    ranks(world_size, walk, owner, name)


def names_of(owner: str) -> set[str]:
    if owner == "DistributedDataParallelConfig":
        return {field.name for field in fields(DistributedDataParallelConfig)}
    return set(inspect.signature(OWNERS[owner]).parameters)


@pytest.mark.parametrize("owner", [owner for owner, value in OWNERS.items() if value is not None])
def test_the_walk_leaves_no_argument_out(owner: str) -> None:
    assert set(WALK[owner]) == names_of(owner)


def test_the_walk_leaves_no_member_out() -> None:
    own = {name for name in vars(MegatronFSDP) if not name.startswith("_")}
    assert set(WALK["members"]) == own | {"module", "ddp_config"}


def keywords_of_a_sharded_optimizer() -> dict[str, list[str]]:
    _, optimizer = with_optimizer()
    return {
        name: list(inspect.signature(getattr(optimizer, name)).parameters)
        for name in ("step", "zero_grad")
    }


def test_the_walk_leaves_no_keyword_of_the_optimizer_out(ranks: Ranks) -> None:
    (keywords,) = ranks(1, keywords_of_a_sharded_optimizer)
    assert {name: set(WALK[name]) for name in keywords} == {
        name: set(each) for name, each in keywords.items()
    }


def by_position() -> None:
    mesh = mesh_of("dp", "other", sizes=(2, 1))
    module = stack()
    model, optimizer = fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        mesh,
        "dp",
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        [Block],
        "optim",
    )
    assert (
        isinstance(model, MegatronFSDP)
        and model.strategy == 1
        and isinstance(optimizer, torch.optim.SGD)
    )


def test_fully_shard_takes_the_arguments_of_fully_shard_model_in_their_order(ranks: Ranks) -> None:
    first, second, *others = inspect.signature(fully_shard).parameters
    assert [first, *others] == list(
        inspect.signature(fully_shard_model).parameters
    ) and second == "optimizer"
    ranks(2, by_position)


# ---- the documented examples
# -----------------------------------------------------------------------------------------------


class DocumentedModel(nn.Module):
    """Tensor parallelism of two by torch's DTensors, and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.dense = nn.Linear(WIDTH, 6, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        dense = nn.functional.linear(
            DTensor.from_local(x, self.mesh) if self.mesh else x, self.dense.weight
        )
        return (dense.full_tensor() if self.mesh else dense).mean(-1, keepdim=True) + self.experts[
            0
        ](x)

    mesh: DeviceMesh | None = None


def documented_mesh(sizes: tuple[int, int, int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
    mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    mesh[("dp_outer", "dp_shard", "cp")]._flatten("hsdp")
    ranks_of = mesh.mesh
    # Expert parallelism of one: the expert's data ranks are those of an outer slice, for every
    # tensor-parallel rank.
    expert_ranks = ranks_of[mesh.get_local_rank("dp_outer")].reshape(-1, sizes[3])
    expert_mesh = DeviceMesh.from_group(
        [mesh["dp_shard_cp"].get_group(), mesh["tp"].get_group()],
        "cpu",
        expert_ranks,
        mesh_dim_names=("dp_shard_cp", "tp"),
    )
    module, reference = DocumentedModel().double(), DocumentedModel().double()
    module.mesh = mesh["tp"]
    module.dense.weight = nn.Parameter(
        distribute_tensor(module.dense.weight.detach(), mesh["tp"], [Shard(0)])
    )
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        device_mesh=mesh,
        dp_shard_dim="dp_shard_cp",
        dp_outer_dim="dp_outer",
        tp_dim="tp",
        hybrid_fsdp_group=mesh["hsdp"].get_group(),
        hybrid_fsdp_expt_group=mesh["hsdp"].get_group(),
        expt_device_mesh=expert_mesh,
        fsdp_unit_modules=[nn.Linear],
        outer_dp_sharding_strategy=1,
        preserve_fp32_weights=False,
    )
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    place, num_places = mesh["hsdp"].get_local_rank(), mesh["hsdp"].size()
    for step in range(2):
        loss_of(model(batch(step, place, 0))).backward()
        (
            sum(loss_of(reference(batch(step, other, 0))) for other in range(num_places))
            / num_places
        ).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        for name, value in model.state_dict().items():
            close(
                whole(value),
                reference.get_parameter(name.removeprefix("module.")).detach(),
                f"{name} after step {step}",
                1e-9,
            )


@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (2, 2, 1, 2), (1, 2, 2, 2)], ids=str)
def test_the_documented_mesh(ranks: Ranks, sizes: tuple[int, int, int, int]) -> None:
    ranks(int(torch.tensor(sizes).prod()), documented_mesh, sizes)


def fresh(scale: float = 1.0, level: int = 3) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = models.build("scalars")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    return fully_shard(
        module,
        optimizer,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """On the same data everywhere, so that worlds of any size agree."""
    for step in range(first, last):
        loss_of(model(batch(step, 0, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_without_sharding(last: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build("scalars")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    train(module, optimizer, 0, last)
    return module, optimizer


def save_as_documented(path: str) -> None:
    model, optimizer = fresh()
    train(model, optimizer, 0, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)


def load_as_documented(path: str, level: int) -> None:
    model, optimizer = fresh(scale=-2.0, level=level)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 2, 4)
    expected, _ = trained_without_sharding(4)
    for name, value in model.state_dict().items():
        close(whole(value), expected.state_dict()[name.removeprefix("module.")], name)


def test_the_documented_checkpoint_goes_on_in_another_world(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, save_as_documented, str(tmp_path))
    ranks(2, load_as_documented, str(tmp_path), 3)
    ranks(1, load_as_documented, str(tmp_path), 0)


def torch_functions(path: str, full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = fresh()
    train(model, optimizer, 0, 2)
    weights, state = get_state_dict(model, optimizer, options=options)
    expected, expected_optimizer = trained_without_sharding(2)
    names = [name for name, _ in expected.named_parameters()]
    for number, name in enumerate(names):
        value = weights["module." + name]
        assert not full or not isinstance(value, DTensor)
        close(whole(value), expected.get_parameter(name).detach(), name)
        for slot in ("exp_avg", "exp_avg_sq"):
            moment = expected_optimizer.state_dict()["state"][number][slot]
            close(
                whole(state["state"]["module." + name][slot]).view(moment.shape),
                moment,
                f"{slot} of {name}",
            )

    other, other_optimizer = fresh(scale=-2.0)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=copy.deepcopy(weights),
        optim_state_dict=copy.deepcopy(state),
        options=options,
    )
    train(other, other_optimizer, 2, 4)
    train(expected, expected_optimizer, 2, 4)
    for name, value in other.state_dict().items():
        close(whole(value), expected.state_dict()[name.removeprefix("module.")], name)


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_torchs_state_dict_functions(ranks: Ranks, tmp_path: Path, full: bool) -> None:
    ranks(3, torch_functions, str(tmp_path), full)


def save_a_copy(path: str) -> None:
    model, optimizer = fresh()
    train(model, optimizer, 0, 2)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, 2, 3)
    dcp.save({"model": best}, checkpoint_id=path)


def load_the_copy(path: str) -> None:
    model, _ = fresh(scale=-2.0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    expected, _ = trained_without_sharding(2)
    for name, value in model.state_dict().items():
        close(whole(value), expected.state_dict()[name.removeprefix("module.")], name)


def test_a_deep_copy_of_a_state_dict_is_saved_and_loaded_elsewhere(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, save_a_copy, str(tmp_path))
    for world_size in (2, 3):
        ranks(world_size, load_the_copy, str(tmp_path))

# SPDX-License-Identifier: Apache-2.0
"""Trainings of `fully_shard` that run on the model; weights are compared afterwards.

Nothing is compared before the end: a host that reads values waits for them, and orders all streams.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import Offload
from megatron.fsdp.backends import slot_memory
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.support.cuda_model.calls_under_way import CALLS_UNDER_WAY, STARTED_BETWEEN
from tests.support.cuda_model.group_programs import groups_of_some_ranks
from tests.support.cuda_model.machine import cuda_model
from tests.support.cuda_model.offloaded import (
    offloaded_by_hand,
    offloaded_in_blocks,
    saved_behind,
    saved_behind_on_another_stream,
)
from tests.support.cuda_model.owners import owners_of_matrices, owners_of_slices
from tests.support.cuda_model.stacks import stack_on, step
from tests.support.fsdp.meshes import Meshes, device_type
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import (
    LEVELS,
    Case,
    batch,
    build,
    compare_by_global_name,
    loss_of,
    optimizer_over,
    sharded_backward,
    unsharded_training,
)
from tests.support.fsdp.subclasses import Master, RoundedLayer, RowScaled
from tools.cuda_model.groups import Groups, NcclOptions
from tools.cuda_model.machine import CudaModel
from tools.cuda_model.pools import ModelBackend

Program = Callable[[Meshes], "Callable[[], None] | None"]
"""Runs on the model; returns what compares results when the model is left."""


@dataclass(frozen=True)
class Scenario:
    """A program, the number of ranks that it runs on, and the backend of their group."""

    num_ranks: int
    program: Program = field(repr=False)
    backend: str = "nccl"


def reports_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Run scenarios on this rank, each on a model of its own; return what was reported."""
    meshes = Meshes()
    found = {}
    for name in names:
        with cuda_model(names_cuda=True, backend=SCENARIOS[name].backend) as model:
            compare = run(SCENARIOS[name].program, meshes, model)
        if compare is not None and not model.reports:
            compare()
        found[name] = [str(report) for report in model.reports]
    return found


def run(program: Program, meshes: Meshes, model: CudaModel) -> Callable[[], None] | None:
    """Run a program, whose end the host does not wait for."""
    before = torch.get_rng_state()
    try:
        return program(meshes)
    finally:
        torch.set_rng_state(before)


# ---- trainings of the tests' small models


def train(case: Case, meshes: Meshes) -> Callable[[], None]:
    """Train without looking at any value; return what compares the weights."""
    module = build(case.model, meshes.expert_places(case.mesh)).to(case.dtype)
    main = None if case.dtype == torch.float64 else torch.float32
    settings = {
        "mixed_precision_policy": MixedPrecisionPolicy(main, main),
        "fsdp_unit_modules": type(module).units,
        **case.settings,
    }
    model, optimizer = fully_shard(
        module,
        optimizer_over(module, case.optimizer),
        **meshes.arguments(case.mesh),
        sync_model_each_microbatch=case.sync in ("auto", "no_sync"),
        **settings,
    )
    for number in range(case.steps):
        sharded_backward(case, model, number)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluate:
            with torch.no_grad():
                model(batch(99, 0, 0).to(case.dtype), step=number)

    def compare() -> None:
        last = unsharded_training(case)[-1]
        weights = dict(model.named_parameters())
        compare_by_global_name(case, model, weights, last.weights, "weights", {})

    return compare


def case(
    model: str | Drawn = "several_units",
    num_ranks: int = 2,
    backend: str = "nccl",
    **options: Any,
) -> Scenario:
    """Return the training of one of the tests' models; other names are settings of the library."""
    fields = set(Case.__dataclass_fields__)
    settings = {key: value for key, value in options.items() if key not in fields}
    chosen = {key: value for key, value in options.items() if key in fields}
    program = partial(train, Case(model=model, settings=settings, **chosen))
    return Scenario(num_ranks, program, backend)


# ---- other ways through the library


def from_the_meta_device(level: int, meshes: Meshes) -> None:
    """Shard a model that has no values yet."""
    with torch.device("meta"):
        module = build_stack()
    model, optimizer = stack_on(level, meshes, module=module, init_model_with_meta_device=True)
    for number in range(2):
        step(model, optimizer, number)


def saved_and_loaded(level: int, meshes: Meshes) -> None:
    """Save a checkpoint, train on, load it and train again."""
    model, optimizer = stack_on(level, meshes)
    step(model, optimizer, 0)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder[0])
    step(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    step(model, optimizer, 1)


def decoupled_gradients(level: int, meshes: Meshes) -> None:
    """Let the optimizer find gradients on an attribute of their own, in bfloat16."""
    model = fully_shard_model(
        build_stack().bfloat16(),
        **meshes.arguments("flat"),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        use_decoupled_grad=True,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.bfloat16),
    )
    for number in range(2):
        loss_of(model(batch(number, dist.get_rank(), 0).bfloat16())).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                local, gradient = parameter.to_local(), parameter.decoupled_grad.to_local()
                local.sub_(gradient.float(), alpha=0.01)
                parameter.decoupled_grad = None
        model.install_optimized_model_weights()
        model.zero_grad_buffer()


def started_by_hand(level: int, meshes: Meshes) -> None:
    """Start the gathers of the next forward after the step, and reduce by hand."""
    model, optimizer = stack_on(level, meshes, sync_model_each_microbatch=False)
    for number in range(3):
        model.start_param_sync()
        for microbatch in range(2):
            loss_of(model(batch(number, dist.get_rank(), microbatch))).backward()
        model.start_grad_sync()
        model.finish_grad_sync()
        model.scale_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()


def gathered_as_codes(level: int, meshes: Meshes) -> None:
    """Train weights with FSDP2's all-gather extension, recomputed in the second step."""
    torch.manual_seed(4)
    module = nn.Sequential(RoundedLayer(16, 24, RowScaled), RoundedLayer(24, 16, Master)).double()
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        **meshes.arguments("flat"),
        fsdp_unit_modules=[RoundedLayer],
        zero_dp_strategy=level,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float64, torch.float64),
    )
    for number in range(3):
        x = torch.randn(6, 16, dtype=torch.float64, device=device_type())
        output = checkpoint(model, x, use_reentrant=False) if number == 1 else model(x)
        output.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def registered_by_hand(level: int, meshes: Meshes) -> None:
    """Register memory slots after each step, while gathers of the next forward are under way."""
    model, optimizer = stack_on(level, meshes, nccl_ub=True, fsdp_manual_registration=True)
    for number in range(3):
        step(model, optimizer, number)
        model.start_param_sync()
        model.manual_buffer_registration()
    step(model, optimizer, 3)
    slot_memory.deregister_all()
    dist.destroy_process_group()


def registered_and_dropped(level: int, meshes: Meshes) -> None:
    """Drop a model whose memory slots are registered."""
    model, optimizer = stack_on(level, meshes, nccl_ub=True)
    for number in range(2):
        step(model, optimizer, number)
    assert model.memory_slots["gradients"]
    del model, optimizer
    gc.collect()


def registered_locally(level: int, meshes: Meshes) -> Callable[[], None]:
    """Train with registered slots where NCCL refuses windows."""
    with patch.object(ModelBackend, "has_windows", False):
        settings = {"zero_dp_strategy": level, **REGISTERED}
        return train(Case(model="several_units", steps=4, settings=settings), meshes)


def with_high_priority(level: int, meshes: Meshes) -> Callable[[], None]:
    """Train with groups whose collectives go before compute."""
    with patch.object(Groups, "options", lambda *args: NcclOptions(is_high_priority_stream=True)):
        return train(Case(model="several_units", settings={"zero_dp_strategy": level}), meshes)


def whole_tensors(level: int, meshes: Meshes) -> None:
    """Gather parameters as torch's functions on DTensors do, while training."""
    model, optimizer = stack_on(level, meshes)
    for number in range(2):
        step(model, optimizer, number)
        for parameter in model.parameters():
            full_tensor(parameter).add_(1)
            with torch.no_grad():
                parameter.mul_(0.99)


def generation(level: int, meshes: Meshes) -> None:
    """Run forwards without gradients, of one input after the other."""
    model, optimizer = stack_on(level, meshes)
    step(model, optimizer, 0)
    model.eval()
    with torch.no_grad():
        x: Tensor = batch(0, 0, 0)
        for _ in range(3):
            x = torch.cat([x, model(x)[:, :1].expand(-1, x.shape[1])])
    model.train()
    step(model, optimizer, 1)


def edited_while_gathered(level: int, meshes: Meshes) -> None:
    """Read and edit main weights while the gathers of the next forward are under way."""
    model, optimizer = stack_on(level, meshes, sync_model_each_microbatch=False)
    for number in range(2):
        step(model, optimizer, number)
        model.start_param_sync()
        with torch.no_grad():
            for shard in [parameter.to_local() for parameter in model.parameters()]:
                shard.sum()  # gathers in place, at levels 1 and 2, only read it too
            for parameter in model.parameters():
                parameter.mul_(0.99)
        model.start_param_sync()
        optimizer.step()


def wrapped_on_another_stream(level: int, meshes: Meshes) -> Callable[[], None]:
    """Shard the module on a stream of its own, as Megatron-LM's loop does."""
    module = build_stack()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model, optimizer = stack_on(level, meshes, module=module)
    torch.cuda.current_stream().wait_stream(side)
    step(model, optimizer, 0)

    def compare() -> None:  # this keeps both: nothing allocates on that stream any more
        assert optimizer.param_groups
        for parameter in model.parameters():
            assert parameter.to_local().isfinite().all()

    return compare


EXPERTS = Drawn(layers=(DrawnLayer(hidden=7, num_experts=4), DrawnLayer(hidden=3)))
MODELS_OF_TESTS = (
    *("nested_units", "unit_called_twice", "parallel_branches", "tied_across_units"),
    *("tied_weight_as_argument", "unused_parameters", "unit_unused_in_some_steps"),
    *("frozen_in_part", "checkpoint_reentrant", "checkpoint_non_reentrant"),
    *("checkpoint_inside_reentrant", "edits_in_place", "called_under_no_grad"),
)
REGISTERED = {"nccl_ub": True}
WAYS: list[tuple[str, Callable[[int, Meshes], Callable[[], None] | None], tuple[int, ...]]] = [
    ("meta", from_the_meta_device, (1,)),
    ("checkpoint", saved_and_loaded, (3,)),
    ("decoupled", decoupled_gradients, (1,)),
    ("by hand", started_by_hand, (1, 3)),
    ("codes", gathered_as_codes, (3,)),
    ("registered by hand", registered_by_hand, (3,)),
    ("registered and dropped", registered_and_dropped, (3,)),
    ("registered locally", registered_locally, (3,)),
    ("high priority", with_high_priority, (3,)),
    ("groups of some ranks", groups_of_some_ranks, (1,)),
    ("whole tensors", whole_tensors, (3,)),
    ("generation", generation, (3,)),
    *CALLS_UNDER_WAY,
    # These two have found faults.
    ("edited while gathered", edited_while_gathered, (1, 2, 3)),
    ("wrapped on another stream", wrapped_on_another_stream, (1, 3)),
]
"""Other ways, with the levels at which they run."""
OTHER_WAYS: dict[str, Scenario] = {}
for name, program, levels in WAYS:
    for level in levels:
        OTHER_WAYS[f"{name} level{level}"] = Scenario(2, partial(program, level))
WITH_GLOO = "cpu:gloo,cuda:nccl"
"""The backend of groups that communicate tensors of the host too."""
OFFLOADED = {"offload_policy": Offload(), "backend": WITH_GLOO}
BF16 = {"dtype": torch.bfloat16}
FP16 = {
    "dtype": torch.float16,
    "loss_scale": 128.0,
    "mixed_precision_policy": MixedPrecisionPolicy(torch.float32, torch.float32, torch.float16),
}
"""Gradients are reduced in it too, and divided before that: their sum could overflow."""

SCENARIOS: dict[str, Scenario] = {  # by name
    **{f"level{n}": case(zero_dp_strategy=n, microbatches=2, clip=2.0) for n in LEVELS},
    **{f"level{n} bf16": case(zero_dp_strategy=n, **BF16) for n in (1, 3)},
    **{
        f"level{n} {sync}": case(zero_dp_strategy=n, microbatches=3, sync=sync)
        for n, sync in ((1, "step"), (2, "manual"), (3, "no_sync"))
    },
    **{
        f"fp16 level{n}": case(zero_dp_strategy=n, microbatches=2, sync=sync, **FP16)
        for n, sync in ((0, "no_sync"), (1, "manual"), (2, "auto"), (3, "no_sync"))
    },
    "fp16 hybrid level2": case(
        mesh="outer2", num_ranks=4, zero_dp_strategy=2, microbatches=2, **FP16
    ),
    "fp16 averaged level3": case(zero_dp_strategy=3, average_in_collective=True, **FP16),
    "level2 step bf16": case(zero_dp_strategy=2, microbatches=3, sync="step", **BF16),
    **{name: case(name, forwards=2) for name in MODELS_OF_TESTS},
    "unit_unused_in_some_steps": case("unit_unused_in_some_steps", forwards=2, steps=3),
    "hybrid level2": case(mesh="outer2", num_ranks=4, zero_dp_strategy=2, microbatches=2),
    "hybrid level1 bf16": case(
        mesh="outer2", num_ranks=4, zero_dp_strategy=1, microbatches=2, **BF16
    ),
    "hybrid sharded optimizer": case(
        mesh="outer2", num_ranks=4, outer_dp_sharding_strategy=1, microbatches=2
    ),
    "hybrid sharded optimizer bf16": case(
        mesh="outer2", num_ranks=4, outer_dp_sharding_strategy=1, sync="step", **BF16
    ),
    "hybrid level0 started between": Scenario(4, STARTED_BETWEEN),
    "experts": case(EXPERTS, mesh="ep2", num_ranks=4, microbatches=2),
    "level3 experts level1": case(
        EXPERTS, mesh="ep2", num_ranks=4, zero_dp_strategy=3, expert_zero_dp_strategy=1
    ),
    "level1 reduced in bf16": case(
        zero_dp_strategy=1,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16),
        **BF16,
    ),
    "group for all-gathers": case(mesh="gather_group"),
    "no overlap": case(overlap_param_gather=False, overlap_grad_reduce=False, microbatches=2),
    "slots": case(fsdp_double_buffer=True, microbatches=2, steps=4),
    "slots tied": case("tied_across_units", fsdp_double_buffer=True, steps=4),
    "slots bf16": case(fsdp_double_buffer=True, steps=4, **BF16),
    "slots level1": case(fsdp_double_buffer=True, zero_dp_strategy=1, steps=4, sync="step"),
    "slots of equal sizes": case(maxpool_double_buffer=True, steps=4, forwards=2),
    "slots held": case(cuda_graph_mode=True, steps=4, microbatches=2),
    "registered level3": case(zero_dp_strategy=3, microbatches=2, steps=4, **REGISTERED),
    "registered hybrid": case(mesh="outer2", num_ranks=4, steps=3, **REGISTERED),
    "registered for all-gathers": case(mesh="gather_group", zero_dp_strategy=0, **REGISTERED),
    "registered experts": case(EXPERTS, mesh="ep2", num_ranks=4, steps=3, **REGISTERED),
    **{
        f"offloaded level{n}": case(zero_dp_strategy=n, microbatches=num, clip=2.0, **OFFLOADED)
        for n, num in ((0, 2), (1, 2), (3, 1))
    },
    "offloaded to pageable memory": case(
        microbatches=2, clip=2.0, offload_policy=Offload(pins=False), backend=WITH_GLOO
    ),
    "offloaded, updated on the device": Scenario(
        2, partial(offloaded_in_blocks, "fused_adamw", True), WITH_GLOO
    ),
    "offloaded, updated on the device from pageable memory": Scenario(
        2, partial(offloaded_in_blocks, "adamw", False), WITH_GLOO
    ),
    **{
        f"offloaded by hand level{n}": Scenario(2, partial(offloaded_by_hand, n), WITH_GLOO)
        for n in (1, 3)
    },
    "saved behind level3": Scenario(2, partial(saved_behind, 3)),
    "saved behind another stream": Scenario(2, partial(saved_behind_on_another_stream, 3)),
    "offloaded bf16": case(
        microbatches=2,
        optimizer="adamw",
        **OFFLOADED | {"offload_policy": Offload(on_device=True)},
        **BF16,
    ),
    "units by bytes": case(suggested_communication_unit_size=2000, steps=4),
    "fine-grained": case(enable_fine_grained_param_gather=True, microbatches=2),
    "sums of tokens": case(calculate_per_token_loss=True, microbatches=2, zero_dp_strategy=2),
    # Of two ranks at level 3, each has whole matrices and nothing to send.
    **{f"owners level{n}": Scenario(3, partial(owners_of_matrices, n)) for n in (0, 1, 3)},
    **{f"owners tp2 level{n}": Scenario(4, partial(owners_of_slices, n)) for n in (1, 3)},
    **OTHER_WAYS,
    # Object collectives use gloo, so they make no communicator of NCCL.
    "objects by gloo, registered": case(
        mesh="gather_group", zero_dp_strategy=0, backend=WITH_GLOO, **REGISTERED
    ),
    "objects by gloo, owners": Scenario(
        4, partial(owners_of_matrices, 3, mesh="outer2", num_matrices=1), WITH_GLOO
    ),
}

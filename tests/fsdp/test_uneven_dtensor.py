# SPDX-License-Identifier: Apache-2.0
"""Functions on DTensors whose local parts torch would have cut otherwise, against the full tensors; on gloo."""

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.fsdp import MixedPrecisionPolicy, fully_shard
from megatron.fsdp.dtensor.chunked_tensor import as_chunked_tensor
from megatron.fsdp.dtensor.uneven import dtensor_over
from megatron.fsdp.dtensor.uneven_dtensor import (
    filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata,
    gather_uneven_dtensor_to_full_tensor,
    get_unflattened_state_dict,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor,
)
from tests.fsdp import models
from tests.fsdp.reference import batch, evaluate, loss_of, optimizer_over, shard_mesh

Ranks = Callable[..., list[Any]]


class Odd(models.Scaled):
    """A scalar, matrices that cuts divide inside of rows (`inner.weight` is another) and some that they cannot."""

    units = (nn.Linear,)

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.odd_cube = (
            nn.Parameter(torch.randn(3, 67)),
            nn.Parameter(torch.randn(3, 5, 23)),
        )
        self.rows, self.blocks = nn.Parameter(torch.randn(7, 8)), nn.Parameter(torch.randn(5, 2, 4))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return (
            super().forward(x)
            + self.odd.sum()
            + self.odd_cube.sum()
            + self.rows.prod()
            + self.blocks.prod()
        )


class TwoLayers(nn.Module):
    """Split by tensor parallelism, its first layer by rows (dim 0), its second by columns (dim 1)."""

    units = ()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = (
            nn.Linear(5, 8),
            nn.Linear(8, 5),
            nn.Parameter(torch.tensor(0.5)),
        )

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


CUT_INSIDE_ROWS = ("odd", "inner.weight", "element runs")
"""In names of tensors of which some rank holds more, or less, than boxes of whole rows."""

KINDS = ["level0", "level1", "level3", "hybrid", "hybrid_optim", "tensor"]


def build(
    kind: str, shift: float = 0.0, train: bool = True, ready: bool = True
) -> tuple[Any, Any, nn.Module, Any]:
    """A sharded model and optimizer, and the same without sharding; both after one step, with gradients of another."""
    torch.manual_seed(3)
    plain = (TwoLayers if kind == "tensor" else Odd)().double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(shift)
    module = copy.deepcopy(plain)
    size = dist.get_world_size()
    mesh: DeviceMesh = shard_mesh()
    settings: dict[str, Any] = {
        "zero_dp_strategy": int(kind[-1]) if kind.startswith("level") else 3
    }
    if kind.startswith("hybrid"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
        settings |= {
            "dp_shard_dim": "inner",
            "dp_outer_dim": "outer",
            "outer_dp_sharding_strategy": int(kind == "hybrid_optim"),
        }
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        settings |= {"dp_shard_dim": "data", "tp_dim": "tensor"}
        parallelize_module(
            module, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    model, optimizer = fully_shard(
        module,
        optimizer_over(module),
        device_mesh=mesh,
        fsdp_unit_modules=type(plain).units,
        mixed_precision_policy=MixedPrecisionPolicy(None),
        preproc_state_dict_for_dcp_ckpt=ready,
        **settings,
    )
    plain_optimizer = optimizer_over(plain)
    for step in range(2 if train else 0):
        run_step(model, step, optimizer if step == 0 else None)
        run_step(plain, step, plain_optimizer if step == 0 else None)
    return model, optimizer, plain, plain_optimizer


def run_step(model: nn.Module, step: int, optimizer: torch.optim.Optimizer | None) -> None:
    """On the same data on every rank."""
    loss_of(model(batch(step, 0, 0), step=step)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def everything(
    model: Any, optimizer: Any, plain: nn.Module, plain_optimizer: Any
) -> Iterator[tuple[str, DTensor, Tensor]]:
    """Every DTensor that a user gets hold of, beside the whole tensor."""
    state, optimizer_state = model.state_dict(), optimizer.state_dict()["state"]
    for position, ((name, sharded), whole) in enumerate(
        zip(model.named_parameters(), plain.parameters(), strict=True)
    ):
        yield f"{name} parameter", sharded, whole.detach()
        yield f"{name} gradient", sharded.grad, whole.grad
        yield f"{name} in the model's state dict", state[name], whole.detach()
        moment = plain_optimizer.state[whole]["exp_avg"]
        yield f"{name} state", optimizer.state[sharded]["exp_avg"], moment
        yield f"{name} in the optimizer's state dict", optimizer_state[position]["exp_avg"], moment


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    expected = expected.reshape(actual.shape)  # the optimizer sees a scalar as a vector of one
    torch.testing.assert_close(
        actual, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{name}: {text}"
    )


def uneven(whole: Tensor, mesh: DeviceMesh, sizes: list[int], dim: int = 0) -> DTensor:
    """A user's own DTensor with ranges of ``sizes`` of ``dim`` over a mesh of one axis."""
    local = whole.split(sizes, dim)[dist.get_rank()]
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def users_own() -> Iterator[tuple[str, DTensor, Tensor]]:
    """Four ranks. Even and uneven parts, empty ones, of one axis and of two, in both orders."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(6 * 10, dtype=torch.float64).view(6, 10)
    yield "even", distribute_tensor(whole, line, [Shard(0)]), whole
    yield "columns", distribute_tensor(whole, line, [Shard(1)]), whole
    yield "cube", distribute_tensor(whole.view(6, 5, 2), line, [Shard(1)]), whole.view(6, 5, 2)
    yield "replicated", distribute_tensor(whole, grid, [Replicate(), Replicate()]), whole
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
    ):
        yield str(placements), distribute_tensor(whole, grid, placements), whole
    yield "uneven", uneven(whole, line, [0, 4, 0, 2]), whole
    yield "uneven columns", uneven(whole, line, [1, 0, 7, 2], dim=1), whole
    yield "bf16", uneven(whole.bfloat16(), line, [5, 0, 1, 0]), whole.bfloat16()
    flat = whole.view(-1).split([13, 0, 40, 7])[dist.get_rank()]
    runs = DTensor.from_local(
        flat, line, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    yield "element runs", runs, whole
    for name, pieces in {
        "element runs of columns": [
            *whole[:, :3].reshape(-1).split([7, 11]),
            *whole[:, 3:].reshape(-1).split([0, 42]),
        ],
        "empty without a width": [whole[:, :4], whole.new_empty(0), whole[:2, 4:], whole[2:, 4:]],
    }.items():
        local = pieces[dist.get_rank()]
        dtensor = DTensor.from_local(
            local,
            grid,
            [Shard(1), Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        yield name, dtensor, whole


# ---- whole tensors
# ---------------------------------------------------------------------------------------------------


def gather(kind: str) -> None:
    tensors = users_own() if kind == "users_own" else everything(*build(kind))
    for name, dtensor, whole in tensors:
        full = uneven_dtensor_to_full_tensor(dtensor)
        assert full.shape == dtensor.shape
        assert not full.requires_grad
        close(full, whole, name)
        full.zero_()  # storage of its own
        replicated = redistribute_uneven_dtensor_to_replicated(dtensor)
        assert replicated.shape == dtensor.shape
        assert all(isinstance(placement, Replicate) for placement in replicated.placements)
        close(replicated.to_local(), whole, name)
    assert torch.equal(
        gather_uneven_dtensor_to_full_tensor(dtensor).to_local(), replicated.to_local()
    )
    assert gather_uneven_dtensor_to_full_tensor(dtensor, target_device="meta").to_local().is_meta


@pytest.mark.parametrize("kind", ["level0", "level3", "hybrid_optim", "tensor", "users_own"])
def test_whole_tensors_come_back(ranks: Ranks, kind: str) -> None:
    ranks(4, gather, kind)


def look_for_odd_cases() -> None:
    """What the other tests rely on: pieces that are element runs and pieces that are empty."""
    model = build("level3", train=False)[0]
    runs = {
        name: parameter._fsdp_sharded.flat_range for name, parameter in model.named_parameters()
    }
    cut = {name for name, run in runs.items() if not run.by_rows}
    assert cut == {"module.odd", "module.odd_cube", "module.inner.weight", "module.scale"}
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, {name: len(run.chunks()) for name, run in runs.items()})
    assert (
        {each["module.scale"] for each in counts}
        == {each["module.blocks"] for each in counts}
        == {0, 1}
    )
    assert max(each["module.odd_cube"] for each in counts) > 2


def test_models_here_have_element_runs_and_empty_pieces(ranks: Ranks) -> None:
    ranks(4, look_for_odd_cases)


def gather_odd_placements() -> None:
    line = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), line, [Partial()], run_check=False)
    assert torch.equal(uneven_dtensor_to_full_tensor(partial), torch.full((3,), 2.0))
    for function in (
        gather_and_compute_chunk_metadata,
        validate_uneven_dtensor,
        lambda value: split_dtensor(value, 1),
    ):
        with pytest.raises(NotImplementedError, match="redistribute first"):
            function(partial)
    nothing = uneven(torch.empty(0, 3), line, [0, 0])
    assert uneven_dtensor_to_full_tensor(nothing).shape == (0, 3)
    validate_uneven_dtensor(nothing)
    short = DTensor.from_local(
        torch.ones(2), line, [Shard(0)], run_check=False, shape=(5,), stride=(1,)
    )
    with pytest.raises(ValueError, match=r"hold 4 elements, but shape \(5,\) has 5"):
        uneven_dtensor_to_full_tensor(short)


def test_other_placements_and_wrong_sizes_are_summed_or_refused(ranks: Ranks) -> None:
    ranks(2, gather_odd_placements)


# ---- chunks
# ----------------------------------------------------------------------------------------------------------


def compare_chunks(kind: str) -> None:
    """Chunks say where the local elements lie in the whole tensor, before and after the DTensor is told."""
    tensors = users_own() if kind == "users_own" else everything(*build(kind))
    for name, dtensor, whole in tensors:
        local = dtensor._local_tensor.detach().reshape(-1)
        whole = whole.reshape(dtensor.shape)
        validate_uneven_dtensor(dtensor)
        try:
            chunk = gather_and_compute_chunk_metadata(dtensor)
        except NotImplementedError as error:
            assert "run of elements" in str(error)
            assert any(word in name for word in CUT_INSIDE_ROWS)
        else:
            assert len(chunk.sizes) == len(dtensor.shape) or not local.numel()
            assert chunk.sizes[:1].numel() if local.numel() else chunk.sizes[0] == 0
            close(local, at(whole, chunk.offsets, chunk.sizes) if local.numel() else local, name)
        storage = dtensor._local_tensor.untyped_storage().data_ptr()
        update_uneven_dtensor_chunk_metadata(dtensor)
        assert dtensor._local_tensor.untyped_storage().data_ptr() == storage
        chunks = dtensor.__create_chunk_list__()
        pieces = [at(whole, chunk.offsets, chunk.sizes) for chunk in chunks]
        close(local, torch.cat([local[:0], *pieces]), name)
        for item, piece in zip(dtensor.__create_write_items__(name, dtensor), pieces, strict=True):
            assert item.tensor_data.size == dtensor.shape
            shard = dtensor.__get_tensor_shard__(item.index)
            assert shard.shape == item.tensor_data.chunk.sizes
            close(shard.reshape(-1), piece, name)
        validate_uneven_dtensor(dtensor)
        close(uneven_dtensor_to_full_tensor(dtensor), whole, name)


def at(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return whole[
        tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
    ].reshape(-1)


@pytest.mark.parametrize("kind", [*KINDS, "users_own"])
def test_chunks_say_where_the_local_elements_lie(ranks: Ranks, kind: str) -> None:
    ranks(4, compare_chunks, kind)


def hold_nothing() -> list[Any]:
    dtensor = uneven(torch.arange(12.0).view(4, 3), init_device_mesh("cpu", (4,)), [1, 0, 3, 0])
    chunk = gather_and_compute_chunk_metadata(dtensor)
    return [tuple(chunk.offsets), tuple(chunk.sizes)]


def test_a_rank_with_nothing_has_size_zero(ranks: Ranks) -> None:
    assert ranks(4, hold_nothing) == [
        [(0, 0), (1, 3)],
        [(1, 0), (0, 3)],
        [(1, 0), (3, 3)],
        [(4, 0), (0, 3)],
    ]


class Count(TorchDispatchMode):
    """Collectives that are begun, whichever function began them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def count_collectives(kind: str) -> tuple[list[str], list[str], list[str]]:
    model, optimizer, *_ = build(kind)
    parameters = [*model.parameters()]
    with Count() as known:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        preprocess_state_dict_for_uneven_dtensor(state)
        for value in state["model"].values():
            list(split_dtensor(value, 2) if value.shape else ())
        for parameter in parameters:
            update_uneven_dtensor_chunk_metadata(parameter)
            update_uneven_dtensor_chunk_metadata(parameter.grad)
    with Count() as one:
        gather_and_compute_chunk_metadata(parameters[-1])
    with Count() as many:
        gradients = {
            str(number): parameter.grad.detach() for number, parameter in enumerate(parameters)
        }  # strangers
        preprocess_state_dict_for_uneven_dtensor(gradients)
    return known.names, one.names, many.names


@pytest.mark.parametrize("kind", ["level1", "hybrid_optim", "tensor"])
def test_what_the_layout_knows_is_not_communicated(ranks: Ranks, kind: str) -> None:
    axes = 2 if kind in ("hybrid_optim", "tensor") else 1
    for known, one, many in ranks(4, count_collectives, kind):
        assert known == []
        assert one == ["c10d.allreduce_.default"] * axes
        assert many.count("c10d.allreduce_.default") == axes  # for all of them together
        assert len(many) <= 4 * axes  # the rest is one comparison of names


def tell_different_tensors() -> str:
    line = init_device_mesh("cpu", (2,))
    state = {"first": uneven(torch.ones(3), line, [1, 2])}
    if dist.get_rank() == 1:
        state["second"] = uneven(torch.ones(3), line, [1, 2])
    with pytest.raises(ValueError) as error:
        preprocess_state_dict_for_uneven_dtensor(state)
    return str(error.value)


def test_state_dicts_that_differ_between_ranks_are_refused_everywhere(ranks: Ranks) -> None:
    first, second = ranks(2, tell_different_tensors)
    assert first == second
    assert "second" in first


# ---- checkpoints
# -----------------------------------------------------------------------------------------------------


def state_of(kind: str, way: str, shift: float, train: bool) -> tuple[Any, Any, dict[str, Any]]:
    """A state with plain DTensors that one of the two functions has made ready."""
    model, optimizer, *_ = build(kind, shift, train, ready=False)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if way == "parameters":
        state = {"model": dict(model.named_parameters()), "optimizer": optimizer.state_dict()}
    if way == "preprocess":
        assert preprocess_state_dict_for_uneven_dtensor(state) is state
    else:
        for path in filter_unflattened_state_dict(
            state, visit_condition=lambda item: isinstance(item, DTensor)
        ):
            update_uneven_dtensor_chunk_metadata(get_unflattened_state_dict(state, path))
    return model, optimizer, state


def save(kind: str, way: str, path: str) -> None:
    dcp.save(state_of(kind, way, 0.0, train=True)[2], checkpoint_id=path)


def load(kind: str, way: str, path: str) -> None:
    """Into other weights; what was made ready still trains, like the model that was never sharded."""
    model, optimizer, state = state_of(kind, way, 1.0, train=False)
    dcp.load(state, checkpoint_id=path)
    if way != "parameters":
        assert model.load_state_dict(state["model"], strict=False).missing_keys == []
    optimizer.load_state_dict(state["optimizer"])
    model.install_optimized_model_weights()
    plain, plain_optimizer = build(kind, train=True)[2:]
    plain_optimizer.zero_grad()
    for left, right in zip(evaluate(model, 0), evaluate(plain, 0), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)
    for step in range(2, 4):
        run_step(model, step, optimizer)
        run_step(plain, step, plain_optimizer)
    for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(uneven_dtensor_to_full_tensor(parameter), whole.detach(), name)


PATHS = [
    *[(way, "level3", 4, "level3", 2) for way in ("preprocess", "update", "parameters")],
    *[(way, "hybrid_optim", 4, "level1", 2) for way in ("preprocess", "parameters")],
    *[(way, "tensor", 4, "tensor", 2) for way in ("preprocess", "parameters")],
    ("update", "level0", 2, "hybrid_optim", 4),
]


@pytest.mark.parametrize(("way", "kind", "size", "new_kind", "new_size"), PATHS)
def test_checkpoint_of_what_was_made_ready_loads_elsewhere(
    ranks: Ranks, tmp_path: Path, way: str, kind: str, size: int, new_kind: str, new_size: int
) -> None:
    ranks(size, save, kind, way, str(tmp_path))
    ranks(new_size, load, new_kind, way, str(tmp_path))


def make_users_own() -> dict[str, DTensor]:
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12 * 4, dtype=torch.float64).view(12, 4)
    sizes = {2: [11, 1], 4: [0, 5, 6, 1]}[dist.get_world_size()]
    flat = whole.view(-1).split(
        [4 * size + 1 - 2 * (rank % 2) if rank < 2 else 4 * size for rank, size in enumerate(sizes)]
    )
    runs = DTensor.from_local(
        flat[dist.get_rank()].clone(),
        line,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    columns = uneven(
        whole.clone(), line, {2: [3, 1], 4: [1, 0, 2, 1]}[dist.get_world_size()], dim=1
    )
    return {"rows": uneven(whole.clone(), line, sizes), "runs": runs, "columns": columns}


def save_users_own(path: str) -> None:
    state = preprocess_state_dict_for_uneven_dtensor(make_users_own())
    halves = {
        f"{name}.{i}": half
        for name in ("rows", "runs")
        for i, half in enumerate(split_dtensor(state[name], 6))
    }
    strips = {
        f"strip.{i}": part for i, part in enumerate(split_dtensor(state["columns"], [1, 3], dim=1))
    }
    dcp.save({**state, **halves, **strips}, checkpoint_id=path)


def load_users_own(path: str) -> None:
    """Whole ones into whole ones and parts into parts of them, which share their storage."""
    expected = {
        name: uneven_dtensor_to_full_tensor(value) for name, value in make_users_own().items()
    }
    for in_parts in (False, True):
        state = make_users_own()
        preprocess_state_dict_for_uneven_dtensor(state)
        for value in state.values():
            value._local_tensor.zero_()
        wanted: dict[str, DTensor] = dict(state)
        if in_parts:
            wanted = {
                f"{name}.{i}": half
                for name in ("rows", "runs")
                for i, half in enumerate(split_dtensor(state[name], 6))
            }
            wanted |= {
                f"strip.{i}": part
                for i, part in enumerate(split_dtensor(state["columns"], [1, 3], dim=1))
            }
        dcp.load(wanted, checkpoint_id=path)
        for name, value in state.items():
            assert torch.equal(uneven_dtensor_to_full_tensor(value), expected[name]), name


def test_checkpoint_of_a_users_own_dtensors_and_their_parts(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_users_own, str(tmp_path))
    ranks(4, load_users_own, str(tmp_path))


def copy_and_pickle() -> None:
    state = preprocess_state_dict_for_uneven_dtensor(make_users_own())
    parts = [*split_dtensor(state["runs"], 6), *split_dtensor(state["columns"], [1, 3], dim=1)]
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    # torch clones a DTensor to copy it, and the clone's local part is a plain tensor, which has to
    # be told again.
    copies = preprocess_state_dict_for_uneven_dtensor({"copies": copy.deepcopy(parts)})["copies"]
    for others in (copies, torch.load(file)):
        for part, other in zip(parts, others, strict=True):
            assert other.__create_chunk_list__() == part.__create_chunk_list__()
            assert torch.equal(other.to_local(), part.to_local())
            other._local_tensor.add_(1)
            validate_uneven_dtensor(other)
    for name, value in make_users_own().items():  # the copies are copies
        assert torch.equal(
            uneven_dtensor_to_full_tensor(state[name]), uneven_dtensor_to_full_tensor(value)
        ), name


def test_torch_save_keeps_places_and_copies_are_told_again(ranks: Ranks) -> None:
    ranks(2, copy_and_pickle)


# ---- validation
# ------------------------------------------------------------------------------------------------------


def claim(rows: list[tuple[int, int]]) -> str:
    """The error, if there is one, where each rank says that it holds these rows of [4, 3]."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    begin, end = rows[dist.get_rank()]
    local = as_chunked_tensor(torch.zeros(end - begin, 3), [((begin, 0), (end - begin, 3))], (4, 3))
    try:
        validate_uneven_dtensor(dtensor_over(local, mesh, [Shard(0)], (4, 3)))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(0, 2), (2, 4)], ""),
        ([(0, 3), (2, 4)], "[0:3, 0:3] and [2:4, 0:3] overlap"),
        ([(0, 4), (0, 4)], "[0:4, 0:3] and [0:4, 0:3] overlap"),
        ([(0, 1), (2, 4)], "3 elements are held by no rank"),
        ([(0, 2), (2, 5)], "rank 1: [2:5, 0:3] reaches beyond the shape"),
    ],
)
def test_overlaps_holes_and_excess_are_found(
    ranks: Ranks, rows: list[tuple[int, int]], problem: str
) -> None:
    messages = ranks(2, claim, rows)
    assert messages[0] == messages[1]
    assert problem in messages[0]
    assert bool(problem) == bool(messages[0])


def cut_wrongly() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    copies = distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()])
    update_uneven_dtensor_chunk_metadata(copies)
    copies._local_tensor.chunks = (((rank, 0), (4 - rank, 3)),)
    local = {"few": torch.zeros(1, 3), "many": torch.zeros(3, 3), "narrow": torch.zeros(2, 2)}
    made = {
        name: DTensor.from_local(
            value, mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1)
        )
        for name, value in local.items()
    }
    messages = []
    for dtensor in (copies, *made.values()):
        with pytest.raises(ValueError) as error:
            validate_uneven_dtensor(dtensor)
        messages.append(str(error.value))
    return messages


def test_local_parts_of_wrong_sizes_are_found(ranks: Ranks) -> None:
    left, right = ranks(2, cut_wrongly)
    assert left == right
    copies, few, many, narrow = left
    assert "rank 1 holds 12 elements, but its chunks 9" in copies
    assert "rank 1 does not hold the same chunks as rank 0" in copies
    assert "6 elements are held by no rank" in few
    assert "[3:6, 0:3] reaches beyond the shape" in many
    assert "4 elements are held by no rank" in narrow


# ---- splitting
# -------------------------------------------------------------------------------------------------------


def split_everything(kind: str) -> None:
    tensors = users_own() if kind == "users_own" else everything(*build(kind))
    for name, dtensor, whole in tensors:
        if ("'s state dict" in name and "model" not in name) or name.endswith("state"):
            continue  # like gradients, and like what is in the model's state dict
        for dim in range(dtensor.ndim):
            size = dtensor.shape[dim]
            for sections in (-(-size // 3), [1, 0, size - 1]):
                compare_parts(
                    f"{name} {dim} {sections}", dtensor, whole.reshape(dtensor.shape), sections, dim
                )
        if dtensor.ndim:
            compare_parts(
                name,
                dtensor,
                whole.reshape(dtensor.shape),
                max(dtensor.shape[0] - 1, 1),
                -dtensor.ndim,
            )


def compare_parts(name: str, dtensor: DTensor, whole: Tensor, sections: Any, dim: int) -> None:
    try:
        parts = split_dtensor(dtensor, sections, dim)
    except NotImplementedError:
        assert dim > 0
        assert any(word in name for word in CUT_INSIDE_ROWS)
        return
    expected = whole.split(sections, dim)
    for part, values in zip(parts, expected, strict=True):
        assert part.shape == values.shape, name
        assert (part.device_mesh, part.placements) == (dtensor.device_mesh, dtensor.placements)
        storages = [each._local_tensor.untyped_storage().data_ptr() for each in (part, dtensor)]
        assert part._local_tensor.numel() == 0 or storages[0] == storages[1], name
        close(uneven_dtensor_to_full_tensor(part), values, name)
        chunks = [at(values, chunk.offsets, chunk.sizes) for chunk in part.__create_chunk_list__()]
        local = part._local_tensor.detach().reshape(-1)
        close(local, torch.cat([local[:0], *chunks]), name)
    validate_uneven_dtensor(part)


@pytest.mark.parametrize("kind", ["level3", "hybrid_optim", "tensor", "users_own"])
def test_parts_are_those_of_torch_split(ranks: Ranks, kind: str) -> None:
    ranks(4, split_everything, kind)


def split_wrongly() -> None:
    mesh = init_device_mesh("cpu", (2,))
    matrix = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    for sections, dim, message in [
        (0, 0, "at least 1"),
        (-1, 0, "at least 1"),
        ([1, 2], 0, "add up to 4"),
        ([5, -1], 0, "add up to 4"),
        (1, 2, "a dim of"),
    ]:
        with pytest.raises(
            ValueError, match=message
        ):  # at the call, not when the first part is asked for
            split_dtensor(matrix, sections, dim)
    with pytest.raises(ValueError, match="a dim of"):
        split_dtensor(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]), 1)
    halves = split_dtensor(matrix, 2, update_uneven_dtensor_chunk_meta=True)
    assert isinstance(halves, Iterator)
    chunks = [[tuple(chunk.sizes) for chunk in half.__create_chunk_list__()] for half in halves]
    assert chunks == ([[(2, 3)], []] if dist.get_rank() == 0 else [[], [(2, 3)]])


def test_wrong_sections_are_refused_at_the_call(ranks: Ranks) -> None:
    ranks(2, split_wrongly)


# ---- nested state dicts
# ----------------------------------------------------------------------------------------------


def test_paths_lead_to_the_items_that_were_asked_for() -> None:
    state = {"a": {"b": 1, 2: "text"}, "list": [3, {"c": 4}, (5,)], "empty": {}}
    paths = filter_unflattened_state_dict(state, visit_condition=lambda item: isinstance(item, int))
    assert paths == [["a", "b"], ["list", 0], ["list", 1, "c"], ["list", 2, 0]]
    assert [get_unflattened_state_dict(state, path) for path in paths] == [1, 3, 4, 5]
    assert filter_unflattened_state_dict(state) == []
    assert filter_unflattened_state_dict(state["a"], ["a"], lambda item: item == "text") == [
        ["a", 2]
    ]
    assert get_unflattened_state_dict(state) is state
    with pytest.raises(KeyError):
        get_unflattened_state_dict(state, ["a", "stranger"])


def test_signatures() -> None:
    def defaults(function: Callable[..., Any]) -> dict[str, Any]:
        return {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
        }

    required = inspect.Parameter.empty
    assert defaults(split_dtensor) == {
        **dict.fromkeys(["dtensor", "split_size_or_sections"], required),
        "dim": 0,
        "update_uneven_dtensor_chunk_meta": False,
    }
    assert defaults(gather_uneven_dtensor_to_full_tensor) == {
        "dtensor": required,
        "target_device": None,
    }
    assert defaults(get_unflattened_state_dict) == {"state_dict": required, "key_chain": []}
    assert list(defaults(filter_unflattened_state_dict)) == [
        "state_dict",
        "key_chain",
        "visit_condition",
    ]

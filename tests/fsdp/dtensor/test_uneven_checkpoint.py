# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DTensors that were annotated with the offsets of their local parts."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.uneven_dtensor import (
    filter_unflattened_state_dict,
    get_unflattened_state_dict,
    preprocess_state_dict_for_uneven_dtensor,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor,
)
from tests.support.fsdp.dtensor.dtensors import build, close, run_step, uneven
from tests.support.fsdp.reference import Ranks, evaluate, on_ranks


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


def state_of(kind: str, way: str, shift: float, train: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Return a state with plain DTensors that one of the two functions has prepared."""
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
    """Load into other weights, then train on like the model that was never sharded."""
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
    ("preprocess", "level3", 4, "level3", 2),
    ("parameters", "hybrid_optim", 4, "level1", 2),
    ("preprocess", "tensor", 4, "tensor", 2),
    ("update", "level0", 2, "hybrid_optim", 4),
]


@pytest.mark.always("preprocess-level3-*")
@pytest.mark.parametrize(("way", "kind", "size", "new_kind", "new_size"), PATHS)
def test_checkpoint_of_prepared_state_loads_into_another_layout(
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
    dcp.save({**state, **parts_of(state)}, checkpoint_id=path)


def parts_of(state: dict[str, DTensor]) -> dict[str, DTensor]:
    """Return halves of rows and of element runs, and strips of columns."""
    parts = {}
    for name in ("rows", "runs"):
        for number, half in enumerate(split_dtensor(state[name], 6)):
            parts[f"{name}.{number}"] = half
    for number, strip in enumerate(split_dtensor(state["columns"], [1, 3], dim=1)):
        parts[f"strip.{number}"] = strip
    return parts


def load_users_own(path: str) -> None:
    """Load whole DTensors, and then parts of them that share their storage."""
    expected = {
        name: uneven_dtensor_to_full_tensor(value) for name, value in make_users_own().items()
    }
    for in_parts in (False, True):
        state = make_users_own()
        preprocess_state_dict_for_uneven_dtensor(state)
        for value in state.values():
            value._local_tensor.zero_()
        dcp.load(parts_of(state) if in_parts else dict(state), checkpoint_id=path)
        for name, value in state.items():
            assert torch.equal(uneven_dtensor_to_full_tensor(value), expected[name]), name


def test_checkpoint_of_a_users_own_dtensors_and_their_parts(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_users_own, str(tmp_path))
    ranks(4, load_users_own, str(tmp_path))


@on_ranks(2)
def test_torch_save_keeps_chunks_and_copies_are_annotated_again() -> None:
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

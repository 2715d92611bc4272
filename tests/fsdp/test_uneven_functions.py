# SPDX-License-Identifier: Apache-2.0
"""The published functions on uneven DTensors, against the whole tensors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron_fsdp.uneven_dtensor import (
    filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata,
    gather_uneven_dtensor_to_full_tensor,
    get_unflattened_state_dict,
    redistribute_uneven_dtensor_to_replicated,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    validate_uneven_dtensor,
)
from tests.fsdp.dtensor.test_tensor_part import at
from tests.support.fsdp.dtensor.dtensors import (
    CUT_INSIDE_ROWS,
    build,
    close,
    everything,
    uneven,
    users_own,
)
from tests.support.fsdp.reference import on_ranks


@pytest.mark.always("level3", "users_own")
@pytest.mark.parametrize("kind", ["level0", "level3", "hybrid_optim", "tensor", "users_own"])
@on_ranks(4)
def test_whole_tensors_are_gathered(kind: str) -> None:
    is_users_own = kind == "users_own"
    tensors = users_own(with_runs_of_columns=True) if is_users_own else everything(*build(kind))
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


@on_ranks(4)
def test_the_models_have_element_runs_and_empty_shards() -> None:
    """Check that some local parts here are element runs and some are empty."""
    model = build("level3", train=False)[0]
    runs = {
        name: sharded_param_of(parameter).flat_range for name, parameter in model.named_parameters()
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


@on_ranks(2)
def test_other_placements_and_wrong_sizes_are_summed_or_refused() -> None:
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
    for function in (
        uneven_dtensor_to_full_tensor,
        gather_and_compute_chunk_metadata,
        validate_uneven_dtensor,
        lambda value: split_dtensor(value, 1),
    ):
        with pytest.raises(TypeError, match="expects a DTensor but got Tensor"):
            function(torch.ones(3))
    nothing = uneven(torch.empty(0, 3), line, [0, 0])
    assert uneven_dtensor_to_full_tensor(nothing).shape == (0, 3)
    validate_uneven_dtensor(nothing)
    short = DTensor.from_local(
        torch.ones(2), line, [Shard(0)], run_check=False, shape=(5,), stride=(1,)
    )
    with pytest.raises(ValueError, match=r"have 4 elements, but shape \(5,\) has 5"):
        uneven_dtensor_to_full_tensor(short)


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["level3", "tensor", "users_own"])
@on_ranks(4)
def test_parts_are_those_of_torch_split(kind: str) -> None:
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


@on_ranks(2)
def test_wrong_sections_are_refused_at_the_call() -> None:
    mesh = init_device_mesh("cpu", (2,))
    matrix = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    for sections, dim, message in [
        (0, 0, "split_size can only be 0"),
        (-1, 0, "split_size be non-negative"),
        ([1, 2], 0, "sum exactly to 4"),
        ([5, -1], 0, "non-negative"),
        (1, 2, "out of range"),
    ]:
        # At the call, not when the first part is asked for.
        with pytest.raises((RuntimeError, IndexError), match=message):
            split_dtensor(matrix, sections, dim)
    with pytest.raises(RuntimeError, match="1-dimensional"):
        split_dtensor(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]), 1)
    halves = split_dtensor(matrix, 2, update_uneven_dtensor_chunk_meta=True)
    assert isinstance(halves, Iterator)
    chunks = [[tuple(chunk.sizes) for chunk in half.__create_chunk_list__()] for half in halves]
    assert chunks == ([[(2, 3)], []] if dist.get_rank() == 0 else [[], [(2, 3)]])


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

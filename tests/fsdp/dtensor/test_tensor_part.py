# SPDX-License-Identifier: Apache-2.0
"""Chunks tell where local elements lie in the whole tensor, often without communication."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.fsdp.dtensor.tensor_part import TensorPart, as_chunked_tensor
from megatron.fsdp.dtensor.uneven_dtensor import dtensor_over
from megatron_fsdp.uneven_dtensor import (
    gather_and_compute_chunk_metadata,
    preprocess_state_dict_for_uneven_dtensor,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor,
)
from tests.support.fsdp.dtensor.dtensors import (
    CUT_INSIDE_ROWS,
    build,
    close,
    everything,
    uneven,
    users_own,
)
from tests.support.fsdp.reference import Ranks, on_ranks


def at(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return whole[
        tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
    ].reshape(-1)


@pytest.mark.always("users_own")
@pytest.mark.parametrize("kind", ["level1", "level3", "hybrid_optim", "tensor", "users_own"])
@on_ranks(4)
def test_chunks_have_the_offsets_of_the_local_elements(kind: str) -> None:
    """Compare chunks with the whole tensor, before and after the DTensor is annotated."""
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
        parts = [at(whole, chunk.offsets, chunk.sizes) for chunk in chunks]
        close(local, torch.cat([local[:0], *parts]), name)
        for item, part in zip(dtensor.__create_write_items__(name, dtensor), parts, strict=True):
            assert item.tensor_data.size == dtensor.shape
            shard = dtensor.__get_tensor_shard__(item.index)
            assert shard.shape == item.tensor_data.chunk.sizes
            close(shard.reshape(-1), part, name)
        validate_uneven_dtensor(dtensor)
        close(uneven_dtensor_to_full_tensor(dtensor), whole, name)


def own_nothing() -> list[Any]:
    dtensor = uneven(torch.arange(12.0).view(4, 3), init_device_mesh("cpu", (4,)), [1, 0, 3, 0])
    chunk = gather_and_compute_chunk_metadata(dtensor)
    return [tuple(chunk.offsets), tuple(chunk.sizes)]


def test_a_rank_with_nothing_has_size_zero(ranks: Ranks) -> None:
    assert ranks(4, own_nothing) == [
        [(0, 0), (1, 3)],
        [(1, 0), (0, 3)],
        [(1, 0), (3, 3)],
        [(4, 0), (0, 3)],
    ]


class Count(TorchDispatchMode):
    """The names of all collectives that are begun, whichever function began them."""

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
        preprocess_state_dict_for_uneven_dtensor({"moment": parameters[0].grad * 2})
    with Count() as one:
        gather_and_compute_chunk_metadata(parameters[-1])
    with Count() as many:
        gradients = {}
        for number, parameter in enumerate(parameters):
            if parameter.ndim:
                like = dtensor_over(
                    parameter.grad._local_tensor.detach(),
                    parameter.device_mesh,
                    parameter.placements,
                    parameter.shape,
                )
                gradients[str(number)] = like  # strangers
        preprocess_state_dict_for_uneven_dtensor(gradients)
    return known.names, one.names, many.names


@pytest.mark.always("hybrid_optim")
@pytest.mark.parametrize("kind", ["level1", "hybrid_optim", "tensor"])
def test_offsets_that_the_layout_knows_are_not_communicated(ranks: Ranks, kind: str) -> None:
    axes = 2 if kind in ("hybrid_optim", "tensor") else 1
    for known, one, many in ranks(4, count_collectives, kind):
        assert known == []
        # Two all-gathers for each axis, of the sizes of objects and of objects.
        assert len(one) == 2 * axes and all("allgather" in name for name in one)
        assert many == one  # for all of them together


CLAIMS = [
    ([(0, 2), (2, 4)], ""),
    ([(0, 3), (2, 4)], "[0:3, 0:3] and [2:4, 0:3] overlap"),
    ([(0, 4), (0, 4)], "[0:4, 0:3] and [0:4, 0:3] overlap"),
    ([(0, 1), (2, 4)], "3 elements are held by no rank"),
    ([(0, 2), (2, 5)], "rank 1: [2:5, 0:3] reaches beyond the shape"),
]
"""Rows of a [4, 3] tensor that ranks claim, and the problem."""


def claim() -> list[str]:
    """Return the errors of all claims, and "" where there is none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors = []
    for rows, _ in CLAIMS:
        begin, end = rows[dist.get_rank()]
        part = TensorPart((4, 3), (((begin, 0), (end - begin, 3)),))
        local = as_chunked_tensor(torch.zeros(end - begin, 3), part)
        try:
            validate_uneven_dtensor(dtensor_over(local, mesh, [Shard(0)], (4, 3)))
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_overlaps_holes_and_excess_are_found(ranks: Ranks) -> None:
    first, second = ranks(2, claim)
    assert first == second
    for message, (_, problem) in zip(first, CLAIMS, strict=True):
        assert problem in message and bool(problem) == bool(message)


def cut_wrongly() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    copies = distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()])
    update_uneven_dtensor_chunk_metadata(copies)
    copies._local_tensor.part = TensorPart((4, 3), (((rank, 0), (4 - rank, 3)),))
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

# SPDX-License-Identifier: Apache-2.0
"""Plain tensors with Megatron-Core's attributes of tensor parallelism are parts of a whole."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import fully_shard_model
from tests.fsdp.test_tensor_parallel import data_place, mesh_arguments, whole
from tests.support.fsdp.reference import Ranks, close, on_ranks


class Marked(nn.Module):
    """Plain tensors with the attributes by which Megatron-Core's layers mark parts of a whole."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.column = nn.Parameter(whole_weight(12, 5).chunk(size, 0)[rank].clone())
        self.row = nn.Parameter(whole_weight(5, 8).chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(whole_weight(12, 1).flatten().chunk(size, 0)[rank].clone())
        self.norm = nn.Parameter(whole_weight(5, 1).flatten())
        for name, parameter in self.named_parameters():
            parameter.tensor_model_parallel = name != "norm"
            parameter.partition_dim = {"row": 1, "norm": -1}.get(name, 0)
            parameter.partition_stride = 1

    def forward(self, x: Tensor) -> Tensor:
        return sum(parameter.sum() for parameter in self.parameters()) * x.sum()


def whole_weight(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) + 1000 * rows


WHOLE = {"column": (12, 5), "row": (5, 8), "bias": (12, 1), "norm": (5, 1)}


PLACEMENTS = {"column": Shard(0), "row": Shard(1), "bias": Shard(0), "norm": Replicate()}


def chunks_of_marked(
    level: int,
) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]:
    """Return offsets, sizes and values of every chunk that this rank would write."""
    place = mesh_arguments("dp2_tp2") | {"tp_dim": "tp"}
    tp = place["device_mesh"]["tp"]
    module = Marked(tp.get_local_rank(), tp.size())
    model = fully_shard_model(module, **place, zero_dp_strategy=level, preserve_fp32_weights=False)
    chunks = {}
    for name, parameter in model.named_parameters():
        short = name.removeprefix("module.")
        expected = whole_weight(*WHOLE[short])
        expected = expected.flatten() if short in ("bias", "norm") else expected
        assert tuple(parameter.shape) == tuple(expected.shape)
        assert (
            parameter.placements[parameter.device_mesh.mesh_dim_names.index("tp")]
            == PLACEMENTS[short]
        )
        assert (parameter.tensor_model_parallel, parameter.partition_stride) == (short != "norm", 1)
        assert torch.equal(full_tensor(parameter), expected), name
        local = model.state_dict()[name]._local_tensor  # `to_local` makes a plain view of it
        items = local.__create_write_items__(name, local)
        chunks[short] = [
            (
                tuple(item.tensor_data.chunk.offsets),
                tuple(item.tensor_data.chunk.sizes),
                local.__get_tensor_shard__(item.index).clone(),
            )
            for item in items
        ]
        assert all(tuple(item.tensor_data.size) == tuple(expected.shape) for item in items)
    return chunks


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
def test_chunks_of_plain_tensors_with_attributes_make_up_the_whole(
    ranks: Ranks, level: int
) -> None:
    per_rank = ranks(4, chunks_of_marked, level)
    for name, shape in WHOLE.items():
        expected = whole_weight(*shape)
        expected = expected.flatten() if name in ("bias", "norm") else expected
        written = torch.zeros_like(expected)
        for chunks in per_rank:
            for offsets, sizes, values in chunks[name]:
                place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
                assert torch.equal(values, expected[place]), name
                written[place] = 1
        assert written.all(), name


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(4)
def test_gradients_of_plain_tensors_with_attributes_have_the_shape_and_norm_of_the_whole(
    level: int,
) -> None:
    place = mesh_arguments("dp2_tp2") | {"tp_dim": "tp"}
    tp, (data_rank, data_size) = place["device_mesh"]["tp"], data_place(place["device_mesh"])
    model = fully_shard_model(
        Marked(tp.get_local_rank(), tp.size()),
        **place,
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
    )
    model(torch.full((1,), 1.0 + data_rank, dtype=torch.float64)).backward()
    mean = sum(1.0 + rank for rank in range(data_size)) / data_size
    for name, parameter in model.named_parameters():
        assert parameter.grad.shape == parameter.shape
        close(whole(parameter.grad), torch.full_like(whole(parameter), mean), name)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elements = 60 + 40 + 12 + 5  # the copies of the norm count once
    close(
        norm.full_tensor() if isinstance(norm, DTensor) else norm,
        torch.tensor(mean * elements**0.5, dtype=torch.float64),
        "norm",
        1e-9,
    )

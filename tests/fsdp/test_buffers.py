# SPDX-License-Identifier: Apache-2.0
"""Buffers are those of the first data rank when a model is sharded, as weights are."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp import Mesh, MetaInitialisation, Strategy
from megatron.fsdp import fully_shard as fully_shard_typed
from megatron.fsdp.module import builder
from megatron_fsdp import fully_shard_model
from tests.support.fsdp.meshes import Meshes, mesh_of
from tests.support.fsdp.models import WIDTH
from tests.support.fsdp.reference import Ranks, on_ranks
from tests.support.fsdp.wrong_calls import message_of


class Features(nn.Module):
    """Random features: buffers of many kinds, of which no two ranks have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("directions", torch.empty(3, WIDTH))
        self.register_buffer("transposed", torch.empty(WIDTH, 3).t())
        self.register_buffer("phases", torch.empty(4, dtype=torch.complex64), persistent=False)
        self.register_buffer("order", torch.empty(4, dtype=torch.int16))
        self.register_buffer("mask", torch.empty(7, dtype=torch.bool))
        self.register_buffer("scale", torch.empty((), dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("absent", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for buffer in self.buffers():
            if not buffer.is_meta:
                buffer.copy_(100 * torch.rand(buffer.shape) * torch.randint(2, buffer.shape))


def numbers_of(module: nn.Module) -> dict[str, list[Any]]:
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}


def shard_random_buffers(level: int) -> dict[str, list[Any]]:
    torch.manual_seed(dist.get_rank())
    module = Features()
    module.register_buffer("sparse", torch.eye(2).to_sparse())  # keeps its own values
    objects, before = list(module.buffers()), numbers_of(Features())
    fully_shard_model(module, zero_dp_strategy=level)
    assert all(old is new for old, new in zip(objects, module.buffers(), strict=True))
    module.sparse = None
    assert dist.get_rank() == 0 or all(before[name] for name in ("directions", "order"))
    return numbers_of(module)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
def test_ranks_take_the_buffers_of_the_first_one_whatever_their_seeds(
    ranks: Ranks, level: int
) -> None:
    torch.manual_seed(0)
    expected = numbers_of(Features())
    assert ranks(2, shard_random_buffers, level) == [expected, expected]


def initialise_random_buffers(level: int) -> dict[str, list[Any]]:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        module = Features()
    mesh = Mesh(device_mesh=mesh_of("outer", "inner", sizes=(2, 2)), inner="inner", outer="outer")
    settings = {"mesh": mesh, "initialisation": MetaInitialisation()}
    fully_shard_typed(module, strategy=Strategy(level=level), **settings)
    return numbers_of(module)


@pytest.mark.parametrize("level", [1, 3])
def test_buffers_from_the_meta_device_are_those_of_the_first_of_all_data_ranks(
    ranks: Ranks, level: int
) -> None:
    first, *others = ranks(4, initialise_random_buffers, level)
    assert first["directions"] and all(other == first for other in others)


class Routed(nn.Module):
    """Dense buffers, and buffers of experts, of which each rank of `ep` has others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.expert = nn.Linear(2, 2), nn.Linear(2, 2)
        self.experts = nn.ModuleList([nn.Linear(2, 2)])
        for parameter in self.expert.parameters():
            parameter.allreduce = False
        for module in (self, self.linear, self.expert, self.experts[0]):
            module.register_buffer("rank", torch.tensor(dist.get_rank()))


def shard_experts() -> list[int]:
    module = Routed()
    with patch.object(builder, "warn") as warn:
        fully_shard_model(module, **Meshes().arguments("ep2"))
    (warning,) = warn.call_args_list
    assert warning.args[-1] == "expert.rank, experts.0.rank, linear.rank, rank"
    return [int(buffer) for buffer in module.buffers()]


def test_buffers_of_experts_are_those_of_the_first_rank_with_the_same_experts(ranks: Ranks) -> None:
    # The second axis of the experts' mesh has the ranks with other experts: 0 and 2 have the same.
    # The layer with experts inside counts as theirs: its buffer may say which of them are here.
    even, odd = [0, 0, 0, 0], [1, 0, 1, 1]
    assert ranks(4, shard_experts) == [even, odd, even, odd]


def shard_tensor_parallel_slices() -> int:
    module = nn.Linear(2, 2)
    module.register_buffer("start", torch.tensor(dist.get_rank()))
    fully_shard_model(module, mesh_of("dp", "tp", sizes=(2, 2)), "dp", tp_dim="tp")
    return int(module.start)


def test_ranks_of_tensor_parallelism_keep_buffers_of_their_own(ranks: Ranks) -> None:
    assert ranks(4, shard_tensor_parallel_slices) == [0, 1, 0, 1]


@on_ranks(2)
def test_buffers_of_other_shapes_are_named() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("cache", torch.zeros(2 + dist.get_rank()))
    message = message_of(ValueError, fully_shard_model, module)
    told = "buffer 0 differs between ranks: cache (2,) torch.float32 on rank 0; cache (3,)"
    assert told in message, message

# SPDX-License-Identifier: Apache-2.0
"""Embeddings and the output layer with another strategy than other parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.fsdp import Mesh, Strategy, fully_shard, trace
from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from megatron.fsdp.module.unit_choice import embedding_parameters
from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
)
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import WIDTH
from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import (
    Case,
    Ranks,
    batch,
    build,
    compare_all,
    loss_of,
    on_ranks,
)
from tests.support.fsdp.wrong_calls import message_of

MARKED = Drawn(
    layers=(DrawnLayer(hidden=7), DrawnLayer(hidden=3, norm=True)), marks_embeddings=True
)


def levels(rest: int, embeddings: int | None, outer: int = 0) -> dict[str, Any]:
    return {
        "zero_dp_strategy": rest,
        "embedding_zero_dp_strategy": embeddings,
        "outer_dp_sharding_strategy": outer,
    }


def compare_levels(pairs: dict[Sequence[int], str], **more: Any) -> None:
    """Compare levels of embeddings and of the rest, each pair on a mesh of its own."""
    cases = []
    for number, (pair, mesh) in enumerate(pairs.items()):
        settings = {**levels(*pair), **more}
        model = replace(MARKED, head="tied") if number % 2 else MARKED
        case = Case(model=model, mesh=mesh, sync="no_sync", microbatches=2, clip=2.0)
        cases.append(replace(case, settings=settings))
    compare_all(cases)


@pytest.mark.parametrize(
    "pairs",
    [
        {(3, 2): "flat", (3, 0): "flat", (1, 3): "flat"},
        {(3, 2, 1): "hybrid1", (2, 3): "hybrid2"},
    ],
    ids=["flat", "hybrid"],
)
def test_embeddings_of_another_level_train_as_the_unsharded_model(
    ranks: Ranks, pairs: dict[Sequence[int], str]
) -> None:
    ranks(4, compare_levels, pairs)


@on_ranks(2)
def test_each_kind_has_its_level() -> None:
    """Embedding and output layer are in the unit of the root, with the last norm."""
    mesh = Meshes().arguments("flat")["device_mesh"]
    for rest, embeddings in ((3, 2), (1, 3)):
        config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=rest,
            embedding_data_parallel_sharding_strategy=embeddings,
        )
        index = FSDPDistributedIndex(mesh, dp_shard_dim=mesh.mesh_dim_names[0])
        modules = [build(MARKED) for _ in range(2)]
        units = type(modules[0]).units
        models = [
            fully_shard_model(
                modules[0], mesh, fsdp_unit_modules=units, **levels(rest, embeddings)
            ),
            MegatronFSDP(modules[1], index, config, fsdp_unit_modules=units),
        ]
        for name, parameter in (*models[0].named_parameters(), *models[1].named_parameters()):
            is_embedding = name.startswith(("module.embed", "module.head"))
            level = sharded_param_of(parameter).group.strategy
            assert level == (embeddings if is_embedding else rest), name


@on_ranks(2)
def test_ranks_that_mark_other_parameters_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4))
    module[0].weight.is_embedding_or_output_parameter = torch.distributed.get_rank() == 1
    mesh = Mesh(device_mesh=Meshes().arguments("flat")["device_mesh"], inner="dp_shard")
    settings = {"mesh": mesh, "strategy": Strategy(embedding_level=2)}
    message = message_of(ValueError, fully_shard, module, None, **settings)
    assert "0.weight" in message and "embedding" in message


@pytest.mark.exhaustive
def test_their_units_may_be_separate_ones(ranks: Ranks) -> None:
    """Without a limit for small units, embedding and output layer are in that of the root."""
    ranks(
        4,
        compare_levels,
        {(3, 2): "flat", (3, 1): "flat"},
        suggested_communication_unit_size=1,
    )


class OutputByWeight(nn.Module):
    """A model that reads the weight of its output layer, as a fused cross entropy does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.block(x)), self.head.weight)


def sharded(level: int) -> MegatronFSDP:
    return fully_shard_model(
        OutputByWeight().double(),
        Meshes().arguments("flat")["device_mesh"],
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=MixedPrecisionPolicy(None, None),
        embedding_zero_dp_strategy=level,
    )


@on_ranks(2)
def test_an_output_layer_that_stays_gathered_can_be_read_by_the_model() -> None:
    whole = OutputByWeight().double()
    for rank in range(2):
        (loss_of(whole(batch(0, rank, 0))) / 2).backward()
    model = sharded(2)
    with trace.record() as recorder:
        loss_of(model(batch(0, torch.distributed.get_rank(), 0))).backward()
    gathers = [entry for entry in recorder.collectives if entry.name == "all_gather"]
    assert {entry.unit for entry in gathers} == {"block"}
    gradient = model.get_parameter("module.head.weight").grad
    torch.testing.assert_close(gradient.full_tensor(), whole.head.weight.grad)


def test_embeddings_are_found_by_their_module_their_model_or_their_mark() -> None:
    model = OutputByWeight()
    model.positions = nn.Embedding(4, WIDTH)
    model.block.bias.is_embedding_or_output_parameter = True
    found = {model.positions.weight, model.head.weight, model.block.bias}
    assert embedding_parameters(model) == found


@on_ranks(2)
def test_a_strategy_without_embeddings_is_refused() -> None:
    mesh = Mesh(device_mesh=Meshes().arguments("flat")["device_mesh"], inner="dp_shard")
    settings = {"mesh": mesh, "strategy": Strategy(embedding_level=2)}
    message = message_of(ValueError, fully_shard, nn.Linear(2, 2), None, **settings)
    assert "Strategy.embedding_level needs parameters of an nn.Embedding" in message
    with pytest.raises(ValueError, match="embedding_level expects one of"):
        Strategy(embedding_level=7)

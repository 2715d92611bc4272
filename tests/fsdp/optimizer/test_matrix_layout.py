# SPDX-License-Identifier: Apache-2.0
"""Owners that have all of a matrix already: where layouts give it to one rank, nothing is sent."""

import logging
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fsdp.optimizer.matrix.exchange import Exchange
from megatron.fsdp.optimizer.matrix.owners import UpdateCost, choose_owners
from megatron_fsdp import fully_shard
from tests.support.fsdp.reference import Ranks, close

WIDTH = 32
EXACT = 1e-9
"""For float64: Muon iterates in bfloat16, to which a difference of 1e-16 is nothing."""


class EqualExperts(nn.Module):
    """Layers of several matrices of one shape, as experts are."""

    def __init__(self, num_matrices: int):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_matrices))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.stack([torch.tanh(each(x)) for each in layer]).mean(0)
        return x


def muon_over(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(model.parameters()), lr=0.02)


def train_watched(num_matrices: int, level: int, granularity: str) -> tuple[int, list[str]]:
    """Return how often a rank sends in three steps, and what is told of the owners."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("megatron.fsdp.config.warnings_once")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    sent, send = [], Exchange.send
    Exchange.send = lambda self, tensor, rank: (sent.append(rank), send(self, tensor, rank))
    try:
        reference = EqualExperts(num_matrices).double()
        module = EqualExperts(num_matrices).double()
        expected = muon_over(reference)
        model, optimizer = fully_shard(
            module,
            muon_over(module),
            fsdp_unit_modules=list(module.layers),
            zero_dp_strategy=level,
            granularity=granularity,
            preserve_fp32_weights=False,
        )
        for step in range(3):
            for each in (expected, optimizer):
                each.zero_grad()
            for rank in range(dist.get_world_size()):
                data = torch.randn(4, WIDTH, dtype=torch.float64, generator=seeded(step, rank))
                (reference(data).square().mean() / dist.get_world_size()).backward()
                if rank == dist.get_rank():
                    own = data
            model(own).square().mean().backward()
            for each in (expected, optimizer):
                each.step()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            close(one.full_tensor(), other.detach(), "weight", EXACT)
    finally:
        Exchange.send = send
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return len(sent), told


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers))


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_equal_matrices_are_updated_by_the_ranks_that_have_them(ranks: Ranks, level: int) -> None:
    first, *others = ranks(2, train_watched, 4, level, "prefer_rows")
    assert [count for count, _ in (first, *others)] == [0, 0]
    assert first[1] == [
        "0 of 8 matrices are put together on their owners in each step, 0.0 MB; an owner has up to"
        " 1.00 times the mean work"
    ]
    assert all(not told for _, told in others)


def test_matrices_that_no_rank_has_are_exchanged(ranks: Ranks) -> None:
    # Three matrices are cut over two ranks, and a setting of the user's is not changed.
    for num_matrices, granularity in ((3, "prefer_rows"), (3, "prefer_tensors"), (3, "rows")):
        results = ranks(2, train_watched, num_matrices, 3, granularity)
        assert all(count > 0 for count, _ in results)
        assert "matrices are put together on their owners" in results[0][1][0]


# ---- the choice


def owners_of(costs: list[UpdateCost], able: list[list[int]], num_ranks: int) -> dict[int, int]:
    return dict(chain.from_iterable(choose_owners(costs, able, range(num_ranks))))


def test_owners_are_the_ranks_that_have_all_of_a_matrix() -> None:
    equal = [UpdateCost(8, 8)] * 4
    assert owners_of(equal, [[1], [0], [0], [1]], 2) == {0: 1, 1: 0, 2: 0, 3: 1}
    # A matrix that nobody has goes to the rank with less to do.
    assert owners_of([*equal, UpdateCost(4, 4)], [[1], [0], [1], [0], []], 2)[4] == 0


def test_owners_are_balanced_instead_where_one_rank_would_have_much_more_to_do() -> None:
    equal = [UpdateCost(8, 8)] * 4
    found = owners_of(equal, [[1], [1], [1], [0]], 2)
    assert sorted(found.values()) == [0, 0, 1, 1]
    # Within a tenth, nothing is sent.
    many = [UpdateCost(1, 1)] * 21
    able = [[index % 2] for index in range(20)] + [[0]]
    assert owners_of(many, able, 2) == {index: own[0] for index, own in enumerate(able)}

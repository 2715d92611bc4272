# SPDX-License-Identifier: Apache-2.0
"""The first collective in which ranks differ, out of the last ones of each."""

import pytest

from megatron.fsdp.trace.divergence import PublishedCollective, first_difference, named_ranks


def sequence(
    *whats: str, ranks: tuple[int, ...] = (0, 1, 2), first: int = 0, begin: float = 0.0
) -> list[PublishedCollective]:
    return [
        PublishedCollective(ranks, first + place, begin + place, what)
        for place, what in enumerate(whats)
    ]


@pytest.mark.parametrize(
    ("sequences", "difference"),
    [
        ({0: sequence("a", "b"), 1: sequence("a", "b"), 2: sequence("a", "b")}, None),
        (
            {0: sequence("a", "c"), 1: sequence("a", "b"), 2: sequence("a", "b")},
            "rank 0 is the first that differs, in collective 1 of ranks 0-2:"
            "\n  rank 0: c\n  ranks 1-2: b",
        ),
        (
            {0: sequence("a"), 1: sequence("a", "b"), 2: sequence("a", "b")},
            "rank 0 is the first that differs, in collective 1 of ranks 0-2:"
            "\n  rank 0: not started\n  ranks 1-2: b",
        ),
        # Rank 0 has forgotten its first collectives, and rank 1 does not answer.
        (
            {0: sequence("b", "c", first=1), 2: sequence("a", "b", "d")},
            "these two ranks differ first, in collective 2 of ranks 0-2:\n  rank 0: c\n  rank 2: d",
        ),
        # Rank 1 has skipped a collective with rank 0, which therefore never meets rank 2.
        (
            {
                0: sequence("a", ranks=(0, 1), begin=1.0),
                1: [],
                2: sequence("b", ranks=(0, 2), begin=2.0),
            },
            "rank 1 is the first that differs, in collective 0 of ranks 0-1:"
            "\n  rank 0: a\n  rank 1: not started",
        ),
        ({0: [], 1: []}, None),
    ],
    ids=["same", "other_operation", "behind", "forgotten", "two_groups", "none"],
)
def test_the_first_difference_is_found(
    sequences: dict[int, list[PublishedCollective]], difference: str | None
) -> None:
    assert first_difference(sequences) == difference


def test_ranks_are_named_as_ranges() -> None:
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([5, 0, 2, 1]) == "ranks 0-2, 5"

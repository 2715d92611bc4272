# SPDX-License-Identifier: Apache-2.0
"""Memory slots are assigned from the times at which buffers were allocated together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fsdp.backends.memory_slots import MemorySlots
from megatron.fsdp.config.memory import Memory


class PlainBuffer:
    """A buffer without tensors."""

    def __init__(self, name: str, num_bytes: int):
        self.name = name
        self.num_bytes = num_bytes
        self.is_allocated = False
        self.memory: torch.Tensor | None = None

    def move(self, memory: torch.Tensor | None) -> None:
        self.memory = memory


def allocate(sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def fail(sizes: Sequence[int]) -> list[torch.Tensor]:
    raise RuntimeError("can't allocate memory\nat some place")


def use(slots: MemorySlots, *together: PlainBuffer) -> None:
    """Allocate some buffers at the same time."""
    for buffer in together:
        slots.occupy(buffer)
    for buffer in together:
        slots.vacate(buffer)


def slots_of(
    *passes: tuple[PlainBuffer, ...], can_move: bool = False, **policy: bool
) -> MemorySlots:
    """Return assigned slots after some sets of buffers were each allocated together."""
    slots = MemorySlots("weights", can_move, Memory(**policy), allocate)
    for together in passes:
        use(slots, *together)
    assert slots.assign() is None
    return slots


def test_a_chain_of_equal_layers_needs_two_slots() -> None:
    layers = [PlainBuffer(f"layer {number}", 40) for number in range(7)]
    slots = slots_of(*pairwise(layers))
    assert slots.sizes == [40, 40]
    assert len({id(layer.memory) for layer in layers}) == 2
    assert all(left.memory is not right.memory for left, right in pairwise(layers))
    assert slots.is_complete


def test_a_slot_has_the_size_of_its_largest_user() -> None:
    small, large, middle = (PlainBuffer(str(size), size) for size in (8, 100, 30))
    assert slots_of((small, large), (large, middle)).sizes == [100, 30]
    assert small.memory is middle.memory is not large.memory


def test_slots_of_one_size_have_that_of_the_largest_buffer() -> None:
    small, large = PlainBuffer("small", 8), PlainBuffer("large", 100)
    assert slots_of((small, large), equal_sizes=True).sizes == [100, 100]


PASSES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), max_size=12)


@settings(deadline=None)  # other work may hold up the machine
@given(
    sizes=st.lists(st.integers(1, 50), min_size=8, max_size=8),
    passes=PASSES,
    more_passes=PASSES,
    equal_sizes=st.booleans(),
)
def test_buffers_that_were_allocated_together_have_different_slots(
    sizes: list[int], passes: list[list[int]], more_passes: list[list[int]], equal_sizes: bool
) -> None:
    buffers = [PlainBuffer(str(number), size) for number, size in enumerate(sizes)]
    slots = slots_of(
        *(tuple(buffers[number] for number in each) for each in passes),
        can_move=True,
        equal_sizes=equal_sizes,
    )
    before = {buffer.name: buffer.memory for buffer in buffers}
    for each in more_passes:
        use(slots, *(buffers[number] for number in each))
        assert slots.assign() is None
    for each in passes:
        for left, right in combinations(each, 2):
            assert buffers[left].memory is not buffers[right].memory
    for each in more_passes[-1:]:
        for left, right in combinations(each, 2):
            assert buffers[left].memory is not buffers[right].memory
    if not more_passes:
        assert before == {buffer.name: buffer.memory for buffer in buffers}
    for buffer in buffers:
        used = any(int(buffer.name) in each for each in passes + more_passes)
        assert (buffer.memory is not None) == used
        assert buffer.memory is None or buffer.memory.numel() >= buffer.num_bytes


def test_a_buffer_that_may_move_leaves_a_slot_that_is_taken_until_the_end_of_the_step() -> None:
    left, right = PlainBuffer("left", 8), PlainBuffer("right", 8)
    slots = slots_of((left,), (right,), can_move=True)
    assert slots.sizes == [8]
    use(slots, left, right)
    assert slots.blocker(right) is None and right.memory is None and not slots.is_complete
    assert slots.assign() is None
    assert slots.sizes == [8, 8] and left.memory is not right.memory


@pytest.mark.parametrize(("can_move", "holds"), [(False, False), (True, True), (False, True)])
def test_a_buffer_that_may_not_move_names_the_two_that_share_a_slot(
    can_move: bool, holds: bool
) -> None:
    left, right = PlainBuffer("left", 8), PlainBuffer("right", 8)
    slots = slots_of((left,), (right,), can_move=can_move, holds_addresses=holds)
    with pytest.raises(RuntimeError, match=r"right and left are in use at the same time .*share"):
        use(slots, left, right)


def test_a_buffer_in_use_gets_its_slot_when_it_is_free() -> None:
    buffer = PlainBuffer("late", 8)
    slots = MemorySlots("weights", False, Memory(), allocate)
    slots.occupy(buffer)
    buffer.is_allocated = True
    assert slots.assign() is None and buffer.memory is None
    slots.vacate(buffer)
    buffer.is_allocated = False
    assert slots.assign() is None and buffer.memory is not None


def test_a_discarded_buffer_leaves_room_for_another() -> None:
    old, new = PlainBuffer("old", 8), PlainBuffer("new", 8)
    slots = slots_of((old,))
    slots.discard(old)
    use(slots, new)
    assert slots.assign() is None
    assert slots.sizes == [8] and new.memory is old.memory


def test_slots_that_do_not_fit_in_memory_are_told_with_their_bytes() -> None:
    buffers = PlainBuffer("left", 1000), PlainBuffer("right", 500)
    slots = MemorySlots("weights", False, Memory(), fail)
    use(slots, *buffers)
    problem = slots.assign()
    assert problem is not None and "2 of 1,000, 500 bytes, 1,500 in all" in problem
    assert (
        "can't allocate memory)" in problem and "fsdp_db_use_persist_buf_on_alloc_fail" in problem
    )


def test_slots_whose_addresses_are_held_must_fit() -> None:
    policy = Memory(allows_own_storage=True, holds_addresses=True)
    slots = MemorySlots("weights", False, policy, fail)
    use(slots, PlainBuffer("one", 1000))
    problem = slots.assign()
    assert problem is not None and "cuda_graph_mode needs the fixed addresses" in problem


def test_slots_that_do_not_fit_may_leave_buffers_their_own_storage() -> None:
    buffers = PlainBuffer("left", 1000), PlainBuffer("right", 500)
    slots = MemorySlots("weights", False, Memory(allows_own_storage=True), fail)
    use(slots, *buffers)
    assert slots.assign() is None
    assert [buffer.memory for buffer in buffers] == [None, None]

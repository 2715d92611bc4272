# SPDX-License-Identifier: Apache-2.0
"""Growing global batch sizes, in steps at numbers of consumed samples.

Megatron-Core 0.18 replaced the linear growth of --rampup-batch-size by a schedule of steps, and
ignores the old argument. Here a linear growth is the schedule of its steps.
"""

from collections.abc import Sequence

from megatron.core import num_microbatches_calculator

from megatron.mcore_adapter.releases.process_groups import accepts


def ramp_steps(rampup_batch_size: Sequence[int], global_batch_size: int) -> list[tuple[int, int]]:
    """Return the steps of a linear growth: consumed samples from which a batch size holds.

    Args:
        rampup_batch_size: the first global batch size, its increment, and the number of samples
            after which it is ``global_batch_size``.
        global_batch_size: the last one; increments lead to it exactly.

    Returns:
        For example ``[(0, 8), (50, 16), (100, 24)]`` for ``(8, 8, 100)`` and 24.
    """
    start, increment, samples = rampup_batch_size
    num_increments = (global_batch_size - start) // increment
    steps = {0: start}
    for number in range(1, num_increments + 1):
        first = -(-number * samples // num_increments)
        # Megatron-Core divides in floating point, which may reach a step one sample later.
        first += int(first / (samples / num_increments)) < number
        steps[first] = start + number * increment  # more increments than samples: the last counts
    return list(steps.items())


def batch_size_at(steps: Sequence[tuple[int, int]], consumed_samples: int) -> int:
    """Return the global batch size of the iteration that follows ``consumed_samples``."""
    return [size for first, size in steps if first <= consumed_samples][-1]


def init_num_microbatches(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Set the global batch size of Megatron-Core's schedules, constant or growing.

    Args:
        rank: of this process; the first logs.
        rampup_batch_size: as in :func:`ramp_steps`; None for a constant batch size.
        global_batch_size: the last one, in samples.
        micro_batch_size: samples of one rank in one pass.
        data_parallel_size: number of data-parallel ranks.
    """
    init = num_microbatches_calculator.init_num_microbatches_calculator
    sizes = (global_batch_size, micro_batch_size, data_parallel_size)
    if rampup_batch_size is None or not accepts(init, "step_batch_size_schedule"):
        init(rank, rampup_batch_size, *sizes)
    else:
        steps = ramp_steps(rampup_batch_size, global_batch_size)
        schedule = " ".join(f"{first}:{size}" for first, size in steps)
        init(rank, None, *sizes, step_batch_size_schedule=schedule)

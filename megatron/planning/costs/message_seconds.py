# SPDX-License-Identifier: Apache-2.0
"""Seconds of messages between GPUs, and of compute beside them, by the fitted constants."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.planning.costs.gpu_kernels import FITTED, Fitted
from megatron.planning.machine import Cluster

LAUNCHES_BETWEEN_STAGES = 4
"""Messages of a stage for a microbatch that the host launches: an input and an output, and the
gradients of both."""


def collective_seconds(
    machine: Cluster,
    name: str,
    num_bytes: float,
    ranks: Sequence[int],
    fitted: Fitted = FITTED,
) -> float:
    """Return the seconds of a collective.

    Args:
        machine: on which it runs.
        name: of the operation, such as ``all_gather``.
        num_bytes: of the whole tensor.
        ranks: that take part.
        fitted: constants of the model of time.
    """
    return machine.collective_seconds(name, num_bytes, ranks) / fitted.link


def overlapped_seconds(
    compute: float,
    message: float,
    fitted: Fitted = FITTED,
) -> float:
    """Return the seconds of compute and a simultaneous collective, which slows it.

    Args:
        compute: seconds of it alone.
        message: seconds of the collective.
        fitted: constants of the model of time.
    """
    slower = compute + fitted.contention * min(compute, message)
    return max(slower, message)


def stage_message_seconds(
    machine: Cluster,
    num_bytes: float,
    distance: int,
    virtual: int = 1,
    is_overlapped: bool = False,
    fitted: Fitted = FITTED,
) -> float:
    """Return the seconds of the messages of a pipeline stage for a microbatch.

    Args:
        machine: on which the model runs.
        num_bytes: of a message.
        distance: from a rank to that of the next stage.
        virtual: virtual stages of each stage.
        is_overlapped: only the launches cost time.
        fitted: constants of the model of time.
    """
    launched = LAUNCHES_BETWEEN_STAGES * virtual * fitted.launch / machine.host_speed
    if is_overlapped:
        return launched
    message = machine.message_seconds(num_bytes, distance) / fitted.link
    return 2 * virtual * message + launched

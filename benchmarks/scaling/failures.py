# SPDX-License-Identifier: Apache-2.0
"""The cost of failures: time between them, of a save and of a restart, and goodput.

[Note: goodput] Daly's model has failures at random moments, also during a restart. With a mean time
M between them, saves that block for C after every T of work, and a restart of R, a run needs

    M exp(R / M) (exp((T + C) / M) - 1)

for T of work. Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for
restart dumps, Future Generation Computer Systems 22 (2006). T is the square root of 2 M C, by Young
(1974) and Daly. A save in the background blocks for the copy to the host alone, but counts only
when it is written: until then a failure goes back one save further, so the time of writing is added
to R. T is at least that time, since one save is under way at once, and at least ``LEAST_INTERVAL``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

from megatron.planning.machine import Cluster

HOUR = 3600.0

BYTES_OF_WEIGHT = 14
"""Bytes of a weight in a checkpoint: the main weight and two moments in fp32, and bf16."""

WRITTEN_BY_NODE = 2e9
"""Bytes that a node writes or reads in a second: assumed."""

WRITTEN_BY_ALL = 2e12
"""Bytes that all nodes write or read in a second at most: the sustained throughput of the file
system of Llama 3, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.1."""

RESTART = 600.0
"""Seconds from a failure to the load of a checkpoint: the stall of a recovery on some 100,000 GPUs,
Training LLMs with Fault Tolerant HSDP on 100,000 GPUs, arXiv:2602.00277; assumed for all sizes."""

LEAST_INTERVAL = 60.0
"""Seconds between saves at least: assumed, since a save waits for the end of a step."""


@dataclass(frozen=True)
class FailureRate:
    """Failures of a published run.

    Args:
        run: the run.
        gpus: of it.
        reported: by its source.
        hours: between interruptions, in the mean.
        source: title and address.
    """

    run: str
    gpus: int
    reported: str
    hours: float
    source: str

    @property
    def gpu_hours(self) -> float:
        """Hours of GPUs between interruptions."""
        return self.gpus * self.hours

    def seconds_on(self, num_gpus: int) -> float:
        """Return the mean seconds between interruptions, if each GPU adds as many."""
        return self.gpu_hours / num_gpus * HOUR


LLAMA = FailureRate(
    "Llama 3 405B",
    16384,
    "466 interruptions in 54 days, 419 of them unexpected",
    54 * 24 / 466,
    "The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4",
)
OPT = FailureRate(
    "OPT-175B",
    992,
    "53 to 54 restarts in 56 days",
    56 * 24 / 54,
    "notes of a talk of its authors, zrss.github.io/archives/9b7ac1f7.html; their logbook,"
    " github.com/facebookresearch/metaseq, projects/OPT/chronicles, has two machines of 128 a day",
)
RESEARCH = FailureRate(
    "two A100 clusters of Meta",
    16384,
    "1.8 hours, projected from 11 months of jobs",
    1.8,
    "Revisiting Reliability in Large-Scale ML Research Clusters, arXiv:2410.21680, as quoted by"
    " clockwork.io/blog/common-approaches-to-fault-tolerant-ai-training-selection-framework",
)
RATES = (LLAMA, OPT, RESEARCH)


@dataclass(frozen=True)
class PublishedGoodput:
    """The part of a published run's time that was training.

    Args:
        run: the run.
        gpus: of it.
        measured: the part, as reported.
        parameters: of a model of about the size; checkpoints depend on it.
        source: title and address.
    """

    run: str
    gpus: int
    measured: str
    parameters: float
    source: str


PUBLISHED_GOODPUT = (
    PublishedGoodput(
        "three months at ByteDance",
        9600,
        "97 %",
        200e9,
        "Robust LLM Training Infrastructure at ByteDance, arXiv:2509.16293; the model is not named",
    ),
    PublishedGoodput(
        "Llama 3 405B",
        16384,
        "above 90 %",
        405e9,
        "The Llama 3 Herd of Models, section 3.3.4",
    ),
    PublishedGoodput(
        "synchronous training at Meta",
        100_000,
        "44 %",
        2000e9,
        "Fault Tolerant HSDP, arXiv:2602.00277; the model is not named",
    ),
)


@dataclass(frozen=True)
class FailureCost:
    """Failures of a run, and what they cost.

    Attributes:
        gpus: of the run.
        between: mean seconds between failures.
        num_bytes: of a checkpoint.
        written: seconds in which it is written.
        copied: seconds in which a GPU copies its part to the host.
        restart: seconds from a failure to the first step.
    """

    gpus: int
    between: float
    num_bytes: float
    written: float
    copied: float
    restart: float

    @property
    def blocking_interval(self) -> float:
        """Seconds of work between saves that block."""
        return max(sqrt(2 * self.between * self.written), LEAST_INTERVAL)

    @property
    def background_interval(self) -> float:
        """Seconds of work between saves in the background."""
        optimum = sqrt(2 * self.between * self.copied)
        return max(optimum, self.written, LEAST_INTERVAL)

    @property
    def blocking_goodput(self) -> float:
        """Part of the time that is training, with saves that block."""
        return goodput(self.between, self.blocking_interval, self.written, self.restart)

    @property
    def background_goodput(self) -> float:
        """Part of the time that is training, with saves in the background."""
        restart = self.restart + self.written
        return goodput(self.between, self.background_interval, self.copied, restart)

    @property
    def lost_gpu_hours(self) -> float:
        """GPU hours that a failure costs in the mean, with saves in the background."""
        repeated = self.background_interval / 2 + self.written
        return self.gpus * (repeated + self.restart) / HOUR


def goodput(between: float, interval: float, save: float, restart: float) -> float:
    """Return the part of the time that is training; see [Note: goodput].

    Args:
        between: mean seconds between failures.
        interval: seconds of work between saves.
        save: seconds that a save blocks.
        restart: seconds of a restart.
    """
    exponent = (interval + save) / between
    if exponent > 500 or restart / between > 500:  # nothing is ever finished
        return 0.0
    needed = between * exp(restart / between) * (exp(exponent) - 1)
    return interval / needed


def failure_cost(
    parameters: float, num_gpus: int, machine: Cluster, rate: FailureRate = LLAMA
) -> FailureCost:
    """Return the cost of failures on so many GPUs.

    Args:
        parameters: of the model.
        num_gpus: of the run.
        machine: on which it runs, with a host.
        rate: of failures.
    """
    num_bytes = BYTES_OF_WEIGHT * parameters
    nodes = max(1, num_gpus // machine.gpus_per_node)
    written = num_bytes / min(nodes * WRITTEN_BY_NODE, WRITTEN_BY_ALL)
    return FailureCost(
        gpus=num_gpus,
        between=rate.seconds_on(num_gpus),
        num_bytes=num_bytes,
        written=written,
        copied=machine.copy_seconds(num_bytes / num_gpus),
        restart=RESTART + written,
    )

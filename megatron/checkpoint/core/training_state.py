# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about a run, free of any format: every reader makes it and every writer takes it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.core.lazy_tensor import LazyTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
SCHEDULE = (
    *("max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr"),
    *("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps"),
)
"""What Megatron-Core's scheduler keeps of itself."""


@dataclass
class OptimizerParamGroup:
    """Parameters that the optimizer treats alike."""

    fields: dict[str, Any]
    """``lr``, ``wd_mult`` and so on, as the optimizer keeps them, without ``params``; ``step`` where it counts per group."""
    names: list[str]

    @functools.cached_property
    def members(self) -> frozenset[str]:
        """``names``, which are not changed any more, to look for one of many."""
        return frozenset(self.names)


@dataclass
class TrainingState:
    """A run at one iteration.

    Names are canonical (:mod:`megatron.checkpoint.core.key_rules`): one entry for each parameter of each
    layer and expert, counted over the whole model, with gated weights whole.

    Attributes:
        weights: name -> the most exact value there is, the fp32 main weight where the file has one.
        compute_dtype: of name, where the model in the file computes in another dtype than
            ``weights`` has.
        buffers: name -> what the model stores beside parameters, without optimizer state.
        moments: name -> ``exp_avg``, ``exp_avg_sq`` -> fp32, shaped like the weight. Absent for
            weights without state.
        steps: name -> how many steps its moments have seen, where the file says so for each
            parameter.
        is_fresh: name -> whether its moments had to be dropped and begin anew, which is known when
            the parameter is read.
        groups: of the optimizer; None in a file without one.
        scheduler: ``opt_param_scheduler``, the schedule of rates.
        random_states: (pipeline stage, tensor-parallel rank) -> a dict of generator states for each
            data rank that has one.
        args: the arguments of the run. Counters of samples are in it.
        iteration: steps done; None in a release of weights.
        operations: floating-point operations so far.
        grad_scaler: of fp16 runs.
        version: of the checkpoint, 3.0 today.
        module_names: name -> what the model's modules call it, where the file shows that.
        others: what no conversion needs and a writer of the same format may keep, by its key.
        unknown: keys of a file whose format has no others than those that are read.
        notes: what a reader noticed and its user should know, each by name.
    """

    weights: dict[str, LazyTensor]
    compute_dtype: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, LazyTensor] = field(default_factory=dict)
    moments: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    is_fresh: dict[str, Callable[[], bool]] = field(default_factory=dict)
    groups: list[OptimizerParamGroup] | None = None
    scheduler: dict[str, Any] | None = None
    random_states: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)
    args: argparse.Namespace | None = None
    iteration: int | None = None
    operations: float | None = None
    grad_scaler: dict[str, Any] | None = None
    version: float = 3.0
    module_names: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def step_of(self, name: str) -> float | None:
        """How many steps the moments of a parameter have seen: its own count, or that of its group."""
        if name in self.steps:
            return self.steps[name]
        return next(
            (group.fields.get("step") for group in self.groups or [] if name in group.members), None
        )

    def tensors(self) -> Iterator[tuple[str, str, LazyTensor]]:
        """``weight``, ``buffer`` or a moment's slot, with name and tensor."""
        for name, tensor in self.weights.items():
            yield "weight", name, tensor
        for name, tensor in self.buffers.items():
            yield "buffer", name, tensor
        for name, slots in self.moments.items():
            for slot, tensor in slots.items():
                yield slot, name, tensor

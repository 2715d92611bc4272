# SPDX-License-Identifier: Apache-2.0
"""The state of a run, independent of checkpoint formats: readers return it, writers take it."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"  # of Muon and of SGD
SCHEDULE = (
    "max_lr",
    "lr_warmup_steps",
    "num_steps",
    "lr_decay_style",
    "lr_decay_steps",
    "min_lr",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
)
"""Fields in the state of Megatron-Core's scheduler."""

Fields = dict[str, Any]
"""Values by name: of a param group, of the schedule of rates, of generators."""

RandomStates = dict[tuple[int, int], list[Fields]]
"""Pipeline stage and tensor-parallel rank -> a dict of generator states for each data rank."""


@dataclass
class OptimizerParamGroup:
    """Parameters that the optimizer treats alike.

    Attributes:
        fields: fields of the optimizer's group, such as ``lr`` and ``wd_mult``, without ``params``;
            ``step`` where it counts per group.
        names: names of the parameters, canonical.
    """

    fields: Fields
    names: list[str]

    @functools.cached_property
    def members(self) -> frozenset[str]:
        """The names as a set; they do not change once this was read."""
        return frozenset(self.names)


class Freshness:
    """The answer, found on demand, whether moments of a parameter were dropped and start from zero.

    Args:
        compare: function that reads the parameter and returns the answer. None means that the
            moments were not dropped.

    Attributes:
        known: the answer; None before the first call. Ranks that share the comparisons of all
            parameters set it for each other.
    """

    def __init__(self, compare: Callable[[], bool] | None = None):
        self._compare = compare
        self.known: bool | None = None
        if compare is None:
            self.known = False

    def __call__(self) -> bool:
        """Return the answer; the first call compares."""
        if self.known is None:
            assert self._compare is not None
            self.known = self._compare()
        return self.known


@dataclass
class TrainingState:
    """The state of a run after one of its iterations.

    Names are canonical (:mod:`megatron.checkpoint.core.spelling`): one entry for each parameter of
    each layer and expert, counted over the whole model, with gated weights whole.

    Attributes:
        weights: name -> the most exact value, the fp32 main weight if the file has one.
        compute_dtype: name -> dtype in which the model computes, if it is known.
        buffers: name -> tensor of the model that is no parameter and has no optimizer state.
        extra_states: name that ends in ``._extra_state`` -> the extra state of a module of
            Transformer Engine, pickled: the scales and amax histories of delayed scaling.
        moments: name -> ``exp_avg``, ``exp_avg_sq``, or ``momentum_buffer`` of Muon -> fp32, shaped
            like the weight. Absent for weights without state.
        steps: name -> number of steps that its moments have seen, if the file has it for each
            parameter.
        is_fresh: name -> whether its moments were dropped and start from zero.
        groups: param groups of the optimizer; None in a file without one.
        scheduler: ``opt_param_scheduler``, the schedule of rates.
        random_states: (pipeline stage, tensor-parallel rank) -> a dict of generator states for each
            data rank that has one.
        args: the arguments of the run. Counters of samples are in it.
        iteration: steps done; None in a release of weights.
        operations: floating-point operations so far.
        grad_scaler: state of the gradient scaler of fp16 runs.
        version: version of the checkpoint, 3.0 today.
        module_names: name -> name in the model's modules, if the file shows it.
        others: key -> value that no conversion needs and a writer of the same format may keep.
        unknown: keys of a file whose format does not have them.
        notes: messages to the user about what was read; each begins with a name or key.
    """

    weights: Tensors
    compute_dtype: dict[str, torch.dtype] = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    extra_states: dict[str, bytes] = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    is_fresh: dict[str, Freshness] = field(default_factory=dict)
    groups: list[OptimizerParamGroup] | None = None
    scheduler: Fields | None = None
    random_states: RandomStates = field(default_factory=dict)
    args: Namespace | None = None
    iteration: int | None = None
    operations: float | None = None
    grad_scaler: Fields | None = None
    version: float = 3.0
    module_names: dict[str, str] = field(default_factory=dict)
    others: Fields = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def step_of(self, name: str) -> float | None:
        """Return the number of steps that a parameter's moments have seen.

        It is the parameter's own count or that of its group; None if neither is known.
        """
        if name in self.steps:
            return self.steps[name]
        for group in self.groups or []:
            if name in group.members:
                step: float | None = group.fields.get("step")
                return step
        return None

    def tensors(self) -> Iterator[tuple[str, str, LazyTensor]]:
        """Yield slot, name and tensor: slots are ``weight``, ``buffer`` and those of moments."""
        for name, tensor in self.weights.items():
            yield "weight", name, tensor
        for name, tensor in self.buffers.items():
            yield "buffer", name, tensor
        for name, slots in self.moments.items():
            for slot, tensor in slots.items():
                yield slot, name, tensor

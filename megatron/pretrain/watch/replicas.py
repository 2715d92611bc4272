# SPDX-License-Identifier: Apache-2.0
"""The check that replicas of weights are equal, by hashes.

Compared are all weights under Megatron-Core's data parallelism, and the gathered weights of levels
0 to 2 of --use-megatron-fsdp. Level 3 is refused, as in Megatron-LM.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints.torch_dist_format import gathered_weights
from megatron.mcore_adapter.run.errors import RunError


def check_replicas(args: argparse.Namespace, model: list[MegatronModule], iteration: int) -> None:
    """Compare the weights of all replicas. This is a collective.

    Raises:
        RunError: on every rank, with the names of the weights that differ.
    """
    names: list[str] = []
    for chunk in model:
        if args.use_megatron_fsdp:
            chunk.start_param_sync(force_sync=True)
            sharded = chunk.module.sharded_params
            names += _differing((parameter.name, parameter.compute) for parameter in sharded)
        else:
            with gathered_weights([chunk]):
                names += _differing(chunk.named_parameters())
    problems = agree([f"rank {dist.get_rank()}: {name}" for name in names])
    if problems:
        raise RunError(
            f"after iteration {iteration} these weights differ from those of the first replica:\n  "
            + "\n  ".join(problems)
        )


def _differing(weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of this rank's weights that differ from those of the first replica."""
    hashes: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for name, weight in weights:
        data = weight.detach().cpu().float().numpy(force=True)
        is_expert = not getattr(weight, "allreduce", True)
        hashes[is_expert][name] = hashlib.sha1(data.tobytes(), usedforsecurity=False).hexdigest()
    differing = []
    for is_expert, own in hashes.items():
        if own:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            if is_expert:
                group = parallel_state.get_expert_data_parallel_group()
            everyone: list[dict[str, str]] = [{}] * group.size()
            dist.all_gather_object(everyone, own, group=group)
            differing += [name for name, digest in own.items() if digest != everyone[0][name]]
    return differing

# SPDX-License-Identifier: Apache-2.0
"""Saves by torch.distributed.checkpoint in both formats of runs with FSDP, whose plans are kept."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as save_entries

from megatron.checkpoint.dcp.save_planner import EvenPlanner
from megatron.checkpoint.dcp.signing_writer import SigningWriter
from megatron.checkpoint.dcp.save_planner import PlanReuse

_PLANS = PlanReuse()
"""Of the saves of this process with --ckpt-assume-constant-structure."""


def save_planned(
    args: argparse.Namespace,
    content: dict[str, Any],
    writer: SigningWriter,
    new_planner: Callable[..., EvenPlanner],
) -> None:
    """Write the content of a checkpoint; a collective.

    Args:
        args: of the run. With ``ckpt_assume_constant_structure`` the plan of the save before is
            used again; without ``ckpt_fully_parallel_save`` the first rank that has an entry writes
            it, instead of any.
        content: of this rank, as the planner takes it.
        writer: of the files.
        new_planner: makes the planner; takes the arguments ``reuse`` and ``spreads``.
    """
    reuse = _PLANS if args.ckpt_assume_constant_structure else None
    planner = new_planner(reuse=reuse, spreads=args.ckpt_fully_parallel_save)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's checkpoint uses names that torch deprecates
        try:
            save_entries(content, storage_writer=writer, planner=planner)
        except BaseException:
            _PLANS.forget()
            raise

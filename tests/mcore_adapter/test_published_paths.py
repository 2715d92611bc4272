# SPDX-License-Identifier: Apache-2.0
"""The published package answers under its path in Megatron-Core while the drop-in is active."""

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

import megatron_fsdp
from megatron.mcore_adapter import cpu, drop_in
from megatron.mcore_adapter.megatron_lm import loop_state_dicts
from megatron.mcore_adapter.published_paths import MODULES, OURS, PACKAGE
from tests.support.rank_pool import run_ranks

PROGRAM = f"""
import {PACKAGE} as package
import {PACKAGE}.utils
from {PACKAGE} import FSDPDistributedIndex, MegatronFSDP, fully_shard
from {PACKAGE}.experimental import Placements, fully_shard as shard_in_place
from {PACKAGE}.fully_shard import fully_shard_model
from {PACKAGE}.param_and_grad_buffer import make_fsdp_dtensor
from {PACKAGE}.uneven_dtensor import get_state_dict, preprocess_state_dict_for_uneven_dtensor
from {PACKAGE}.utils import find_megatron_fsdp, is_mcore_tensor_model_parallel

utils = {PACKAGE}.utils

linear = torch.nn.Linear(3, 3)
model, optimizer = package.fully_shard(linear, torch.optim.AdamW(linear.parameters()))
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
found = find_megatron_fsdp(model) is model
in_place = shard_in_place.__module__ == Placements.__module__.removesuffix(".placements")
"""
"""What a program does that imports the package by this path."""


def names_of_others() -> list[str]:
    """List the names by which a module at the path has another object than this project's."""
    others = []
    for name in MODULES:
        ours, published = import_module(OURS + name), sys.modules[PACKAGE + name]
        others += [
            key
            for key in ours.__all__
            if inspect.unwrap(vars(published)[key]) is not inspect.unwrap(getattr(ours, key))
        ]
    return others


def import_by_path() -> list[Any]:
    """Job: run the program while the drop-in is active, and look at the path afterwards."""
    cpu.install()
    import_module(PACKAGE)
    before = {name: sys.modules.get(PACKAGE + name) for name in MODULES}
    above = sys.modules[PACKAGE.rpartition(".")[0]]
    with drop_in.install():
        names: dict[str, Any] = {"torch": torch}
        exec(PROGRAM, names)
        taken = [
            names["MegatronFSDP"] is megatron_fsdp.MegatronFSDP,
            names["fully_shard"] is megatron_fsdp.fully_shard,
            names["found"],
            names["in_place"],
            names["utils"].FSDPDistributedIndex is names["FSDPDistributedIndex"],
            names["preprocess_state_dict_for_uneven_dtensor"]
            is loop_state_dicts.preprocess_state_dict_for_uneven_dtensor,
            isinstance(import_module(f"{PACKAGE}.utils"), ModuleType),
            names_of_others() == ["preprocess_state_dict_for_uneven_dtensor"],
        ]
    after = {name: sys.modules.get(PACKAGE + name) for name in MODULES}
    taken.append(after == before and above.megatron_fsdp is before[""])
    return taken


def test_programs_that_import_by_this_path_get_the_names_of_this_project() -> None:
    assert run_ranks(1, import_by_path) == [[True] * 9]

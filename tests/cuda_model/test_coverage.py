# SPDX-License-Identifier: Apache-2.0
"""The model covers every call of `torch.cuda`, of streams and of collectives in the project.

Read from the sources with ast. A call is modelled, or it is listed here with the reason why not.
"""

import ast
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.syntax_trees import parse
from tools.cuda_model.machine import CudaModel

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("megatron", "megatron_fsdp", "pretrain_gpt.py")

CARRIED = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor"),
    *("all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "broadcast"),
    *("broadcast_object_list", "barrier"),
}
"""Collectives of torch that end in the methods of process groups, which `nccl.py` replaces."""

NOT_MODELLED = {
    "is_available": "the model has no driver: what asks for one takes the way of a CPU",
    "get_device_name": "a name, read where a GPU is available",
    "memory_stats": "a report, read where a GPU is available",
    "memory._record_memory_history": "a report of torch's allocator",
    "memory._dump_snapshot": "a report of torch's allocator",
    "get_rng_state": "no memory: the state of a generator is copied by the host",
    "set_rng_state": "no memory: the state of a generator is copied by the host",
    "get_device_properties": "numbers of a GPU",
    "cudart": "locks memory of the host, which is modelled where the device has a name",
    "check_error": "locks memory of the host, which is modelled where the device has a name",
    "device": "the current device, of which the model has one",
    "FloatTensor": "a name in a text",
    "nvtx": "names of ranges for a profiler",
}
"""What the model leaves out, with the reason."""


@cache
def dotted_names() -> dict[str, Path]:
    """Return all dotted names in the sources, each with a file, without those that go on."""
    found = {}
    for name in SOURCES:
        path = REPOSITORY / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            nodes = ast.walk(parse(file.read_text()))
            attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
            inner = {id(node.value) for node in attributes}
            for node in attributes:
                if id(node) not in inner:
                    found[dotted(node)] = file
    return found


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of attributes of a name, and what is left of other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_below(prefix: str) -> dict[str, Path]:
    """Return the names below a module that the sources use."""
    names = dotted_names().items()
    return {name.removeprefix(prefix): file for name, file in names if name.startswith(prefix)}


def test_every_name_of_torch_cuda_is_modelled_or_left_out_with_a_reason() -> None:
    modelled = set(CudaModel().replacements_of_cuda())
    used = names_below("torch.cuda.")
    unknown = {name: path for name, path in used.items() if name not in modelled | {*NOT_MODELLED}}
    assert not unknown, f"model these, or say why not: {unknown}"
    assert not NOT_MODELLED.keys() & modelled
    assert {"Stream", "current_stream", "stream"} <= used.keys()


def test_every_collective_of_the_project_is_carried_by_the_model() -> None:
    asked = {
        *("get_rank", "get_world_size", "is_initialized", "is_available", "get_backend_config"),
        *("get_process_group_ranks", "init_process_group", "destroy_process_group", "new_group"),
        *("get_node_local_rank", "get_backend", "is_torchelastic_launched"),
    }
    used = {name for name in names_below("dist.") if callable(getattr(dist, name, None))}
    functions = {name for name in used if not isinstance(getattr(dist, name), type)}
    unknown = functions - CARRIED - asked
    assert not unknown, f"no collective that the model carries: {sorted(unknown)}"
    assert "all_reduce" in functions


def test_methods_of_streams_are_those_of_the_model() -> None:
    stream = CudaModel().streams.default
    last = {name.rpartition(".")[2] for name in dotted_names()}
    used = {name for name in last if name.endswith(("_stream", "_event"))}
    known = {name for name in used if hasattr(torch.cuda.Stream, name)}
    assert known and all(hasattr(stream, name) for name in known)

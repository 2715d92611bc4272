# SPDX-License-Identifier: Apache-2.0
"""The table of operations in docs/working_with_a_sharded_model.md, row by row."""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor import tensor_part
from megatron.fsdp.dtensor.tensor_part import full_tensor
from tests.fsdp.dtensor.test_operations import is_same, odd_model, plain

Row = tuple[list[str], str, str]
"""Operations, their result, and whether they communicate."""


def rows_of(text: str) -> list[Row]:
    """Read the table, whose last column begins with `none` or `gathers`."""
    lines = re.findall(r"^\| (.*) \| (.*) \| (none|gathers `p`) \|$", text, re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", first), result, how) for first, result, how in lines]


def names_over(p: Tensor, q: Tensor) -> dict[str, Any]:
    """Return the names that the operations use, for sharded or for whole tensors."""
    whole = torch.arange(p.numel(), dtype=torch.float32).view(p.shape)
    x = torch.ones(p.shape[1], 2)
    return {"p": p, "q": q, "x": x, "whole": whole, "torch": torch, "nn": nn}


def outcome(operation: str, p: Tensor, q: Tensor) -> Any:
    """Return the value of an expression, or what it prints; run a statement."""
    names = names_over(p, q)
    torch.manual_seed(5)
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = compile(operation, operation, "eval")
        except SyntaxError:
            exec(operation, names)
            return None
        value = eval(code, names)
    return printed.getvalue() or value


def wrong_rows(rows: list[Row]) -> list[str]:
    """Job: run every operation; return those that do not do what their row says."""
    p = odd_model(3).get_parameter("module.matrix.weight")
    kept = p.detach().clone()
    found = []
    for operations, result, how in rows:
        problems = problems_of_own_part if "this rank" in result else problems_of_whole
        for operation in operations:
            with patch.object(
                tensor_part, "all_gather_uneven", wraps=tensor_part.all_gather_uneven
            ) as all_gather:
                ours = outcome(operation, p, p.detach() * 0.5)
            said = list(problems(operation, result, ours, p, kept))
            if bool(all_gather.call_count) != (how != "none"):
                said.append(f"{all_gather.call_count} all-gathers")
            found += [f"`{operation}`: {each}" for each in said]
            with torch.no_grad():
                p.copy_(kept)
    return found


def problems_of_own_part(
    operation: str, result: str, ours: Any, p: DTensor, kept: DTensor
) -> Iterator[str]:
    """Yield what is wrong with an operation that gives the elements of this rank."""
    local = p.to_local()
    if isinstance(ours, str):
        if f"{local.flatten()[0]:.4f}" not in ours:
            yield f"prints {ours}"
    elif ours.data_ptr() != local.data_ptr() or ours.shape != local.shape:
        yield "does not share memory with the parameter"


def problems_of_whole(
    operation: str, result: str, ours: Any, p: DTensor, kept: DTensor
) -> Iterator[str]:
    """Yield where an operation differs from the same one on whole tensors."""
    expected = nn.Parameter(full_tensor(kept))
    expected.grad = full_tensor(p.grad)
    same = operation.replace("full_tensor", "clone")  # which plain tensors do not have
    theirs = outcome(same, expected, full_tensor(kept) * 0.5)
    is_sharded = result == "sharded like `p`" or ours is p
    if isinstance(ours, DTensor) != is_sharded:
        yield f"gives a {type(ours).__name__}"
    if not is_same(plain(ours), plain(theirs)):
        yield f"gives {ours} instead of {theirs}"
    if not is_same(full_tensor(p), expected.detach()):
        yield "leaves other values in the parameter"

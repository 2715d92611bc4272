# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that the sources use is in one list, with what replaces it.

Read from the sources with ast: imports, and attributes of what was imported.
"""

import ast
import re
from pathlib import Path

from tests.support.syntax_trees import parse

REPOSITORY = Path(__file__).parents[1]
LIST = REPOSITORY / "docs" / "decisions" / "torch_releases.md"
FOLDERS = ("megatron", "megatron_fsdp", "tests", "tools", "benchmarks", "examples")


CANDIDATES = re.compile(
    r"(?<!self)(?<!cls)\._[A-Za-z]|\bimport [^#\n]*\b_[A-Za-z]|\bfrom \S*\._|^ +_\w+,$",
    re.MULTILINE,
)
"""Where a private name of another module may be; most sources have none."""


def is_private(name: str) -> bool:
    """Return True if a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str | None:
    """Return `a.b.c` of attributes of a name, or None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def private_names(source: str) -> set[str]:
    """Return the private names of torch in a source, as they are imported from torch."""
    nodes = [*ast.walk(parse(source))]
    imported: dict[str, str] = {}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    imported[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in inner:
            first, _, rest = (dotted(node) or "").partition(".")
            if first in imported:
                found.add(f"{imported[first]}.{rest}")
    return {name for name in found if is_private(name)}


def used_names() -> set[str]:
    """Return the private names of torch in all sources, without modules that others are part of."""
    names: set[str] = set()
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            source = path.read_text()
            if "data" not in path.relative_to(REPOSITORY).parts[:2] and CANDIDATES.search(source):
                names |= private_names(source)
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def listed_names() -> list[str]:
    """Return the names in the first column of the list."""
    return re.findall(r"^\| `(torch\.[\w.]+)` \|", LIST.read_text(), re.MULTILINE)


def test_names_are_found_in_every_form() -> None:
    source = """
import torch, torch._dynamo, torch.distributed as dist
from torch.utils import _device as device, _pytree
from torch._dynamo.eval_frame import OptimizedModule
def f(tensors, self):
    torch._foreach_add_(tensors, 1)
    device._device_constructors()
    dist.distributed_c10d._world.pg_map.clear()
    self._own(torch.nn.Module.__init__, torch.zeros(1)._base)
"""
    assert private_names(source) == {
        "torch._dynamo",
        "torch.utils._device",
        "torch.utils._pytree",
        "torch._dynamo.eval_frame.OptimizedModule",
        "torch._foreach_add_",
        "torch.utils._device._device_constructors",
        "torch.distributed.distributed_c10d._world.pg_map.clear",
    }


def test_every_private_name_is_listed_with_what_replaces_it() -> None:
    listed = listed_names()
    assert len(listed) == len(set(listed))
    used = used_names()
    assert not used - set(listed), f"add to {LIST.name}: {sorted(used - set(listed))}"
    assert not set(listed) - used, f"no longer used: {sorted(set(listed) - used)}"

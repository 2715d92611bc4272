# SPDX-License-Identifier: Apache-2.0
"""Imports point one way: tools -> planning -> pretrain -> mcore_adapter -> fsdp.

Imports are read from the sources with ast. The order of files in megatron/fsdp and of rooms in
megatron/checkpoint is that of the tables of megatron/fsdp/DESIGN.md, the order of files in
megatron/pretrain/arguments that of its docstring, so that there is one list of each.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import groupby
from pathlib import Path

from tests.support.syntax_trees import parse

REPOSITORY = Path(__file__).parents[1]

DESIGN = REPOSITORY / "megatron/fsdp/DESIGN.md"
ARGUMENTS = REPOSITORY / "megatron/pretrain/arguments"

STAND_ALONE = {
    "engine.policy": (),
    "engine.states": (),
    "engine.planner": (),
    "engine.layout": ("engine.planner",),
}
"""Files of the engine that import nothing of ours but what is named here."""

KNOW_THE_DEVICE = ("engine.device", "backends.slot_memory")
"""Files of megatron/fsdp that name CUDA; the second one registers memory with NCCL."""

INTEGERS_ONLY = ("engine.planner", "engine.layout")
"""Files of the engine that every tool can import, because they do without torch."""

OURS = (
    "megatron.fsdp",
    "megatron.checkpoint",
    "megatron.huggingface",
    "megatron.mcore_adapter",
    "megatron.pretrain",
    "megatron.planning",
    "megatron_fsdp",
    "tools",
    "tests",
)
MAY_IMPORT = {
    "megatron/fsdp": ("megatron.fsdp",),
    "megatron/checkpoint": ("megatron.checkpoint", "megatron.fsdp"),
    "megatron/huggingface": ("megatron.huggingface", "megatron_fsdp", "megatron.fsdp"),
    "megatron/mcore_adapter": (
        "megatron.mcore_adapter",
        "megatron.checkpoint",
        "megatron_fsdp",
        "megatron.fsdp",
    ),
    "megatron/pretrain": (
        "megatron.pretrain",
        "megatron.mcore_adapter",
        "megatron.checkpoint",
        "megatron.fsdp",
    ),
    "megatron/planning": (
        "megatron.planning",
        "megatron.pretrain",
        "megatron.mcore_adapter",
        "megatron.fsdp",
    ),
    "megatron_fsdp": ("megatron_fsdp", "megatron.fsdp", "megatron.huggingface"),
    "tools": OURS[:-1],
    "tools/transformer_engine_on_cpu": ("tools",),  # for any project
    "tools/cuda_model": ("tools.cuda_model",),  # for any library, so it knows none
    "examples": OURS[:-2],
    "benchmarks": OURS[:-1],
    "benchmarks/low_precision": OURS,
    "benchmarks/parity": OURS,
    "benchmarks/soak": OURS,
    "benchmarks/stream_defects": OURS,
}
"""Which of our packages the files under a folder may import."""

WITHOUT_MEGATRON_CORE = (
    "megatron/fsdp",
    "megatron/checkpoint",
    "megatron/huggingface",
    "megatron_fsdp",
)
REPLACED_HERE = (
    "megatron.core.distributed.fsdp",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
)
"""What this project writes anew: nothing may lean on the other implementation."""

COLLECTIVES = """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
    all_gather_single all_reduce all_reduce_coalesced all_to_all all_to_all_single
    barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object
    irecv isend monitored_barrier recv reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor scatter scatter_object_list send"""


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield dotted names, `a.b` for `from a import b`; a relative import starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                "." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names
            )


def used_names(tree: ast.Module) -> Iterator[str]:
    """Yield every dotted name that the code mentions.

    Import aliases are resolved: `dist.barrier` is torch.distributed.barrier.
    """
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            aliases.update(
                {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = ast.unparse(node).partition(".")
            yield aliases.get(first, first) + ("." + rest if rest else "")


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def package_problems(folder: str, tree: ast.Module) -> list[str]:
    """List the imports that a file under `folder` must not have."""
    problems = []
    for name in imported_names(tree):
        if name.startswith("."):
            problems.append(f"{name}: write the absolute import")
        if is_within(name, OURS) and not is_within(name, MAY_IMPORT[folder]):
            problems.append(f"{name}: {folder} may import only {', '.join(MAY_IMPORT[folder])}")
        if is_within(name, REPLACED_HERE):
            problems.append(f"{name}: this is what the project replaces")
        if folder in WITHOUT_MEGATRON_CORE and is_within(name, ("megatron.core",)):
            problems.append(f"{name}: {folder} works without Megatron-Core")
        if folder == "megatron/fsdp" and name.split(".")[0] not in {
            "torch",
            "megatron",
            "transformer_engine",  # imported where a model has its weights
            *sys.stdlib_module_names,
        }:
            problems.append(f"{name}: the engine imports torch and the standard library only")
    return problems


def section(title: str) -> str:
    """Return the text of DESIGN.md below the heading that begins with a title."""
    (text,) = re.findall(rf"^## {title}.*\n((?:(?!## ).*\n?)*)", DESIGN.read_text(), re.MULTILINE)
    return text


@functools.cache
def fsdp_order() -> list[str]:
    """List the modules of megatron/fsdp, as `engine.layout`: each may import those before it.

    They are the rows of the tables below "Rooms". The heading of a table has the folder; a row may
    name a folder inside of that one.
    """
    order, room = [], ""
    for line in section("Rooms").splitlines():
        if line.startswith("### "):
            folder = re.match(r"### `([\w/]+)`", line)
            room = folder[1].replace("/", ".") + "." if folder else ""
        elif row := re.match(r"\| `([\w/]+)\.py` \|", line):
            order.append(room + row[1].replace("/", "."))
    return order


@functools.cache
def checkpoint_rooms() -> dict[str, tuple[str, ...]]:
    """Map each room of megatron/checkpoint to the rooms that it may import, itself among them."""
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", section("Checkpoints"), re.MULTILINE)
    return {room: (room, *re.findall(r"`(\w+)`", imports)) for room, imports in rows}


def fsdp_problems(name: str, tree: ast.Module) -> list[str]:
    """List what the module `name` of megatron/fsdp, as `engine.layout`, must not import or call."""
    order = fsdp_order()
    if name not in order:
        return [f"{name} is in no table of DESIGN.md: give it a row below the files it imports"]
    problems = []
    above = STAND_ALONE.get(name, order[: order.index(name)])
    for imported in imported_names(tree):
        inside = imported.removeprefix("megatron.fsdp.")
        if inside != imported and not is_within(inside, tuple(above)):
            problems.append(f"{imported} is not above {name} in DESIGN.md")
        if name in INTEGERS_ONLY and is_within(imported, ("torch",)):
            problems.append(f"{imported}: {name} is integers only")
    for used in {*used_names(tree), *imported_names(tree)}:
        if name not in KNOW_THE_DEVICE and is_within(used, ("torch.cuda",)):
            problems.append(f"{used}: only device.py knows the device")
        is_collective = (
            used.startswith("torch.distributed.") and used.split(".")[-1] in COLLECTIVES.split()
        )
        if name != "engine.collectives" and is_collective:
            problems.append(f"{used}: only collectives.py communicates")
    return problems


def checkpoint_problems(name: str, tree: ast.Module) -> list[str]:
    """List what the module `name` of megatron/checkpoint, as `core.parts`, must not import."""
    room = name.partition(".")[0]
    allowed = checkpoint_rooms().get(room)
    if allowed is None:
        return [f"{room} is in no table of DESIGN.md"]
    problems = []
    for imported in imported_names(tree):
        inside = imported.removeprefix("megatron.checkpoint.")
        if inside != imported and not is_within(inside, allowed):
            problems.append(f"{imported}: {room} may import {', '.join(allowed)}")
    return problems


@functools.cache
def argument_order() -> list[str]:
    """List the modules of megatron/pretrain/arguments, each of which may import those before it.

    The docstring of the package has the list; modules of one line import nothing of each other.
    """
    text = ast.get_docstring(parse((ARGUMENTS / "__init__.py").read_text())) or ""
    return re.findall(r"`([\w.]+)`", text)


def argument_problems(name: str, tree: ast.Module) -> list[str]:
    """List what the module `name` of megatron/pretrain/arguments, as `check`, must not import."""
    order = argument_order()
    if name not in order:
        return [f"{name} is not in the docstring of megatron/pretrain/arguments/__init__.py"]
    problems = []
    for imported in imported_names(tree):
        inside = imported.removeprefix("megatron.pretrain.arguments.")
        if inside != imported and not is_within(inside, tuple(order[: order.index(name)])):
            problems.append(f"{imported} is not above {name} in the docstring of the package")
    return problems


def room_imports() -> dict[tuple[str, str], str]:
    """Map pairs of rooms of megatron/pretrain, as ("data", "arguments"), to an import of them."""
    folder = REPOSITORY / "megatron/pretrain"
    pairs = {}
    for path in sorted(folder.glob("*/**/*.py")):
        room = path.relative_to(folder).parts[0]
        for imported in imported_names(parse(path.read_text())):
            parts = imported.split(".")
            if is_within(imported, ("megatron.pretrain",)) and (folder / parts[2]).is_dir():
                pairs[room, parts[2]] = f"{path.name}: {imported}"
    return pairs


def sources() -> Iterator[tuple[str, Path]]:
    """Yield every file with the innermost folder of `MAY_IMPORT` that it is in."""
    for folder in MAY_IMPORT:
        inner = tuple(f"{other}/" for other in MAY_IMPORT if other.startswith(f"{folder}/"))
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            if not path.relative_to(REPOSITORY).as_posix().startswith(inner):
                yield folder, path


def test_packages_import_only_what_is_below_them() -> None:
    problems = []
    for folder, path in sources():
        found = package_problems(folder, parse(path.read_text()))
        problems += [f"{path.relative_to(REPOSITORY)}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def fsdp_files() -> dict[str, Path]:
    """Map the modules of megatron/fsdp, as `engine.layout`, to their files."""
    folder = REPOSITORY / "megatron/fsdp"
    paths = [path for path in sorted(folder.rglob("*.py")) if path.stem != "__init__"]
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in paths}


def test_the_tables_of_the_design_list_files_that_exist_once() -> None:
    order = fsdp_order()
    assert len(order) == len(set(order)) and set(order) <= fsdp_files().keys()


def test_folders_of_fsdp_are_floors() -> None:
    """No import runs back up: each folder has one table, and files import those above."""
    folders = [name.split(".")[0] if "." in name else "" for name in fsdp_order()]
    floors = [folder for folder, _ in groupby(folders)]
    assert len(floors) == len(set(floors)), floors


def test_files_of_fsdp_import_only_files_above_them() -> None:
    problems = []
    for name, path in fsdp_files().items():
        problems += [
            f"{name}: {problem}" for problem in fsdp_problems(name, parse(path.read_text()))
        ]
    assert not problems, "\n".join(problems)


def test_rooms_of_checkpoint_import_only_what_they_may() -> None:
    folder = REPOSITORY / "megatron/checkpoint"
    problems = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts != ("__init__",):
            name = ".".join(parts)
            found = checkpoint_problems(name, parse(path.read_text()))
            problems += [f"{name}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def test_files_of_arguments_import_only_files_above_them() -> None:
    problems = []
    for path in sorted(ARGUMENTS.rglob("*.py")):
        parts = path.relative_to(ARGUMENTS).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            problems += [
                f"{name}: {each}" for each in argument_problems(name, parse(path.read_text()))
            ]
    assert not problems, "\n".join(problems)


def test_rooms_of_pretrain_are_floors() -> None:
    pairs = room_imports()
    floors: TopologicalSorter[str] = TopologicalSorter()
    for room, other in pairs:
        if room != other:
            floors.add(room, other)
    assert ("arguments", "data") in pairs
    floors.prepare()  # raises CycleError if rooms import each other


def test_megatron_stays_a_namespace() -> None:
    """An __init__.py would hide megatron.core of the installed wheel."""
    assert not (REPOSITORY / "megatron/__init__.py").exists()


def test_every_package_has_an_init_file() -> None:
    folders = {path.parent for folder, path in sources() if folder.startswith("megatron")}
    missing = sorted(
        str(folder.relative_to(REPOSITORY))
        for folder in folders
        if not (folder / "__init__.py").exists()
    )
    assert not missing, f"no __init__.py in {', '.join(missing)}"


WRONG_LINES = {
    package_problems: [
        ("megatron/fsdp", "from megatron.core import x", "works without Megatron-Core"),
        ("megatron/fsdp", "import numpy", "torch and the standard library only"),
        ("megatron/fsdp", "from megatron.pretrain.data import x", "may import only megatron.fsdp"),
        ("megatron/fsdp", "from .layout import x", "absolute import"),
        ("megatron/checkpoint", "import megatron.core.timers", "works without Megatron-Core"),
        ("megatron/mcore_adapter", "def f():\n  from megatron.pretrain import x", "import only"),
        ("megatron/pretrain", "from megatron.core.distributed import fsdp", "project replaces"),
        ("megatron_fsdp", "from megatron.mcore_adapter import x", "may import only"),
    ],
    fsdp_problems: [
        ("engine.buffer", "from megatron.fsdp.engine.hooks import x", "not above engine.buffer"),
        ("engine.buffer", "from megatron.fsdp.engine import hooks", "not above engine.buffer"),
        ("engine.buffer", "from megatron.fsdp.dtensor.operations import x", "not above engine.b"),
        ("dtensor.operations", "from megatron.fsdp import model", "not above dtensor.operations"),
        ("engine.layout", "from megatron.fsdp.engine.policy import x", "not above engine.layout"),
        ("engine.layout", "import torch", "integers only"),
        ("fully_shard", "import torch\ntorch.cuda.synchronize()", "only device.py"),
        ("fully_shard", "from torch import cuda", "only device.py"),
        (
            "fully_shard",
            "import torch.distributed as d\nd.barrier()",
            "only collectives.py",
        ),
        (
            "fully_shard",
            "from torch.distributed import all_reduce as r",
            "only collectives.py",
        ),
        ("novelty", "", "in no table of DESIGN.md"),
    ],
    checkpoint_problems: [
        ("core.parts", "from megatron.checkpoint.torch_dist import x", "core may import"),
        ("core.parts", "import megatron.checkpoint.commands.formats", "core may import core"),
        ("torch_dist.x", "def f():\n  import megatron.checkpoint.fsdp_dtensor", "torch_dist, core"),
        ("hugging_face.x", "from megatron.checkpoint import torch_dist", "may import hugging_face"),
        ("__main__", "from megatron.checkpoint.core import x", "may import __main__, commands"),
        ("zarr.checkpoint", "", "in no table of DESIGN.md"),
    ],
    argument_problems: [
        ("check", "from megatron.pretrain.arguments.parser import x", "not above check"),
        ("flags", "from megatron.pretrain.arguments import tables", "not above flags"),
        ("tables.file_flags", "import megatron.pretrain.arguments.tables.file_flags", "not above"),
        ("novelty", "", "not in the docstring"),
    ],
}
"""What looks for wrong lines -> places, lines that are wrong there, and a part of what is said."""


def test_wrong_lines_are_found() -> None:
    missed = []
    for find, rows in WRONG_LINES.items():
        for place, source, problem in rows:
            found = find(place, ast.parse(source))
            if not any(problem in each for each in found):
                missed.append((place, source, problem, found))
    assert not missed

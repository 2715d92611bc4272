# SPDX-License-Identifier: Apache-2.0
"""A deliberate defect in the handling of streams, and what the model of CUDA reports of it.

A defect is a replacement of text in the source of one function or more. It is made in the process
that runs the scenario, and undone afterwards.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.support.cuda_model.machine import cuda_model
from tests.support.cuda_model.scenarios import SCENARIOS
from tests.support.fsdp.meshes import Meshes
from tests.support.rank_pool import run_ranks
from tools.cuda_model.reports import DEADLOCK, ORDER


@dataclass(frozen=True)
class Edit:
    """Changes of a function's source.

    Args:
        place: module and name of the function, with a colon between them.
        changes: text that stands in the source exactly once, and what takes its place.
    """

    place: str
    changes: tuple[tuple[str, str], ...]

    def made(self) -> tuple[Any, str, Any, str]:
        """Return the function's owner, its name, itself, and the changed source.

        Raises:
            ValueError: a text does not stand in the source exactly once.
        """
        module_name, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(module_name)
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        function = inspect.getattr_static(owner, name)
        source = textwrap.dedent(inspect.getsource(plain_function(function)))
        for text, other in self.changes:
            if source.count(text) != 1:
                raise ValueError(f"{self.place}: {text!r} is there {source.count(text)} times")
            source = source.replace(text, other)
        return (
            owner,
            name,
            function,
            source.replace("super()", f"super({path[: -len(name) - 1]}, self)"),
        )


def plain_function(member: Any) -> Any:
    """Return the function of a module or a class behind its decorators."""
    return inspect.unwrap(member.fget if isinstance(member, property) else member)


@dataclass(frozen=True)
class Defect:
    """Edits that make one defect, the scenario that shows it, and the kinds of its reports.

    All ranks report them, or some if ``is_of_some_ranks``.
    """

    name: str
    scenario: str
    edits: tuple[Edit, ...]
    kinds: tuple[str, ...]
    is_of_some_ranks: bool = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the edits while the context lasts."""
        with ExitStack() as patches:
            for edit in self.edits:
                owner, name, function, source = edit.made()
                scope: dict[str, Any] = {}
                code = compile(source, f"<{self.name}>", "exec")
                exec(code, plain_function(function).__globals__, scope)
                patches.enter_context(patch.object(owner, name, scope[name]))
                for module in list(sys.modules.values()):  # those that import it by name
                    is_ours = getattr(module, "__name__", "").startswith("megatron.")
                    if is_ours and vars(module).get(name) is function:
                        patches.enter_context(patch.object(module, name, scope[name]))
            yield


def findings_with(defect: Defect) -> list[tuple[str, str]]:
    """Run a defect's scenario on this rank; return the kinds and texts of what was reported."""
    scenario = SCENARIOS[defect.scenario]
    meshes = Meshes()
    compares = ORDER in defect.kinds or DEADLOCK in defect.kinds
    with defect.made(), cuda_model(compares, True, scenario.backend) as model:
        try:
            scenario.program(meshes)
        except (RuntimeError, AttributeError, AssertionError):
            if not model.reports:  # otherwise memory that is gone was not read, for example
                raise
    return [(report.kind, str(report)) for report in model.reports]


def missing_kinds(defect: Defect) -> set[str]:
    """Run a defect's scenario on its ranks; return the kinds that are not reported as they should.

    Those are kinds that no rank reports, or that one does not if all ranks should.
    """
    found = run_ranks(SCENARIOS[defect.scenario].num_ranks, findings_with, defect)
    by_rank = [{kind for kind, _ in findings} for findings in found]
    if defect.is_of_some_ranks:
        by_rank = [set().union(*by_rank)]
    return set().union(*(set(defect.kinds) - kinds for kinds in by_rank))

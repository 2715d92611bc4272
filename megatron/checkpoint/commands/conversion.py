# SPDX-License-Identifier: Apache-2.0
"""Carries out a conversion: ranks share its parts, an interrupted one goes on, and the output appears when complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from megatron.checkpoint.core.directory import OutputDirectory
from megatron.checkpoint.core.parts import Part, Target
from megatron.fsdp.engine.collectives import agree

_JOURNAL = ".conversion"


class ConversionError(RuntimeError):
    """A conversion that could not be finished; nothing of it is left."""


def fingerprint(*facts: Any) -> str:
    """Tells one conversion from another: its source, as its files are on disk, and all that was asked for."""
    return hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()


def convert(
    target: Target,
    output: OutputDirectory,
    identity: str,
    show_progress: bool = True,
    oom_traceback: bool = False,
) -> list[str]:
    """Write ``target`` and publish it as ``output``.

    Called on every rank there is, with equal arguments.

    A run that was killed is taken up by the next one with the same ``identity``, on any number of
    ranks.

    Args:
        target: what is written, the same on all ranks.
        output: where it appears.
        identity: of :func:`fingerprint`.
        show_progress: a bar on the first rank, of its share.
        oom_traceback: print where it was, if memory runs out.

    Returns:
        On the first rank, what was noticed on the way.

    Raises:
        ConversionError: on every rank, with what went wrong on any. What was written is removed.
    """
    journal = output.staging / _JOURNAL
    # A part of the same name can be another one to another release of this program.
    identity = fingerprint(identity, [(part.name, part.num_bytes) for part in target.parts])
    is_new = (
        not output.staging.exists()
    )  # what an interrupted conversion has left stays for the next attempt
    _on_first_rank(lambda: _prepare(output.staging, identity), output.staging if is_new else None)
    left = _told_by_first_rank(
        [part.name for part in target.parts if not (journal / part.name).exists()]
    )
    todo = _share([part for part in target.parts if part.name in left])
    problem = None
    try:
        for part, report in _with_progress(todo, show_progress):
            if (journal / "failed").exists():  # another rank's trouble is enough
                break
            _note(journal / part.name, part.write(output.staging, report))
    except Exception as error:  # disk full, a damaged source: whatever it is, on whichever rank
        if oom_traceback and is_out_of_memory(error):
            traceback.print_exception(error)
        problem = _told(error)
        _try(lambda: (journal / "failed").touch())
    _raise_together(problem, output.staging)
    return _on_first_rank(lambda: _finish(target, output), output.staging) or []


def _prepare(staging: Path, identity: str) -> None:
    """A staging directory for this conversion: that of an interrupted one, or a new one."""
    journal = staging / _JOURNAL
    known = journal / "identity"
    if staging.exists() and not (known.is_file() and known.read_text() == identity):
        shutil.rmtree(staging)
    journal.mkdir(parents=True, exist_ok=True)
    (journal / "failed").unlink(missing_ok=True)
    known.write_text(identity)


def _finish(target: Target, output: OutputDirectory) -> list[str]:
    journal = output.staging / _JOURNAL
    results = {part.name: json.loads((journal / part.name).read_text()) for part in target.parts}
    target.finish(output.staging, results)
    shutil.rmtree(journal)
    output.publish()
    return sorted(
        {
            note
            for result in results.values()
            if isinstance(result, dict)
            for note in result.get("notes", [])
        }
    )


def _share(parts: list[Part]) -> list[Part]:
    """The parts of this rank: the largest first, each to the rank that has least so far."""
    if not _distributed():
        return list(parts)
    loads = [0] * dist.get_world_size()
    mine = []
    for part in sorted(parts, key=lambda part: (-part.num_bytes, part.name)):
        rank = loads.index(min(loads))
        loads[rank] += part.num_bytes + 1
        if rank == dist.get_rank():
            mine.append(part)
    return sorted(mine, key=lambda part: part.name)


def _with_progress(parts: list[Part], show: bool) -> Iterator[tuple[Part, Any]]:
    total = sum(part.num_bytes for part in parts)
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        disable=not show or not _is_first(),
        desc="converting",
    ) as bar:
        for part in parts:
            yield part, bar.update


def _note(path: Path, result: Any) -> None:
    """Remember that a part is done; an interruption leaves the whole note or none."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result))
    os.replace(new, path)


OUT_OF_MEMORY = "out of memory; with torchrun each rank needs its own (--oom-traceback tells where)"


def is_out_of_memory(error: Exception) -> bool:
    """Torch's allocator raises no MemoryError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _told(error: Exception) -> str:
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    text = OUT_OF_MEMORY if is_out_of_memory(error) else text
    return f"rank {dist.get_rank()}: {text}" if _distributed() else text


def _try(action: Any) -> None:
    with suppress(OSError):
        action()


def _on_first_rank(action: Callable[[], Any], staging: Path | None = None) -> Any:
    """What it returns there; None elsewhere."""
    result, problem = None, None
    if _is_first():
        try:
            result = action()
        except Exception as error:  # as above
            problem = _told(error)
    _raise_together(problem, staging)
    return result


def _told_by_first_rank(names: list[str]) -> set[str]:
    """What it has found: file systems of several nodes do not show the same at once."""
    told = [names]
    if _distributed():
        dist.broadcast_object_list(told)
    return set(told[0])


def agreed(action: Callable[[], None], tell: Callable[[Exception], str]) -> None:
    """Do something on every rank there is; what goes wrong on any of them is raised on all.

    Raises:
        ConversionError: with what ``tell`` makes of the errors, each once.
    """
    problem = None
    try:
        action()
    except ConversionError:  # all ranks have it
        raise
    except Exception as error:
        problem = tell(error)
    _raise_together(
        problem, None
    )  # ranks that are in a conversion meanwhile are in one of these too


def _raise_together(problem: str | None, staging: Path | None) -> None:
    problems = [problem] if problem else []
    if _distributed():
        problems = agree(problems)
    if problems:
        if staging is not None and _is_first():
            shutil.rmtree(staging, ignore_errors=True)
        raise ConversionError("\n".join(problems))


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_first() -> bool:
    return not _distributed() or dist.get_rank() == 0


@contextmanager
def ranks_of_torchrun() -> Iterator[None]:
    """A gloo group over the ranks of torchrun, where it started this process; else nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield
        return
    # Ranks that are done wait for the slowest, which can be hours behind.
    dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield
    finally:
        dist.destroy_process_group()

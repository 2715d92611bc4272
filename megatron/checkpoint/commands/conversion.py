# SPDX-License-Identifier: Apache-2.0
"""Execution of conversions: ranks share the parts, and the output appears when it is complete.

A conversion that was killed is continued by the next one of the same files with the same arguments:
a file in its directory identifies it, and goes last, when the tracker names the directory and the
result is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.checkpoint.core.parts import Part, Target, progress_of
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.integrity.manifest import digest_of
from megatron.checkpoint.store import directory, durable
from megatron.checkpoint.store.directory import (
    CONVERSION_IDENTITY,
    CONVERSION_JOURNAL,
    OutputDirectory,
)
from megatron.checkpoint.store.stores import BROKEN_OFF, Store, store_of
from megatron.checkpoint.store.url_staging import directory_token
from megatron.fsdp.backends import rendezvous
from megatron.fsdp.engine.collectives import agree

Result = TypeVar("Result")

_FAILED = ".failed"
"""File in the journal that notifies the other ranks of a failure."""
OUT_OF_MEMORY = "out of memory; with torchrun each rank needs its own (--oom-traceback shows where)"


class ConversionError(RuntimeError):
    """A conversion that could not be finished.

    Nothing of it is left, but where it was published already: the next one then ends it.
    """


def fingerprint(*facts: Any) -> str:
    """Return a digest of facts that JSON, or ``str``, can represent."""
    text = json.dumps(facts, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def convert(
    target: Target,
    output: OutputDirectory,
    identity: str | None = None,
    show_progress: bool = True,
    oom_traceback: bool = False,
    report: Callable[[list[str]], None] = lambda notes: None,
) -> list[str]:
    """Write ``target`` and publish it as ``output``. Called on all ranks with equal arguments.

    A conversion that was killed is continued by the next one with the same ``identity``, on any
    number of ranks.

    Args:
        target: the output to write, the same on all ranks.
        output: the directory of the output.
        identity: the :func:`fingerprint` of its source and arguments. None for a conversion that
            starts from the beginning, and cannot be continued.
        show_progress: whether to show the progress of the first rank's share.
        oom_traceback: whether to print where memory ran out.
        report: function that is called on every rank when the output is published, with the notes
            that are returned here. If it fails, the next conversion with this identity calls it
            again.

    Returns:
        On the first rank, the notes of all parts.

    Raises:
        ConversionError: on every rank, with the errors of all ranks, and if something else is at
            the place of the output.
    """
    # Another release of this program may cut the same output into parts of other sizes.
    sizes = []
    for part in target.parts:
        sizes.append((part.name, part.num_bytes))
    identity = fingerprint(identity or uuid.uuid4().hex, sizes)
    _check_url(output, identity)
    place = _on_first_rank(lambda: _place_to_write(target, output, identity))
    if _distributed():
        (place,) = agree([] if place is None else [place])
    if place:
        _write(
            target,
            output,
            place=Path(place),
            identity=identity,
            show_progress=show_progress,
            oom_traceback=oom_traceback,
        )
    notes = _on_first_rank(lambda: _finish(target, output)) or []
    report(notes)
    _on_first_rank(output.complete)
    return notes


def _place_to_write(
    target: Target,
    output: OutputDirectory,
    identity: str,
) -> str:
    """Return the staging directory, or the final one if an interrupted conversion came so far.

    Empty if it had begun to remove its journal, the last of its steps but one.
    """
    if not output.is_published(identity):
        return str(output.staging)
    journal = output.final / CONVERSION_JOURNAL
    if all((journal / part.name).is_file() for part in target.parts):
        return str(output.final)
    return ""


def _write(
    target: Target,
    output: OutputDirectory,
    place: Path,
    identity: str,
    show_progress: bool,
    oom_traceback: bool,
) -> None:
    """Write all parts that an interrupted conversion has not, and publish the output."""
    is_continued = directory.has_identity(place, identity)
    # Parts that were finished before are kept if a rank fails before it has come to its own.
    removed_on_error = None
    if not is_continued:
        removed_on_error = place
    _on_first_rank(lambda: _prepare(place, identity, is_continued), removed_on_error)
    problem = None
    try:
        _write_parts(_share(target.parts), place, show_progress and _is_first())
    except Exception as error:  # a full disk, a damaged source: anything, on any rank
        if oom_traceback and is_out_of_memory(error):
            traceback.print_exception(error)
        problem = _message_of_rank(error)
        with suppress(OSError):
            (place / CONVERSION_JOURNAL / _FAILED).touch()
    _raise_together(problem, output.staging)
    _on_first_rank(lambda: _publish(target, output, place), output.staging)


def _prepare(
    place: Path,
    identity: str,
    is_continued: bool,
) -> None:
    """Make the staging directory, or keep the one that an interrupted conversion has left."""
    journal = place / CONVERSION_JOURNAL
    if not is_continued and place.exists():
        shutil.rmtree(place)
    journal.mkdir(parents=True, exist_ok=True)
    if not is_continued:
        durable.write_text(place / CONVERSION_IDENTITY, identity)
    (journal / _FAILED).unlink(missing_ok=True)


def _write_parts(
    parts: Sequence[Part],
    staging: Path,
    show_progress: bool,
) -> None:
    """Write parts and record their results until all are done or another rank has failed."""
    journal = staging / CONVERSION_JOURNAL
    total = sum(part.num_bytes for part in parts)
    with progress_of("converting", total, show=show_progress) as advance:
        for part in parts:
            if (journal / _FAILED).exists():
                break
            if _is_whole(part, staging):
                advance(part.num_bytes)
                continue
            result = pickle.dumps(part.write(staging, advance))
            durable.sync_directory(staging)  # the file is there before its result is
            digest = hashlib.sha256(result).digest()
            durable.write_bytes(journal / part.name, digest + result)


def _is_whole(part: Part, staging: Path) -> bool:
    """Return True for a part that an interrupted conversion has written, and is as it was."""
    result = _result_of(part, staging)
    if result is None or "file" not in result:
        return result is not None
    name, digest = result["file"]
    return (staging / name).is_file() and bool(digest_of(staging / name) == digest)


def _result_of(part: Part, place: Path) -> Any:
    """Return the recorded result of a part; None if it has none, or a damaged one."""
    path = place / CONVERSION_JOURNAL / part.name
    if not path.is_file():
        return None
    content = path.read_bytes()
    result = content[32:]
    if hashlib.sha256(result).digest() != content[:32]:
        return None
    return safe_pickle.load(result)


def _publish(
    target: Target,
    output: OutputDirectory,
    place: Path,
) -> None:
    """Write the files that depend on all parts, and make the output visible unless it is."""
    results = {}
    for part in target.parts:
        results[part.name] = _result_of(part, place)
    target.finish(place, results)
    if place == output.staging:
        output.publish()


def _finish(target: Target, output: OutputDirectory) -> list[str]:
    """Let the tracker name the published output, remove the journal, and return all notes."""
    output.track()
    notes = set()
    for part in target.parts:
        result = _result_of(part, output.final) or {}
        notes.update(result.get("notes", []))
    journal = output.final / CONVERSION_JOURNAL
    if journal.is_dir():
        shutil.rmtree(journal)
    return sorted(notes)


def _share(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts of this rank. The largest go first, each to the rank with the least bytes.

    Parts of 5, 4, 3 and 1 bytes on two ranks: rank 0 gets 5 and 1, rank 1 gets 4 and 3.
    """
    this_rank, world_size = rank_and_world_size()
    loads = [0] * world_size
    mine = []
    for part in sorted(parts, key=lambda part: (-part.num_bytes, part.name)):
        rank = loads.index(min(loads))
        loads[rank] += part.num_bytes + 1
        if rank == this_rank:
            mine.append(part)
    return sorted(mine, key=lambda part: part.name)


# ---- outputs at URLs


def _check_url(output: OutputDirectory, identity: str) -> None:
    """Check that an output at a URL can be written; called on all ranks.

    The upload of a conversion with this identity that was broken off is repeated.

    Raises:
        ConversionError: on every rank, if not. All ranks write into one staged directory, so they
            must be on one node.
    """
    store = store_of(output.final)
    if store is None:
        return
    here = directory_token(store.staged.parent)
    if _distributed() and len(agree([here])) > 1:
        raise ConversionError(f"{store.url}: the ranks of a conversion to a URL are on one node")
    _on_first_rank(store.check_writable)

    def check() -> None:
        name = _name_at(store, output)
        marker = store.marker(name)
        if marker == identity.encode():
            output.tracker.unlink(missing_ok=True)  # the local copy of the one it has written
        elif marker is not None and not name:
            raise ValueError(f"{store.url}: {BROKEN_OFF}")
        elif name and store.has(name):
            output.is_published(identity)
            raise ValueError(f"{store.url}/{name} exists; nothing is overwritten: name a new one")

    _on_first_rank(check)


def _name_at(store: Store, output: OutputDirectory) -> str:
    """Return the name of an output in a store, empty for one that is the whole store."""
    if output.final == store.staged:
        return ""
    return output.final.relative_to(store.staged).as_posix()


def upload(output: OutputDirectory) -> None:
    """Upload an output whose directory is that of a URL; called on all ranks, which share the work.

    Raises:
        ConversionError: on every rank, if some file cannot be uploaded. The URL has nothing then.
    """
    store = store_of(output.final)
    if store is None:
        return
    final = output.final
    name = _name_at(store, output)
    identity = (final / CONVERSION_IDENTITY).read_bytes()
    sizes = {}
    for path in sorted(final.rglob("*")):
        if path.is_file() and path.name != CONVERSION_IDENTITY:
            sizes[path.relative_to(final).as_posix()] = path.stat().st_size
    rank, world_size = rank_and_world_size()
    try:
        _on_first_rank(lambda: store.begin(name, identity))
        share = list(sizes)[rank::world_size]
        agreed(lambda: store.upload(final, name, share), _message_of_rank)
        _on_first_rank(lambda: store.finish(name, sizes, output.tracked))
    except ConversionError:
        if _is_first():
            with suppress(OSError):  # what has failed may fail again; no reader sees it
                store.abandon(name)
        raise


# ---- errors and ranks


def is_out_of_memory(error: Exception) -> bool:
    """Return True if memory ran out. Torch's allocator raises no MemoryError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _message_of_rank(error: Exception) -> str:
    """Return the message of an error, with the rank if there are several."""
    if is_out_of_memory(error):
        message = OUT_OF_MEMORY
    elif isinstance(error, ValueError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
    if _distributed():
        return f"rank {dist.get_rank()}: {message}"
    return message


def _on_first_rank(
    action: Callable[[], Result],
    removed_on_error: Path | None = None,
) -> Result | None:
    """Run ``action`` on rank 0 and return its result there, None on other ranks.

    Raises:
        ConversionError: on every rank, if it fails.
    """
    result: Result | None = None
    problem: str | None = None
    if _is_first():
        try:
            result = action()
        except Exception as error:  # a full disk, a damaged source: anything
            problem = _message_of_rank(error)
    _raise_together(problem, removed_on_error)
    return result


def agreed(action: Callable[[], None], message_of: Callable[[Exception], str]) -> None:
    """Run ``action`` on every rank and raise the errors of any rank on all of them.

    Raises:
        ConversionError: with the messages, each once.
    """
    problem = None
    try:
        action()
    except ConversionError:  # all ranks have it
        raise
    except Exception as error:
        problem = message_of(error)
    # Ranks that are still converting meet this one at the exchange of problems after a step.
    _raise_together(problem, None)


def _raise_together(problem: str | None, removed_on_error: Path | None) -> None:
    """Exchange problems, and raise one error on every rank if there is any."""
    problems = []
    if problem is not None:
        problems.append(problem)
    if _distributed():
        problems = agree(problems)
    if problems:
        if removed_on_error is not None and _is_first():
            shutil.rmtree(removed_on_error, ignore_errors=True)
        raise ConversionError("\n".join(problems))


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """Return this process' rank and the number of ranks: 0 and 1 without torchrun."""
    if not _distributed():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _is_first() -> bool:
    return not _distributed() or dist.get_rank() == 0


@contextmanager
def ranks_of_torchrun() -> Iterator[None]:
    """Open a gloo group over the ranks if torchrun has started this process; else do nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield
        return
    # Ranks that are done wait for the slowest, which may be hours behind.
    dist.init_process_group("gloo", init_method=rendezvous.INIT_METHOD, timeout=timedelta(days=7))
    try:
        yield
    finally:
        dist.destroy_process_group()

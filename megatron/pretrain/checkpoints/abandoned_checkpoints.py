# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that a run with --overwrite gives up, none of which is ever loaded as its own.

They stay until the run has published its first checkpoint, and are deleted then. A list beside them
names them meanwhile. The first checkpoint may have the iteration of one of them, so it has a file
with the identifier of the list: after a kill at any moment the next start can tell whose checkpoint
is there, and finishes the deletion, or removes the list and keeps what there is.

A local checkpoint is on the disks of nodes, where the first rank alone does not see it. Therefore
the list itself says that one was published, by :func:`succeed`. After a kill between the two, the
ranks look for it together before anything is loaded.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.checkpoint.store import directory, durable, stores
from megatron.pretrain.checkpoints.run_identity import name_run, run_in

LIST = ".abandoned.json"
"""Name of the list in the directory of the persistent checkpoints."""
SUCCESSOR = "began_anew.txt"
"""Name of the file in the directory of the first checkpoint of the run that gives others up."""


@dataclass(frozen=True)
class Abandoned:
    """The content of the list.

    Attributes:
        identifier: of this list, and of no other one; and of the run, if it is to have one.
        iterations: directory -> iterations that are given up. A directory below that of the list is
            named from there.
        run: identifier of the run that is given up; empty if it had none.
        is_succeeded: the new run has published a local checkpoint.
    """

    identifier: str
    iterations: dict[str, list[int]]
    run: str = ""
    is_succeeded: bool = False

    @classmethod
    def read(cls, save: str | Path) -> Abandoned | None:
        """Read the list of a directory; None without one, or if it is damaged."""
        try:
            content = json.loads((Path(save) / LIST).read_text())
            found = {
                str(root): [int(number) for number in numbers]
                for root, numbers in content["iterations"].items()
            }
            run, is_succeeded = str(content.get("run", "")), content.get("is_succeeded") is True
            return cls(str(content["identifier"]), found, run, is_succeeded)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, save: str | Path) -> None:
        """Write the list into a directory."""
        durable.write_text(Path(save) / LIST, json.dumps(asdict(self)))

    def is_successor(self, checkpoint: Path) -> bool:
        """Return True for the first checkpoint of the run that wrote the list."""
        file = checkpoint / SUCCESSOR
        return file.is_file() and file.read_text(errors="replace") == self.identifier


def give_up(save: str | Path, others: Iterable[str | Path], first: int = 0) -> None:
    """Write the list of the checkpoints that are given up, if there are any; called on one rank.

    Args:
        save: the directory of the persistent checkpoints.
        others: those of non-persistent ones.
        first: iteration from which on they are given up.
    """
    save, iterations = Path(save).absolute(), {}
    for root in (save, *map(Path, others)):
        path = root.absolute()
        name = path.relative_to(save) if path.is_relative_to(save) else path
        iterations[str(name)] = [each for each in directory.iterations(path) if each >= first]
    run = run_in(save)
    if run or any(iterations.values()):
        Abandoned(uuid.uuid4().hex, iterations, run).write(save)


def mark(save: str | Path, checkpoint: Path) -> None:
    """Identify a checkpoint that is about to be published, if it is to end a list."""
    abandoned = Abandoned.read(save)
    if abandoned is not None:
        durable.write_text(checkpoint / SUCCESSOR, abandoned.identifier)


def delete(save: str | Path, published: int) -> None:
    """Delete what is given up, and the list, when a checkpoint has been published.

    Called on one rank. At a URL the list is in the staged directory, and ends with the process.

    Args:
        save: the directory of the persistent checkpoints.
        published: iteration of the new checkpoint.
    """
    abandoned = Abandoned.read(save)
    if abandoned is None:
        return
    store = stores.store_of(save)
    if store is None:
        _delete(Path(save), abandoned, abandoned.iterations)
    else:
        store.delete(number for number in abandoned.iterations.get(".", ()) if number != published)
        (Path(save) / LIST).unlink()


def _delete(save: Path, abandoned: Abandoned, roots: Iterable[str]) -> None:
    for root in roots:
        for iteration in abandoned.iterations[root]:
            if not abandoned.is_successor(directory.iteration_directory(save / root, iteration)):
                directory.delete(save / root, iteration)
    there = directory.iterations(save)
    if not any(abandoned.is_successor(directory.iteration_directory(save, each)) for each in there):
        # The new run has a non-persistent checkpoint only. It may have begun with a persistent one.
        if there:
            directory.write_tracker(save, there[0])
        else:
            (save / directory.TRACKER).unlink(missing_ok=True)
    (save / LIST).unlink()


def succeed(save: str | Path) -> None:
    """Delete what is given up, and the list, when all ranks have published a local checkpoint.

    Called on one rank. Runs that save at a URL have no local checkpoints.
    """
    abandoned = Abandoned.read(save)
    if abandoned is not None:
        replace(abandoned, is_succeeded=True).write(save)
        _delete(Path(save), abandoned, abandoned.iterations)


def newest_kept(save: str | Path) -> int | None:
    """Return the newest persistent iteration that is not given up, if there is a list."""
    abandoned = Abandoned.read(save)
    if abandoned is None:
        return None
    given_up = abandoned.iterations.get(".", [])
    return next((each for each in directory.iterations(save) if each not in given_up), None)


def run_to_load(save: str | Path) -> str:
    """Return the identifier of the run whose local checkpoints a run that only loads may take.

    It is that of the run that is given up as long as the new one has published nothing. A run that
    saves there asks :func:`run_in`, after :func:`settle`.
    """
    run, abandoned = run_in(save), Abandoned.read(save)
    if abandoned is None or abandoned.is_succeeded or run != abandoned.identifier:
        return run
    there = [directory.iteration_directory(save, each) for each in directory.iterations(save)]
    return run if any(map(abandoned.is_successor, there)) else abandoned.run


def settle(save: str | Path, others: Iterable[str | Path], is_local: bool = False) -> None:
    """Do what a run that was killed has left to do; called on one rank, before anything is loaded.

    Without a checkpoint of the run that gave up the others, they are still what there is.

    Args:
        save: the directory of the persistent checkpoints.
        others: those of non-persistent ones that this run may use. No other one is changed.
        is_local: this run continues there, and may find a local checkpoint. If it may be the first
            of the run that was killed, the list is left for :func:`succeed` or :func:`keep`.
    """
    save = Path(save).absolute()
    abandoned = Abandoned.read(save)
    if abandoned is None:
        (save / LIST).unlink(missing_ok=True)
        return
    own = {path.absolute() for path in (save, *map(Path, others))}
    roots = [root for root in abandoned.iterations if save / root in own]
    if abandoned.is_succeeded:
        _delete(save, abandoned, roots)
        return
    for root in own:
        for iteration in directory.iterations(root):
            if abandoned.is_successor(directory.iteration_directory(root, iteration)):
                if root == save:  # the kill may have come before the tracker file was written
                    directory.write_tracker(save, iteration)
                _delete(save, abandoned, roots)
                return
    if not (is_local and run_in(save) == abandoned.identifier):
        keep(save)


def keep(save: str | Path) -> None:
    """Remove the list: what it names is still what there is, local checkpoints too."""
    abandoned = Abandoned.read(save)
    if abandoned is not None and abandoned.run:
        name_run(save, abandoned.run)
    (Path(save) / LIST).unlink(missing_ok=True)

# SPDX-License-Identifier: Apache-2.0
"""Errors of a run that are no defect of the program."""


class RunError(RuntimeError):
    """A condition that the user can fix: reported as one message, without a traceback."""


def is_of_machine(error: Exception) -> bool:
    """Return True for errors of a disk, a network or memory, which may pass; no file is damaged."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return False  # the path is wrong
    return isinstance(error, (OSError, MemoryError))

# SPDX-License-Identifier: Apache-2.0
"""Errors of a run that are no defect of the program."""


class RunError(RuntimeError):
    """A condition that the user can fix: reported as one message, without a traceback."""

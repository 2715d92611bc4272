# SPDX-License-Identifier: Apache-2.0
"""What can go wrong during a run and is not a defect of the program."""


class RunError(RuntimeError):
    """A condition that the user can mend: reported as one message, without a traceback."""

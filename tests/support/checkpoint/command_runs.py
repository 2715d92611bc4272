# SPDX-License-Identifier: Apache-2.0
"""The checkpoint command line, run in this process."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from megatron.checkpoint.commands.command_line import main

TO_FSDP, TO_TORCH_DIST = "convert-torch-dist-to-fsdp-dtensor", "convert-fsdp-dtensor-to-torch-dist"


def run(*words: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == code, result.output
    return result


def run_json(*words: Any, code: int = 0) -> Any:
    """Run a command with --json and return the one object on its stdout."""
    lines = run(*words, "--json", code=code).stdout.splitlines()
    assert len(lines) == 1
    return json.loads(
        lines[0], parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON")
    )

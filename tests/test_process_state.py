# SPDX-License-Identifier: Apache-2.0
"""Tests leave a process as they found it: its settings are put back, and other changes noticed."""

import logging
import os
import signal
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron.fsdp.engine import collectives
from tests.support.process_state import ProcessState


@pytest.mark.parametrize(
    ("patch", "name"),
    [
        (lambda patch: patch.setattr(torch, "relu", torch.tanh), "torch.relu"),
        (lambda patch: patch.setattr(torch.Tensor, "detach", print), "Tensor.detach"),
        (lambda patch: patch.delattr(collectives, "agree"), f"{collectives.__name__}.agree"),
        (lambda patch: patch.setitem(sys.modules, collectives.__name__, os), collectives.__name__),
    ],
)
def test_what_is_patched_is_named(
    patch: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ProcessState()
    patch(monkeypatch)
    assert state.changes() == [name]
    monkeypatch.undo()
    assert state.changes() == []


def test_hooks_for_all_modules_are_named() -> None:
    state = ProcessState()
    hook = nn.modules.module.register_module_forward_hook(print)
    assert state.changes() == ["hooks of all modules"]
    hook.remove()
    assert state.changes() == []


def test_settings_are_put_back() -> None:
    state, logger = ProcessState(), logging.getLogger("megatron.fsdp")
    before = (dict(os.environ), os.getcwd(), signal.getsignal(signal.SIGTERM), logger.level)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logger.setLevel(logging.ERROR)
    torch.set_default_dtype(torch.float64)
    state.put_back()
    after = (dict(os.environ), os.getcwd(), signal.getsignal(signal.SIGTERM), logger.level)
    assert after == before and torch.get_default_dtype() is torch.float32

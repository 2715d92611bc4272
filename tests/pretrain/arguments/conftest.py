# SPDX-License-Identifier: Apache-2.0
"""The flags of the training program by name."""

import argparse

import pytest

from megatron.pretrain.arguments import build_parser


@pytest.fixture(scope="session")
def known() -> dict[str, argparse.Action]:
    actions: dict[str, argparse.Action] = {}
    for action in build_parser()._actions:
        actions |= dict.fromkeys(action.option_strings, action)
    return actions

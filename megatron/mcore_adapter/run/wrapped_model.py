# SPDX-License-Identifier: Apache-2.0
"""A model and its wrappers."""

from __future__ import annotations

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule


def unwrap(model: torch.nn.Module) -> LanguageModule:
    """Return the model inside all wrappers."""
    while not isinstance(model, LanguageModule):
        inner = model.module
        assert isinstance(inner, torch.nn.Module)
        model = inner
    return model

# SPDX-License-Identifier: Apache-2.0
"""Attributes by which Megatron-Core knows its parameters."""

from __future__ import annotations

import torch


def set_attributes(parameter: torch.Tensor, **attributes: object) -> None:
    """Set attributes that Megatron-Core or its layers look for on a parameter."""
    for name, value in attributes.items():
        setattr(parameter, name, value)

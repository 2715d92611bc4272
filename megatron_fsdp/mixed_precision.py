# SPDX-License-Identifier: Apache-2.0
"""Dtypes of main weights and gradients. See `megatron.fsdp.policy`."""

from megatron.fsdp.policy import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy"]

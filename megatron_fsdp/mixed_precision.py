# SPDX-License-Identifier: Apache-2.0
"""Dtypes of main weights and gradients. See `megatron.fsdp.engine.policy`."""

from megatron.fsdp.engine.policy import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy"]

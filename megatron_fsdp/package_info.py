# SPDX-License-Identifier: Apache-2.0
"""The version of the package."""

from megatron.fsdp import __version__

__all__ = ["__version__"]

# SPDX-License-Identifier: Apache-2.0
"""CRC-32 as fast as the processor has it.

zlib-ng computes it with the processor's instructions for polynomials, zlib mostly without. The
values are the same, so that a checkpoint does not depend on which of the two has written it.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # an environment that somebody else has made
    from zlib import crc32

__all__ = ["crc32"]

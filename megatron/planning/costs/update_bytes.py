# SPDX-License-Identifier: Apache-2.0
"""Bytes that an update of the optimizer reads and writes, for each fp32 weight.

[Note: bytes of an update] An update in one pass reads the gradient, and reads and writes the weight
and both moments. Clipping reads all gradients for their norm before, and scales them. Where torch
runs one operation after the other, as Megatron-Core does on the host, these read and write:

    norm of gradients             4   read
    clipping                     16   a product, and its copy
    weight decay                  8   read and written
    first moment                 12   two read, one written
    second moment                20   scaled, then two read and one written
    its root, divided, and more  24   three operations on a temporary tensor
    weight                       16   three read, one written
"""

NORM = 4
SCALING = 8
"""Gradients are scaled in place."""

COPIED_SCALING = 16
"""Gradients are scaled by a product, whose result is copied."""

ONE_PASS = 28
"""AdamW by one kernel."""

ADAMW = 80
"""AdamW by torch, one operation after the other."""

CLIPPED = NORM + SCALING + ONE_PASS
"""Kernels over many tensors, of Transformer Engine or Apex, and updates from files."""

CLIPPED_BY_TORCH = NORM + COPIED_SCALING + ONE_PASS
"""Clipping by torch, and its fused AdamW."""

ALL_BY_TORCH = NORM + COPIED_SCALING + ADAMW
"""Clipping and AdamW by torch, one operation after the other."""

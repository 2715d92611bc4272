# SPDX-License-Identifier: Apache-2.0
"""Backends that plug into the engine: memory slots, NCCL memory, and messages over gloo."""

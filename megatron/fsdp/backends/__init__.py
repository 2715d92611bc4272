# SPDX-License-Identifier: Apache-2.0
"""Backends that plug into the engine: memory slots, host memory, and messages over gloo."""

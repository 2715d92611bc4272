# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats and key rules; needs no GPU, no model and no Megatron-Core."""

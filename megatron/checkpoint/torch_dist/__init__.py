# SPDX-License-Identifier: Apache-2.0
"""The format torch_dist of runs without FSDP.

``checkpoint`` reads and writes it. ``optimizer_layouts`` reads the optimizer in every layout that
Megatron-Core has written, with ``optimizer_buckets`` for the layouts by rank.
"""

# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own training loop: its command line, its process and its checkpoints.

`megatron.mcore_adapter.drop_in` puts these parts in place.
"""

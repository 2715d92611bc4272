# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: what is saved and loaded, where, and in which format."""

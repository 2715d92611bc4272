# SPDX-License-Identifier: Apache-2.0
"""Sharded training with accelerate and transformers, through their public extension points."""

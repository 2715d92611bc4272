# SPDX-License-Identifier: Apache-2.0
"""The optimizer over sharded parameters."""

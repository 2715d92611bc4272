# SPDX-License-Identifier: Apache-2.0
"""A sharded module: its units and gradients, its wrapper, and access between its forwards."""

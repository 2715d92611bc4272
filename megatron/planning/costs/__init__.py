# SPDX-License-Identifier: Apache-2.0
"""The planner's model of time and memory: kernels, layers, and whole steps by formulas."""

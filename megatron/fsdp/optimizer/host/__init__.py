# SPDX-License-Identifier: Apache-2.0
"""Main weights, gradients and optimizer state in host memory or in files."""

# SPDX-License-Identifier: Apache-2.0
"""The watch over the ranks of a run."""

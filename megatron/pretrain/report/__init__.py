# SPDX-License-Identifier: Apache-2.0
"""The report of a run: lines, curves, times, traces and logs."""

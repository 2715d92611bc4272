# SPDX-License-Identifier: Apache-2.0
"""The model of a run, its optimizer, and what is counted and computed with them."""

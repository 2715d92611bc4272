# SPDX-License-Identifier: Apache-2.0
"""Parts of the page on scale that ``benchmarks/scale.py`` writes."""

# SPDX-License-Identifier: Apache-2.0
"""The algorithm of fully sharded data parallelism. Each file uses only files before it.

The files are listed, in order, in DESIGN.md; begin with the notes of ``states.py``.
"""

# SPDX-License-Identifier: Apache-2.0
"""Programs that repeat a few kinds of accidents, or random cases, as often as one likes.

A case of each is a test. They use what the tests are made of (``tests.support``): the same runs,
references and ranks, only more of them. Each prints a table; those of long runs are in
``benchmarks/results``.
"""

# SPDX-License-Identifier: Apache-2.0
"""Broken lines of the product, each of which a test must notice.

    python -m benchmarks.broken_lines                     the table, and lines drawn at random
    python -m benchmarks.broken_lines engine divisor      those of a part, or with such a name
    python -m benchmarks.broken_lines --tests-of COMMIT   with the tests of another commit
    python -m benchmarks.broken_lines --likely            without the tests of other parts
    python -m benchmarks.broken_lines --report            what the last runs have found

Each line is broken in a copy of the repository. The tests that are likely to notice run first, then
those of its part of the library that `make test` runs, then all of that part, then everything. A
run that was interrupted goes on where it was: what is known of a line stands in
`build/broken_lines.jsonl`, which is to be removed to begin anew.
"""

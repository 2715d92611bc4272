# SPDX-License-Identifier: Apache-2.0
"""The command lines of these tests name the same data."""

from tests.pretrain.conftest import counting_corpus  # noqa: F401

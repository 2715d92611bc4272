# SPDX-License-Identifier: Apache-2.0
"""A test here has command lines that name the data of training runs."""

from tests.pretrain.conftest import counting_corpus  # noqa: F401

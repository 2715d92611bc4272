# SPDX-License-Identifier: Apache-2.0
"""A test here has a command line that names the data of training runs."""

from tests.pretrain.conftest import counting_corpus  # noqa: F401

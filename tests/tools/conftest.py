# SPDX-License-Identifier: Apache-2.0
"""Command lines that name the data of training runs, and ranks with Transformer Engine."""

from tests.fsdp.quantized.conftest import blackwell, hopper  # noqa: F401
from tests.pretrain.conftest import counting_corpus  # noqa: F401

# SPDX-License-Identifier: Apache-2.0
"""Import of Transformer Engine into a server of ranks, before Megatron-Core."""

import os

from tools.transformer_engine_on_cpu import use

major, minor = os.environ["EMULATED_CAPABILITY"].split(".")
use((int(major), int(minor)))

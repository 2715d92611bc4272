# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine on a machine without CUDA: its own Python, with kernels emulated in torch.

    te = transformer_engine_on_cpu.use()        # `te` is transformer_engine.pytorch
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16)

Its own classes run: tensors, quantizers, recipes, modules. Kernels compute as those of the GPU do
where these are deterministic, in float32 and without caring for speed. See README.md.
"""

from tools.transformer_engine_on_cpu.loading import BLACKWELL, HOPPER, use
from tools.transformer_engine_on_cpu.wheel import RELEASE, obstacle

__all__ = ["BLACKWELL", "HOPPER", "RELEASE", "obstacle", "use"]

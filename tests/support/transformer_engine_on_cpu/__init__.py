# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine with kernels emulated in torch, for tests on CPU ranks.

    te = transformer_engine_on_cpu.use()        # `te` is transformer_engine.pytorch
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16)

The import changes the process for good, so tests call it in ranks of their own: see `ranks`.

Its own classes run: tensors, quantizers, recipes, modules. Kernels compute as those of the GPU do
where these are deterministic, in float32 and without caring for speed.
"""

from tests.support.transformer_engine_on_cpu.loading import BLACKWELL, HOPPER, use
from tests.support.transformer_engine_on_cpu.wheel import obstacle, require

__all__ = ["BLACKWELL", "HOPPER", "obstacle", "require", "use"]

# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine with kernels emulated in torch, for tests on CPU ranks.

    def ranks_see(...) -> ...:          # in a process that nobody else's tests run in
        te = transformer_engine_on_cpu.use()
        layer = te.Linear(64, 64, params_dtype=torch.bfloat16)

    def test_something() -> None:
        transformer_engine_on_cpu.require()
        ...

Its own classes run: tensors, quantizers, recipes, modules. Kernels compute as those of the GPU do
where these are deterministic, in float32 and without caring for speed.
"""

from tests.support.transformer_engine_on_cpu.loading import BLACKWELL, HOPPER, use
from tests.support.transformer_engine_on_cpu.wheel import obstacle, require

__all__ = ["BLACKWELL", "HOPPER", "obstacle", "require", "use"]

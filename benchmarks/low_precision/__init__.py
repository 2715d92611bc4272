# SPDX-License-Identifier: Apache-2.0
"""Programs that measure training in FP8 and with moments of few bits, on emulated kernels.

Ranks are those of the tests (``tests.support``): CPU processes that have Transformer Engine, its
kernels emulated in torch. The numbers are those of the formats, times say nothing.
"""

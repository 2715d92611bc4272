# SPDX-License-Identifier: Apache-2.0
"""Deliberate defects in the handling of streams, each of which the model of CUDA must report.

    python -m benchmarks.stream_defects                every defect
    python -m benchmarks.stream_defects gather slot    those whose names contain one of the words

    python -m benchmarks.stream_defects.drawn          others that are drawn at random

The model is `tools/cuda_model`. A defect is made in functions of the library, in the ranks that run
one of the trainings of `tests/support/cuda_model/scenarios.py`. `tests/cuda_model/test_defects.py`
has a defect of each kind.
"""

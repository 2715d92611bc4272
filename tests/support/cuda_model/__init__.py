# SPDX-License-Identifier: Apache-2.0
"""Trainings of this library on the model of a CUDA device (`tools/cuda_model`).

| file | holds |
|---|---|
| `machine.py` | the model with the streams of the engine, whose units and buffers it names |
| `scenarios.py` | trainings of `fully_shard` that run on it |
| `group_programs.py` | owners of matrices, groups of some ranks |
| `core_graphs.py`, `graph_runs.py` | trainings that capture graphs |

Trainings through the adapter: `tests/support/mcore_adapter/runs_on_cuda_model.py`.
"""

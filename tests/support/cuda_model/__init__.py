# SPDX-License-Identifier: Apache-2.0
"""Trainings of this library on the model of a CUDA device (`tools/cuda_model`), and its defects.

| file | holds |
|---|---|
| `machine.py` | the model with the streams of the engine, whose units and buffers it names |
| `scenarios.py` | trainings of `fully_shard` that run on it |
| `adapter_runs.py` | trainings through the adapter that run on it |
| `core_graphs.py`, `graph_runs.py` | trainings that capture graphs |
| `defects.py` | defects that are made in functions of the library |
| `defects_of_streams.py` | the table of deliberate defects in stream handling |
"""

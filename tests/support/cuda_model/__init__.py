# SPDX-License-Identifier: Apache-2.0
"""A model of a CUDA device and of NCCL on CPU ranks: it reports every use of memory out of order.

| file | holds |
|---|---|
| `reports.py` | the reports: two accesses each, with unit, stream and stack |
| `memory.py` | blocks of memory, and the rules of the caching allocator |
| `streams.py` | streams and events, as `torch.cuda` has them |
| `detector.py` | the race detector: happens-before by torch's own sanitizer |
| `operators.py` | a dispatch mode that makes every operator an event on the current stream |
| `nccl.py` | collectives on the streams of their groups, and NCCL's rules |
| `graphs.py` | graphs: captures, their rules, and replays |
| `pools.py` | memory pools, and their registration with groups |
| `machine.py` | the machine: everything that is patched, and restored |
| `scenarios.py` | trainings of `fully_shard` that run on it |
| `adapter_runs.py` | trainings through the adapter that run on it |
| `defects.py` | defects that are made in functions of the library |
| `defects_of_streams.py` | the table of deliberate defects in stream handling |
"""

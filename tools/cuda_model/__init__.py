# SPDX-License-Identifier: Apache-2.0
"""A model of a CUDA device and of NCCL on CPUs: it reports every use of memory out of order.

The README says what it is for. It needs torch only.

| file | holds |
|---|---|
| `reports.py` | the reports: two accesses each, with stream and stack |
| `ranges.py` | ranges of blocks, with accesses of their own |
| `memory.py` | blocks of memory, and the rules of the caching allocator |
| `host.py` | the host's memory, pinned or not, which copies use |
| `streams.py` | streams and events, as `torch.cuda` has them |
| `graphs.py` | graphs: captures, their rules, and replays |
| `detector.py` | the race detector: happens-before by torch's own sanitizer |
| `nccl.py` | collectives on the streams of their groups, and NCCL's rules |
| `operators.py` | a dispatch mode that makes every operator an event on the current stream |
| `pools.py` | memory pools, and their registration with groups |
| `machine.py` | the machine: everything that is patched, and restored |
| `device_names.py` | the device "cuda" and the backend "nccl", for programs that name them |
| `__main__.py` | the command line: a program of its own on the machine |
"""

from tools.cuda_model.machine import CudaModel, cuda_model
from tools.cuda_model.reports import Finding

__all__ = ["CudaModel", "Finding", "cuda_model"]

# SPDX-License-Identifier: Apache-2.0
"""The text of the page on scale, between its tables."""

BEGINNING = """\
Every number here is a plan by the formulas of `tools/plan.py`, unless a line says that it was
measured. Their errors are those of [80 published
runs](../../docs/planning.md#plans-beside-published-runs). Those runs have 8 to 2,048 GPUs, those of
level 3 at most 256. The two largest of the section "What can be checked" have 8,192 and 16,384, by
DDP's kind of sharding with TP and PP. Beyond that no step is published, so nothing here can be
checked. All rows are in [`scale.tsv`](scale.tsv)."""

OF_MODELS = """\
Parameters are those of all matrices, by `ModelSizes`. DeepSeek-V3 is in bf16, without the layer
that predicts a second token. The last model is invented: 104 layers, four of them dense with an
MLP of 49,152, experts of width 2,048, one of them shared, 96 heads of 128 with 8 of keys, a
vocabulary of 131,072."""

OF_CHECKS = """\
Llama 3 405B on H100 with TP 8, 16 stages and 2,048 sequences, beside table 4 of its report. The
report does not say how many virtual stages there were."""

OF_SIMULATION = """\
Level 3 on H100, the formulas beside the engine, which runs its own schedule on pretended ranks.
Two values are of the formulas and of the engine. They agree where compute hides the messages.
Where it does not, the formulas are slower: they send gathers and reductions of a backward one
after the other, the simulation lets both use the same links at once, each at full speed. The
truth should be between them. In the formulas, what a layer loses beside a message counts as
exposed, in the engine as compute. Memory of the formulas has workspaces and lasting buffers that
the engine's has not."""

OF_SWEEP = """\
![MFU over the number of GPUs](scale_speed.png)

![Memory over the number of GPUs](scale_memory.png)

A cell has the memory of the GPU with the most, the seconds of a step, the part of it in which
compute waits for the gathers and reductions of shards, the part that all messages cost together
(also those of tensor and expert parallelism and between stages), and MFU in bold. "No" does not
fit 90 % of the memory. A star: the run's batch has fewer sequences than data ranks, so the step
has one for each of them, a larger batch than the run's. Other batches are rounded up to a
multiple of what the ranks read at once. Microbatches of 1, 2 or 4 sequences, recomputation of
no or all layers, 64 to 512 GPUs for a copy of hybrid sharding, EP of 8 to 64, 2 to 16 stages
with up to 8 virtual ones: the fastest that fits is shown. Software is that of
`pretrain_gpt.py`: messages of TP and exchanges of tokens overlap with nothing, which costs
models with experts most. With TP, PP or EP there may be two context-parallel ranks ("CP 2"),
where sequences have 8,192 tokens: parts of fewer than 4,096 are not tried. FP8 and offload are
left out."""

OF_GB200 = """\
Racks of 64 GPUs that NVLink joins, with 186 GB each: the fastest strategy that fits and has the
batch of the run. Cells are as above."""

OF_STOPS = """\
A strategy counts as stopped by memory if nothing fits, by the batch if the run's has fewer
sequences than data ranks, and by messages or the bubble if compute waits for shards, or stages
for others, in more than 20 % of the step by the formulas. The engine's simulation has less than
20 % at the two points on 16,384 GPUs above. The planner's collectives have log2(n) latencies
("trees"). A ring has n - 1. NCCL's all-gather and reduce-scatter are rings, and trees where few
bytes go to many ranks (PAT, a new algorithm for all-gather and reduce-scatter operations at
scale, arXiv:2506.20252). Both are shown: above 4,096 GPUs this matters more than the strategy.
Rings here have 3 microseconds inside of a node and 10 between nodes for each rank, the
planner's estimates. All-reduces stay trees."""

OF_HYBRID = """\
Tokens a second of hybrid sharding in those of plain level 3, with trees / with rings, and the
memory that it costs (with rings). Both have their best layouts, whose microbatches, context
parallelism and recomputation may differ. With trees there is nothing to win: a gather moves as
many bytes to a GPU from 64 as from 65,536. With rings it is what makes level 3 possible above
4,096 GPUs. It costs main weights, moments and gradients of 1/64 to 1/512 of the model on every
GPU, which 2 trillion parameters do not leave room for on H100."""

OF_FAILURES = """\
Time between failures is that of published runs, scaled by the number of GPUs: twice the GPUs,
twice the failures."""

OF_GOODPUT = """\
![Goodput over the number of GPUs](scale_goodput.png)

A checkpoint has 14 bytes a parameter: main weight and two moments in fp32, and bf16. A save
that blocks holds training until it is written, one in the background for the copy to the host
([measured here](background_save.md), on a CPU). Its interval is that of Young and Daly, the
square root of twice the time between failures times what a save holds; one in the background
takes at least the time of writing, and 60 s. Goodput is by Daly's exponential model, with the
rate of Llama 3 if no other is named."""

OF_PUBLISHED = """\
Published goodput beside this model, with saves in the background. For the two runs whose models
are not named, 200 billion and 2 trillion parameters are assumed. The ten minutes of a restart are
from the last run, which lost more than the model says."""

OF_WORLDS = """\
`OMP_NUM_THREADS=1 python benchmarks/world_size.py`, on two cores that others used too: the real
engine, on the first rank of a world that pretends. Sharding and the step do not grow with the
world. Plans do, outside of the engine: Megatron-Core makes the process groups of all ranks on
every rank, once for each setting that is simulated. On 8,192 ranks these were 37 of the 51
seconds of four simulations, by a profile (`python -m cProfile`)."""

ASSUMED = """\
- A node writes and reads 2 GB/s, all together at most 2 TB/s (the sustained throughput of Llama
  3's file system, section 3.3.1 of its report).
- A restart takes 10 minutes and the time to read the checkpoint, at every size. Ten minutes are
  the stall of a recovery on some 100,000 GPUs (arXiv:2602.00277); smaller runs may be faster.
- Failures are independent, and as frequent for each GPU on any number of them. Stragglers and slow
  links, which cost time without a failure, are not counted.
- Links between nodes have their full bandwidth at any distance: no oversubscribed switches.
- Experts get equal numbers of tokens. The batch of the model of 2 trillion parameters is assumed.
- Whether a model still learns as well with the larger batches of starred cells is not asked.
- A failure stops all GPUs. Hybrid sharding has copies from which a lost rank could be restored
  without a checkpoint; this library does not do that."""

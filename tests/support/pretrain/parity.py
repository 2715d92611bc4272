# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's data parallelism and ours under the same flags.

Both train on the same data. Losses and gradient norms agree within 1e-5 in fp32; in bf16 losses
within 1e-2 and the first gradient norm within 1e-3. `python -m benchmarks.parity.table` measures a
table of combinations.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace

from tests.support.fork_servers import INSTALLED, Packages
from tests.support.pretrain.training_runs import DATA, NO_DROPOUT, Record, train
from tests.support.rank_pool import run_ranks

STEPS = 10

RUN = (
    f"{DATA} {NO_DROPOUT} --train-iters {STEPS} --lr 5e-3 --lr-decay-iters 20 --log-params-norm"
    " --log-num-zeros-in-grad"
)

SIZES = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 8"
)

ROPE = "--position-embedding-type rope"

LLAMA = (
    f"{ROPE} --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)

UNTIED = "--untie-embeddings-and-output-weights"
TIED = LLAMA.replace(UNTIED, "")

MOE = (
    f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-aux-loss-coeff"
    " 1e-2"
)

ALLTOALL = f"{MOE} --moe-token-dispatcher-type alltoall"
SHARED = "--moe-shared-expert-intermediate-size 32"

BIAS = (
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    " --moe-router-load-balancing-type seq_aux_loss"
)

MLA = """--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
    --qk-pos-emb-head-dim 8 --v-head-dim 8 --position-embedding-type rope --rope-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"""

MTP = "--mtp-num-layers 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

DEEPSEEK = f"""{MLA} --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-layer-freq
    ([0]*1+[1]*3) {SHARED} {BIAS} --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall
    --qk-layernorm"""

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Combination:
    """One row: ranks, layout, strategy and model.

    Args:
        layout: sizes of the axes, as in "tp2 pp2 ep2"; the rest of the ranks is the data axis. "sp"
            is sequence parallelism, "vpp2" two virtual stages, "inst2" two optimizer instances,
            "pp-first" the other rank order.
        level: of sharding, 0 to 3.
        model: flags of the model.
        flags: others.
        fsdp: flags of our run only.
    """

    ranks: int
    layout: str
    level: int
    model: str = LLAMA
    flags: str = ""
    fsdp: str = ""
    layers: int = 2

    @property
    def name(self) -> str:
        model = next((name for name, flags in MODELS.items() if flags == self.model), "")
        words = (
            f"{self.ranks} ranks",
            self.layout,
            f"level {self.level}",
            model,
            self.flags.replace("--", ""),
            self.fsdp.replace("--", ""),
        )
        return ", ".join(" ".join(word.split()) for word in words if word)

    @property
    def line(self) -> str:
        """The flags of both runs."""
        words = " ".join(_axis(word) for word in self.layout.split())
        return f"{RUN} {SIZES} --num-layers {self.layers} {self.model} {words} {self.flags}"

    @property
    def ours(self) -> str:
        return (
            f"{self.line} --use-megatron-fsdp --data-parallel-sharding-strategy"
            f" {LEVELS[self.level]} {self.fsdp}"
        )

    @property
    def reference(self) -> str:
        # Several instances are a matter of the distributed optimizer.
        return f"{self.line} --use-distributed-optimizer" if "inst" in self.layout else self.line

    def with_few_microbatches(self) -> Combination:
        """Return the row with a smaller batch: two microbatches a step, four for virtual stages."""
        sizes = re.findall(r"\b(?:tp|pp|cp)(\d)", self.layout)
        microbatches = 4 if "vpp" in self.layout else 2
        batch = microbatches * self.ranks // math.prod(map(int, sizes))
        return replace(self, flags=f"{self.flags} --global-batch-size {batch}")


MODELS = {
    "llama": LLAMA,
    "gpt2": "",
    "gpt2 untied": UNTIED,
    "moe": MOE,
    "moe alltoall": ALLTOALL,
    "moe shared": f"{ALLTOALL} {SHARED}",
    "moe bias": f"{ALLTOALL} {BIAS}",
    "mla": MLA,
    "mla qk-layernorm": f"{MLA} --qk-layernorm",
    "mtp": f"{LLAMA} {MTP}",
    "deepseek": DEEPSEEK,
    "deepseek mtp": f"{DEEPSEEK} {MTP}",
}


def _axis(word: str) -> str:
    """Return the flag of one word of a layout."""
    sizes = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "vpp": "--num-virtual-stages-per-pipeline-rank",
        "cp": "--context-parallel-size",
        "ep": "--expert-model-parallel-size",
        "etp": "--expert-tensor-parallel-size",
        "inst": "--num-distributed-optimizer-instances",
    }
    switches = {"sp": "--sequence-parallel", "pp-first": "--use-tp-pp-dp-mapping", "dp": ""}
    if word in switches:
        return switches[word]
    name = word.rstrip("0123456789")
    return f"{sizes[name]} {word.removeprefix(name)}"


OPTIM_OUTSIDE = "--outer-dp-sharding-strategy optim"
OF_EXPERTS = "--expert-data-parallel-sharding-strategy"
OPTIM_OF_EXPERTS = "--expert-outer-dp-sharding-strategy optim"
GPT2, MOE_SHARED, MOE_BIAS = "", f"{ALLTOALL} {SHARED}", f"{ALLTOALL} {BIAS}"
BF16 = "--bf16"
SHORT = "--train-iters 3"


@dataclass(frozen=True)
class Difference:
    """The largest relative differences between both runs."""

    loss: float
    norm: float
    params_norm: float
    zeros_agree: bool

    def problems(self, combination: Combination) -> list[str]:
        """Name the values that exceed their bounds."""
        reduced = BF16 in combination.flags
        bounds = {
            "loss": 1e-2 if reduced else 1e-5,
            "norm": 1e-3 if reduced else 1e-5,
            "params_norm": 1e-3 if reduced else 1e-5,
        }
        found = [
            f"{name} differs by {value:.1e}"
            for name, bound in bounds.items()
            if not (value := getattr(self, name)) <= bound
        ]
        # Biases of keys have no effect, so their gradients are rounding errors, now and then
        # exactly zero.
        counted = not reduced and "--disable-bias-linear" in combination.model
        return found + (
            ["other numbers of zeros in the gradient"] if counted and not self.zeros_agree else []
        )


def measure(
    combination: Combination, steps: int = STEPS, packages: Packages = INSTALLED
) -> Difference:
    """Run both, and the reference once for all combinations that have it."""
    theirs, ours = runs_of(combination, f"--train-iters {steps}", packages)
    assert len(theirs.losses) == len(ours.losses) == steps
    norms = 1 if BF16 in combination.flags else steps
    return Difference(
        loss=_largest(ours, theirs, "lm loss", steps),
        norm=_largest(ours, theirs, "grad-norm", norms),
        params_norm=_largest(ours, theirs, "params-norm", steps),
        zeros_agree=ours.column("num-zeros")[0] == theirs.column("num-zeros")[0],
    )


def runs_of(
    combination: Combination, flags: str = "", packages: Packages = INSTALLED
) -> tuple[Record, Record]:
    """Return the first rank's records of both, further flags added."""
    theirs = _reference(combination.ranks, f"{combination.reference} {flags}", packages)
    line = f"{combination.ours} {flags}"
    [ours] = run_ranks(combination.ranks, train, line, timeout=900, packages=packages)[0]
    return theirs, ours


@functools.cache
def _reference(ranks: int, line: str, packages: Packages) -> Record:
    [record] = run_ranks(ranks, train, line, timeout=900, packages=packages)[0]
    return record


def _largest(ours: Record, theirs: Record, name: str, steps: int) -> float:
    pairs = zip(ours.column(name)[:steps], theirs.column(name)[:steps])
    return max(abs(own - other) / abs(other) for own, other in pairs)

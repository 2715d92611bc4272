# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's data parallelism and ours under the same flags, in a table of combinations.

    python -m tests.support.pretrain.parity                  every row
        "tp2 pp2" cp                                         rows whose names have one of the words
        --exactly "2 ranks, pp2, level 3, llama"             rows by their names
        --write FILE                                         and the table as Markdown

Both train ten steps on the same data. Losses and gradient norms agree within 1e-5 in fp32; in bf16
losses within 1e-2 and the first gradient norm within 1e-3.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from tests.support.pretrain.training_runs import (
    DATA,
    NO_DROPOUT,
    Record,
    train,
    write_counting_corpus,
)
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

TABLE = [
    # tensor and sequence parallelism
    Combination(2, "tp2", 3),
    Combination(4, "tp2", 0),
    Combination(4, "tp2", 1),
    Combination(4, "tp2", 2, GPT2),
    Combination(4, "tp2", 3),
    Combination(4, "tp2 sp", 3),
    Combination(4, "tp2 sp", 0, GPT2),
    Combination(4, "tp2 sp", 3, GPT2, "--qk-layernorm"),
    Combination(8, "tp4 sp", 3, GPT2),
    # pipelines
    Combination(2, "pp2", 3),
    Combination(2, "pp2", 3, GPT2),
    Combination(4, "pp2", 0, GPT2),
    Combination(4, "pp2", 1),
    Combination(4, "pp2", 2, GPT2),
    Combination(4, "pp2", 3, GPT2),
    Combination(4, "pp2", 3, LLAMA, "--overlap-grad-reduce"),
    Combination(4, "pp2 pp-first", 3, GPT2),
    Combination(4, "pp4", 3, GPT2, layers=4),
    Combination(2, "pp2 vpp2", 3, LLAMA, layers=4),
    Combination(4, "pp2 vpp2", 3, GPT2, layers=4),
    Combination(4, "pp2 vpp2", 1, LLAMA, "--overlap-grad-reduce", layers=4),
    Combination(
        4, "pp2 vpp2", 3, LLAMA, "--overlap-grad-reduce", fsdp="--overlap-param-gather", layers=4
    ),
    # context parallelism
    Combination(2, "cp2", 3),
    Combination(4, "cp2", 1, GPT2),
    Combination(4, "cp2", 3),
    Combination(4, "cp4", 3),
    # experts
    Combination(2, "ep2", 3, MOE),
    Combination(2, "ep2", 3, ALLTOALL),
    Combination(4, "ep2", 0, MOE),
    Combination(4, "ep2", 1, ALLTOALL),
    Combination(4, "ep2", 2, MOE_SHARED),
    Combination(4, "ep2", 3, MOE_SHARED),
    Combination(4, "ep2", 3, MOE_BIAS),
    Combination(4, "ep4", 3, ALLTOALL),
    Combination(4, "dp", 3, MOE_SHARED),
    Combination(4, "tp2 sp ep2 etp1", 3, ALLTOALL),
    Combination(4, "tp2 sp ep2 etp2", 3, MOE),
    Combination(8, "tp2 sp ep2 etp1", 0, ALLTOALL),
    Combination(8, "tp2 sp ep2 etp2", 3, ALLTOALL),
    # hybrid sharding
    Combination(4, "inst2", 1),
    Combination(4, "inst2", 2),
    Combination(4, "inst2", 3),
    Combination(4, "inst2", 3, fsdp=OPTIM_OUTSIDE),
    Combination(4, "inst2 ep2", 3, ALLTOALL, fsdp=OPTIM_OUTSIDE),
    Combination(8, "tp2 inst2", 3, fsdp=OPTIM_OUTSIDE),
    # experts with another strategy
    Combination(4, "ep2", 3, ALLTOALL, fsdp=f"{OF_EXPERTS} optim"),
    Combination(4, "ep2", 0, MOE, fsdp=f"{OF_EXPERTS} optim_grads_params"),
    Combination(4, "ep2", 3, MOE, fsdp=f"{OF_EXPERTS} no_shard"),
    Combination(4, "inst2 ep2", 3, ALLTOALL, fsdp=f"{OPTIM_OUTSIDE} {OF_EXPERTS} optim"),
    Combination(4, "inst2 ep2", 1, MOE, fsdp=f"{OF_EXPERTS} optim_grads_params {OPTIM_OF_EXPERTS}"),
    Combination(
        4,
        "pp2 ep2",
        3,
        ALLTOALL,
        "--moe-layer-freq ([0]*1+[1]*1)",
        f"{OF_EXPERTS} no_shard",
    ),
    # products
    Combination(8, "tp2 pp2", 3, GPT2),
    Combination(8, "tp2 sp pp2", 1),
    Combination(8, "tp2 cp2", 3),
    Combination(8, "pp2 cp2", 3),
    Combination(8, "tp2 sp pp2 pp-first", 2, GPT2),
    Combination(8, "pp2 ep2", 3, ALLTOALL),
    Combination(8, "tp2 pp2 vpp2", 3, layers=4),
    # other models
    Combination(2, "dp", 3, MLA),
    Combination(4, "tp2", 3, f"{MLA} --qk-layernorm"),
    Combination(4, "tp2 sp", 3, MLA),
    Combination(2, "dp", 3, f"{LLAMA} {MTP}"),
    Combination(4, "pp2", 3, f"{LLAMA} {MTP}"),
    Combination(8, "tp2 sp pp2 ep2 etp1", 3, DEEPSEEK, layers=4),
    Combination(8, "tp2 sp pp2 ep2 etp1", 3, f"{DEEPSEEK} {MTP}", layers=4),
    # precision and what the loss is divided by
    Combination(4, "tp2", 3, LLAMA, BF16),
    Combination(4, "pp2", 3, GPT2, BF16),
    Combination(4, "ep2", 3, ALLTOALL, BF16),
    Combination(4, "tp2 sp", 1, LLAMA, BF16),
    Combination(4, "inst2", 3, LLAMA, BF16, OPTIM_OUTSIDE),
    Combination(4, "pp2", 3, LLAMA, "--calculate-per-token-loss"),
    Combination(4, "ep2", 3, ALLTOALL, "--calculate-per-token-loss"),
    Combination(
        4,
        "tp2 sp",
        3,
        LLAMA,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
]


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


def measure(combination: Combination, steps: int = STEPS) -> Difference:
    """Run both."""
    lines = (f"{line} --train-iters {steps}" for line in (combination.reference, combination.ours))
    theirs, ours = run_ranks(combination.ranks, train, *lines, timeout=900)[0]
    assert len(theirs.losses) == len(ours.losses) == steps
    norms = 1 if BF16 in combination.flags else steps
    return Difference(
        loss=_largest(ours, theirs, "lm loss", steps),
        norm=_largest(ours, theirs, "grad-norm", norms),
        params_norm=_largest(ours, theirs, "params-norm", steps),
        zeros_agree=ours.column("num-zeros")[0] == theirs.column("num-zeros")[0],
    )


def _largest(ours: Record, theirs: Record, name: str, steps: int) -> float:
    pairs = zip(ours.column(name)[:steps], theirs.column(name)[:steps])
    return max(abs(own - other) / abs(other) for own, other in pairs)


def main(words: list[str]) -> int:
    """Print every row with its differences; 1 if any of them is too large."""
    target = words.pop() if "--write" in words else None
    names = {word for word in words if not word.startswith("--")}
    if "--exactly" in words:
        rows = [row for row in TABLE if row.name in names]
        assert len(rows) == len(names), names - {row.name for row in rows}
    else:
        rows = [row for row in TABLE if not names or any(word in row.name for word in names)]
    write_counting_corpus()
    lines, failures = (
        ["| combination | loss | gradient norm | weight norm |", "|---|---|---|---|"],
        0,
    )
    for row in rows:
        began = time.perf_counter()
        try:
            difference = measure(row)
        except Exception as error:
            failures += 1
            print(f"FAILED {row.name}\n{error}", flush=True)
            continue
        problems = difference.problems(row)
        failures += bool(problems)
        seconds = time.perf_counter() - began
        print(
            f"{'BAD ' if problems else 'ok  '} {row.name}: {difference} {'; '.join(problems)}"
            f" ({seconds:.0f} s)",
            flush=True,
        )
        lines.append(
            f"| {row.name} | {difference.loss:.1e} | {difference.norm:.1e} |"
            f" {difference.params_norm:.1e} |"
        )
    print(f"{len(rows) - failures} of {len(rows)} combinations agree")
    if target:
        with open(target, "w") as file:
            file.write("\n".join(lines) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

SHORT = "--train-iters 3"
TIED = LLAMA.replace(UNTIED, "")

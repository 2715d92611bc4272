# SPDX-License-Identifier: Apache-2.0
"""The command line of Megatron-LM's training loop: the settings that ``--use-megatron-fsdp`` needs.

The loop stops at an assertion where one of them is missing, and reports one at a time. Here they
are added where the command line has none, and all contradictions are reported at once. A machine
without CUDA needs further settings, with any data-parallel class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from megatron.mcore_adapter.run.optimizer_names import MUON

FSDP = "--use-megatron-fsdp"
EVERY_RUN_HAS = "--micro-batch-size"
"""A flag that the loop requires; other programs may have it too."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

FSDP_VALUES = {
    "--ckpt-format": (
        "fsdp_dtensor",
        "checkpoints of this run have the format fsdp_dtensor (python -m megatron.checkpoint"
        " converts others)",
    ),
    "--data-parallel-sharding-strategy": ("optim_grads_params", ""),
}
"""Flag -> value, and why no other one works; any other one does where the reason is empty."""

FSDP_SWITCHES = ("--use-distributed-optimizer",)

VERSION = "--megatron-fsdp-version"
"""The generation of the interface, 1 or 2. Loops before Megatron-LM 0.20 do not know the flag."""

ASYNC_VALUES = {"--async-strategy": ("mcore", "")}
ASYNC_SWITCHES = ("--use-persistent-ckpt-worker",)
"""Without them the loop refuses ``--async-save``, or asks for another package."""

NOT_TOGETHER = {
    "--overlap-moe-expert-parallel-comm": (
        "--fsdp-double-buffer",
        "--use-nccl-ub",
        "--mtp-num-layers",
    ),
    "--delay-wgrad-compute": ("--megatron-fsdp-enable-fine-grained-param-gather",),
    "--optimizer-cpu-offload": ("--use-precision-aware-optimizer",),
}
"""Flag -> others that the engine does not have at the same time."""

STOPPING = ("--exit-signal-handler",)
"""After SIGTERM, which batch systems send before they end a job, the loop saves."""

FOR_ADAM = ("--fp16", "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
"""Flags that Muon does not go with."""

OWN_FLAGS = ("--no-load-fallback", "--no-verify-integrity", "--no-check-checkpoint-args")
"""Switches of this project's checkpoints, which no loop of Megatron-LM knows."""

FSDP_REFUSED = {
    "--use-torch-fsdp2": "it is another implementation of the same",
    "--yaml-cfg": "the loop would take the flags from that file only",
}
"""Flag -> why it cannot be used together with ``--use-megatron-fsdp``."""

CPU_VALUES = {
    "--distributed-backend": ("gloo", "NCCL needs CUDA"),
    "--transformer-impl": ("local", "Transformer Engine needs CUDA"),
}
ENGINE = ("--transformer-impl", "transformer_engine")
"""Layers for which somebody may bring kernels without CUDA: where the package can be imported."""
CPU_SWITCHES = (
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-rope-fusion",
    "--no-gradient-accumulation-fusion",
)
KERNELS = (
    "--moe-permute-fusion",
    "--moe-router-fusion",
    "--moe-enable-deepep",
    "--tp-comm-overlap",
    "--use-nccl-ub",
)
"""Flags that need kernels or memory of a GPU."""
KERNELS_OF_ENGINE = (
    "--moe-grouped-gemm",
    "--fp8-format",
    "--fp4-format",
    "--use-precision-aware-optimizer",
)
"""Flags that need kernels of Transformer Engine."""


class LoopFlagError(ValueError):
    """A command line that contradicts itself or the machine; the message lists everything."""


@dataclass
class LoopCommandLine:
    """A command line of the loop, and what has been added to it."""

    words: Sequence[str]
    """As in ``sys.argv``, without the program."""
    environment: Mapping[str, str]
    has_cuda: bool
    has_loop: bool
    has_engine: bool = False
    """Transformer Engine can be imported."""
    has_version: bool = False
    """The loop knows the flag of the generation."""
    has_muon: bool = True
    """The package of Muon can be imported."""
    added: list[str] = field(default_factory=list)
    """Words to append."""
    unset: list[str] = field(default_factory=list)
    """Environment variables to remove."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_of_the_loop(self) -> bool:
        """True for a command line of Megatron-LM's loop."""
        return self.has_loop and self._has(EVERY_RUN_HAS)

    @property
    def version(self) -> int:
        """The generation that the flag asks for, 1 without it."""
        if self._value(VERSION) == "2":
            return 2
        return 1

    @property
    def completed(self) -> list[str]:
        """The words with those that were added, without the flags that the loop does not know."""
        kept: list[str] = []
        before = ""
        for word in self.words:
            is_version = VERSION in (word.partition("=")[0], before)
            if word not in OWN_FLAGS and (self.has_version or not is_version):
                kept.append(word)
            before = word
        return [*kept, *self.added]

    def own_arguments(self) -> dict[str, bool]:
        """Return the values of :data:`OWN_FLAGS` by their destinations."""
        values = {}
        for flag in OWN_FLAGS:
            values[_destination(flag)] = flag in self.words
        return values

    def complete(self) -> LoopCommandLine:
        """Fill ``added`` and ``unset``; command lines of other programs are left as they are.

        Raises:
            LoopFlagError: lists every contradiction with its fix.
        """
        if self.is_of_the_loop:
            if self._has(FSDP):
                self._complete_for_fsdp()
            elif self._has(VERSION):
                self.problems.append(f"{VERSION} needs {FSDP}")
            if not self.has_cuda:
                self._complete_for_cpu()
        if self.problems:
            raise LoopFlagError("; ".join(self.problems))
        return self

    def notes(self) -> list[str]:
        """Return the changes, as parts of one line."""
        notes = []
        if self.added:
            notes.append(f"set {' '.join(self.added)}")
        for name in self.unset:
            notes.append(f"removed {name} from the environment")
        return notes

    def _complete_for_fsdp(self) -> None:
        self._set_values(FSDP_VALUES, f"with {FSDP}")
        if self._value(VERSION) not in (None, "1", "2"):
            self.problems.append(f"{VERSION} expects 1 or 2 but got {self._value(VERSION)}")
        for flag in FSDP_SWITCHES:
            if self.version == 2 and self._has(flag):
                self.problems.append(
                    f"{flag} with {VERSION} 2: hooks do what it is for; leave it out"
                )
        if self._has("--save"):
            self._set_switches(STOPPING)
        if self._has("--async-save"):  # the processes that write are this project's
            self._set_values(ASYNC_VALUES, "")
            self._set_switches(ASYNC_SWITCHES)
        # Loops that know no second generation demand the switch in any case.
        if self.version == 1 or not self.has_version:
            self._set_switches(FSDP_SWITCHES)
        for flag, reason in FSDP_REFUSED.items():
            if self._has(flag):
                self.problems.append(f"{flag} with {FSDP}: {reason}; leave one of them out")
        self._check_strategies()
        self._check_muon()
        for flag, others in NOT_TOGETHER.items():
            for other in others:
                if self._has(flag) and self._has(other):
                    self.problems.append(f"{flag} does not go with {other}: leave one out")
        interval = "--check-weight-hash-across-dp-replicas-interval"
        strategy = self._value("--data-parallel-sharding-strategy")
        if self._has(interval) and strategy == "optim_grads_params":
            self.problems.append(
                f"{interval} with {FSDP}: sharded weights have no replicas; leave it out"
            )
        if self.environment.get(CONNECTIONS) == "1":
            # Scripts set it for tensor parallelism, and the loop refuses it here: with a single
            # queue, communication and compute could not overlap.
            self.unset.append(CONNECTIONS)

    def _check_strategies(self) -> None:
        strategy = "--data-parallel-sharding-strategy"
        outer = "--outer-dp-sharding-strategy"
        instances = "--num-distributed-optimizer-instances"
        level = self._value(strategy)
        if self._value(outer) == "optim":
            if level != "optim_grads_params":
                self.problems.append(
                    f"{outer} optim needs {strategy} optim_grads_params, got {level}"
                )
            if self._value(instances) in (None, "1"):
                self.problems.append(f"{outer} optim needs an outer axis: give {instances}")
        meta = "--init-model-with-meta-device"
        if self._has(meta) and level == "no_shard":
            self.problems.append(
                f"{meta} with {strategy} no_shard: every rank has all weights anyway; leave it out"
            )

    def _check_muon(self) -> None:
        name = f"--optimizer {self._value('--optimizer')}"
        if self._value("--optimizer") not in MUON:
            return
        if not self.has_muon:
            self.problems.append(
                f"{name} needs the package emerging_optimizers, for Python 3.12 or newer: pip"
                " install emerging-optimizers"
            )
        for flag in FOR_ADAM:
            if self._has(flag):
                self.problems.append(f"{flag} with {name}: it is for adam; leave it out")

    def _complete_for_cpu(self) -> None:
        implementation, engine = ENGINE
        values = dict(CPU_VALUES)
        kernels = list(KERNELS)
        if self.has_engine and self._value(implementation) == engine:
            del values[implementation]
        else:
            kernels += KERNELS_OF_ENGINE
        self._set_values(values, "without CUDA")
        self._set_switches(CPU_SWITCHES)
        for flag in kernels:
            if self._has(flag):
                self.problems.append(f"{flag} needs a GPU, and there is none: leave it out")

    def _set_values(self, values: Mapping[str, tuple[str, str]], where: str) -> None:
        for flag, (value, reason) in values.items():
            given = self._value(flag)
            if given is None:
                self.added += [flag, value]
            elif given != value and reason:
                self.problems.append(
                    f"{flag} {given} {where}: {reason}; write {flag} {value} or leave it out"
                )

    def _set_switches(self, switches: Sequence[str]) -> None:
        for flag in switches:
            if not self._has(flag):
                self.added.append(flag)

    def _has(self, flag: str) -> bool:
        return self._value(flag) is not None

    def _value(self, flag: str) -> str | None:
        return value_of([*self.words, *self.added], flag)


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return the word after a flag; the last one counts. None without the flag."""
    value = None
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word == flag:
            value = following
        elif word.startswith(flag + "="):
            value = word.partition("=")[2]
    return value


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")

# SPDX-License-Identifier: Apache-2.0
"""The drop-in: Megatron-LM's loop trains with our class; every name is replaced and restored."""

import io
import os
import sys
import typing
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import megatron.core
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import distributed as core_distributed
from megatron.core.datasets import utils as dataset_utils
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch._dynamo import eval_frame

import megatron.mcore_adapter
from megatron.mcore_adapter import core_optimizers, cpu, drop_in
from megatron.mcore_adapter.megatron_lm import loop_state_dicts
from megatron.mcore_adapter.megatron_lm.loop_on_cpu import LoopOnCpu
from megatron.mcore_adapter.releases import tested
from megatron_fsdp import MegatronFSDP
from tests.support.mcore_adapter import megatron_lm_loop
from tests.support.mcore_adapter.dropped_in import LoopRun, dropped_in
from tests.support.mcore_adapter.megatron_lm_loop import NAMES, loaded
from tests.support.rank_pool import run_ranks


def train_both_ways(changes: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Job: train with the drop-in and with our class set by hand; count the calls of no_sync."""
    with (
        loaded() as loop,
        patch.object(loop, "megatron_FSDP", megatron.mcore_adapter.FullyShardedDataParallel),
    ):
        by_hand = LoopRun(loop, **changes).train(4)
    with dropped_in() as loop:
        run = LoopRun(loop, **changes)
        calls = []
        original = MegatronFSDP.no_sync
        with patch.object(
            MegatronFSDP, "no_sync", lambda engine: calls.append(engine) or original(engine)
        ):
            losses = run.train(4)
    return losses, by_hand, len(calls)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes", [{"bf16": True}, {}, {"fp16": True}], ids=["bf16", "fp32", "fp16"]
)
def test_the_loop_trains_like_our_class_itself(changes: dict[str, Any]) -> None:
    for losses, by_hand, unsynchronised in run_ranks(2, train_both_ways, changes):
        assert losses == by_hand
        assert losses[-1] < losses[0]
        assert unsynchronised == 4  # once in every step, around all microbatches but the last


def names_of_everything() -> dict[str, int]:
    """Every attribute of every module, and the methods that are replaced, by identity."""
    skipped = (__name__, drop_in.__name__, loop_state_dicts.__name__)
    names = {}
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and path not in skipped:
            members = [
                (name, value) for name, value in list(vars(module).items()) if callable(value)
            ]
            names |= {f"{path}.{name}": id(value) for name, value in members}
    for kind in (DistributedOptimizer, dcp.DefaultLoadPlanner):
        names |= {f"{kind.__qualname__}.{name}": id(value) for name, value in vars(kind).items()}
    return names


def install_and_take_back() -> list[Any]:
    """Job: return the class behind each name, for loops imported before and after installing."""
    seen = []
    cpu.install()  # stays for good, as what wrappers do to optimizers
    core_optimizers.refuse_stale_weights()
    core_optimizers.keep_main_weights()
    adapter = import_module(drop_in.ADAPTER)
    theirs = adapter.FullyShardedDataParallel
    with loaded() as loop:
        sys.modules[NAMES[0]].ALL_WRAPPERS = (theirs, int)
        before = names_of_everything()
        drop_in.install()
        drop_in.install()  # changes nothing
        everywhere = [adapter, core_distributed, *(sys.modules[name] for name in NAMES)]
        classes = {
            vars(module).get("megatron_FSDP", vars(module).get("FullyShardedDataParallel"))
            for module in everywhere
        }
        seen += [
            classes == {drop_in.DropInDataParallel},
            (drop_in.DropInDataParallel, int) == loop.ALL_WRAPPERS,
        ]
        seen.append(
            loop.handle_swiglu_in_state_dict is loop_state_dicts.handle_swiglu_in_state_dict
        )
        run = LoopRun(loop)
        seen.append(type(unwrap_model(run.model)[0]) is type(run.model[0].module))
        drop_in.uninstall()
        drop_in.uninstall()
        after = names_of_everything()
        seen.append({name for name in before if before[name] != after.get(name)})
    with drop_in.install(), loaded() as loop:
        seen.append(loop.megatron_FSDP is drop_in.DropInDataParallel)
        with drop_in.install():  # the outer one is to take it back
            pass
        seen.append(loop.megatron_FSDP is drop_in.DropInDataParallel)
        drop_in.uninstall()
        seen.append(
            loop.megatron_FSDP is theirs and core_distributed.FullyShardedDataParallel is theirs
        )
    return seen


def test_every_name_is_replaced_before_and_after_the_import_of_the_loop_and_restored() -> None:
    assert run_ranks(1, install_and_take_back) == [
        [True, True, True, True, set(), True, True, True]
    ]


def lines_at_installation() -> list[str]:
    """Job: what installing prints."""
    with redirect_stdout(io.StringIO()) as output, drop_in.install():
        pass
    return output.getvalue().splitlines()


def test_one_line_of_the_first_rank_says_on_which_release_the_drop_in_is_active() -> None:
    core = megatron.core
    assert run_ranks(2, lines_at_installation) == [
        [
            f"megatron.mcore_adapter: the drop-in is active on Megatron-Core {core.__version__} in"
            f" {core.__path__[0]}"
        ],
        [],
    ]


def states_of_the_process() -> list[Any]:
    """Job: command line, environment and torch before installing, then, and after uninstalling."""
    cpu.install()
    words = ["pretrain_gpt.py", "--micro-batch-size", "2", "--use-megatron-fsdp"]
    states = []
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with (
        patch.object(sys, "argv", words.copy()),
        patch.dict(os.environ, connections),
        patch.object(tested, "has_loop", lambda: True),
    ):

        def state() -> list[Any]:
            functions = [id(value) for value in vars(torch.cuda).values() if callable(value)]
            return [
                list(sys.argv),
                os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
                [*functions, id(torch.rand), id(getattr(typing, "override", None))],
            ]

        states.append(state())
        with drop_in.install():
            states.append(state())
        states.append(state())
    return states


def test_the_command_line_the_environment_and_torch_are_restored() -> None:
    (((before, during, after)),) = run_ranks(1, states_of_the_process)
    assert after == before
    assert during[0][:4] == before[0]
    assert "--use-distributed-optimizer" in during[0]
    assert during[1] is None
    assert during[2] != before[2]


def compilers_of(folder: Path) -> list[bool]:
    """Job: whether the loop compiles functions for data sets while installed, and afterwards."""
    compile_helpers = dataset_utils.compile_helpers
    with (
        patch.object(sys, "argv", ["pretrain_gpt.py", "--micro-batch-size", "2"]),
        patch.object(tested, "has_loop", lambda: True),
        patch.object(dataset_utils, "__file__", str(folder / "utils.py")),
    ):
        with drop_in.install():
            during = dataset_utils.compile_helpers is compile_helpers
        return [during, dataset_utils.compile_helpers is compile_helpers]


def test_the_loop_of_a_wheel_compiles_nothing(tmp_path: Path) -> None:
    """A wheel has no Makefile, without which the loop would end the program."""
    assert run_ranks(1, compilers_of, tmp_path) == [[False, True]]
    (tmp_path / "Makefile").touch()
    assert run_ranks(1, compilers_of, tmp_path) == [[True, True]]


def stance_after_uninstalling() -> tuple[str, str]:
    """Job: torch's compiler stance while the CPU replacements are active, and after them."""
    with torch.compiler.set_stance("eager_on_recompile"):
        replacements = LoopOnCpu()
        during = eval_frame._stance.stance
        replacements.restore()
        return during, eval_frame._stance.stance


def test_the_stance_of_the_compiler_is_restored() -> None:
    assert run_ranks(1, stance_after_uninstalling) == [("force_eager", "eager_on_recompile")]


def install_with_an_error() -> tuple[str, bool, bool]:
    """Job: the error of a preparation that fails; whether names and the command line are as before.

    The command line is changed before the error.
    """
    words = ["pretrain_gpt.py", "--micro-batch-size", "2", "--use-megatron-fsdp"]
    theirs = import_module(drop_in.ADAPTER).FullyShardedDataParallel
    with (
        patch.object(sys, "argv", words.copy()),
        patch.object(tested, "has_loop", lambda: True),
        patch.object(cpu, "install", side_effect=RuntimeError("no device")),
        patch.object(torch.cuda, "is_available", lambda: False),
    ):
        message = message_of(drop_in.install)
        same_names = core_distributed.FullyShardedDataParallel is theirs
        return message, same_names, sys.argv == words


def test_a_preparation_that_fails_changes_nothing() -> None:
    assert run_ranks(1, install_with_an_error) == [("no device", True, True)]


def command_line_of_another_program() -> tuple[list[str], list[str]]:
    """Job: a command line with flags of the loop, without a checkout, before and after install."""
    words = ["train.py", "--micro-batch-size", "2", "--use-megatron-fsdp"]
    with (
        patch.object(sys, "argv", words.copy()),
        patch.object(tested, "has_loop", lambda: False),
        drop_in.install(),
    ):
        return words, list(sys.argv)


def test_a_program_with_its_own_parser_keeps_its_command_line() -> None:
    ((before, after),) = run_ranks(1, command_line_of_another_program)
    assert after == before


def install_beside_strangers() -> tuple[list[str], bool]:
    """Job: return the errors for names that the drop-in does not know, at install and at use."""
    messages = []
    theirs = import_module(drop_in.ADAPTER).FullyShardedDataParallel
    stranger = type("Stranger", (), {"__module__": "megatron.core.distributed.fsdp.src.new"})
    with loaded() as loop:
        for value in (stranger, type("Derived", (theirs,), {"__module__": "elsewhere"})):
            with patch.object(loop, "stranger", value, create=True):
                messages.append(message_of(drop_in.install))
        kept = loop.megatron_FSDP is theirs
        with drop_in.install(), patch.object(loop, "stranger", stranger, create=True):
            messages.append(message_of(lambda: LoopRun(loop)))
        with patch.object(
            sys.modules[drop_in.ENTRIES], "handle_swiglu_in_state_dict", None
        ) as gone:
            del sys.modules[drop_in.ENTRIES].handle_swiglu_in_state_dict
            messages.append(message_of(drop_in.install))
            sys.modules[drop_in.ENTRIES].handle_swiglu_in_state_dict = gone
    return messages, kept


class NewerRelease:
    """The names of 0.20 in place of the class: a function that chooses between two."""

    def __init__(self) -> None:
        adapter = import_module(drop_in.ADAPTER)
        own = {"__module__": drop_in.ADAPTER}
        self.first = type("FullyShardedDataParallelV1", (), own)
        self.second = type("FullyShardedDataParallelV2", (), own)

        def choose() -> None: ...

        choose.__module__ = drop_in.ADAPTER
        self.names = {f"{drop_in.CLASS}V1": self.first, f"{drop_in.CLASS}V2": self.second}
        self.patched = patch.multiple(adapter, create=True, **self.names, **{drop_in.CLASS: choose})
        self.choose = choose


def install_on_a_newer_release() -> list[bool]:
    """Job: train with both generations, and look at the names of a loop before and afterwards."""
    release, seen = NewerRelease(), []
    with (
        release.patched,
        loaded() as loop,
        patch.multiple(loop, create=True, megatron_FSDP=release.choose, **release.names),
        patch.object(megatron_lm_loop, "megatron_FSDP", release.choose),
    ):
        with drop_in.install():
            run = LoopRun(loop)
            seen.append(isinstance(run.model[0], loop.FullyShardedDataParallelV1))
            seen.append(not isinstance(run.model[0], loop.FullyShardedDataParallelV2))
            losses = run.train(2)
            seen.append(losses[-1] != losses[0])
        seen.append(loop.FullyShardedDataParallelV1 is release.first)
        seen.append(loop.megatron_FSDP is release.choose)
    return seen


def test_a_release_that_chooses_between_two_classes_gets_two_of_ours() -> None:
    assert run_ranks(1, install_on_a_newer_release) == [[True] * 5]


def message_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_release_without_the_objects_and_unknown_parts_of_the_files_are_refused() -> None:
    (((now, derived, later, release), kept),) = run_ranks(1, install_beside_strangers)
    assert (
        "megatron.training.training.stranger (megatron.core.distributed.fsdp.src.new.Stranger)"
        in now
    )
    assert "megatron.training.training.stranger (a class made of" in derived
    assert later == now
    assert kept  # nothing was replaced
    assert f"does not have {drop_in.ENTRIES}.handle_swiglu_in_state_dict" in release


def test_experts_beyond_their_number_are_refused() -> None:
    names = {
        "module.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight_w": 1,
        "module.other": 2,
    }
    assert loop_state_dicts.handle_experts_in_state_dict(names, 4) == names
    with pytest.raises(ValueError, match=r"local_experts\.3"):
        loop_state_dicts.handle_experts_in_state_dict(names, 3)

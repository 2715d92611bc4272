# SPDX-License-Identifier: Apache-2.0
"""Ranks of Megatron-LM's own training loop, for `tests.support.rank_pool.run_apart`.

Every run is a fresh set of processes in which `python -m megatron.mcore_adapter PROGRAM FLAGS...`
runs, forked from one that has imported the rest: that takes longer than a run. It may run the
drop-in on the model of a CUDA device, and what that reports is the run's error.
"""

import argparse
import functools
import json
import os
import runpy
import signal
import sys
import time
import traceback
import typing
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typing_extensions

import megatron.mcore_adapter.__main__ as program
from benchmarks.stream_defects.table import DEFECTS
from megatron.checkpoint.dcp import safe_loading, signing_writer
from megatron.mcore_adapter import FullyShardedDataParallel
from tests.support.cuda_model.core_graphs import core_graphs
from tests.support.cuda_model.machine import cuda_model
from tests.support.transformer_engine.collectives import join_no_collectives
from tests.support.warm_programs import free_port
from tools.cuda_model.detector import Detector

PROGRAM = Path(__file__).with_name("loop_pretrain_gpt.py")
build, run_path = FullyShardedDataParallel.__init__, runpy.run_path
LIMIT = 240
"""Seconds that a run may take."""


def run(ranks: int, flags: Sequence[str], folder: Path, on_model: str | None) -> dict[str, Any]:
    """Run the loop and return what the last rank has logged, by iteration.

    Args:
        ranks: number of ranks.
        flags: of the program.
        folder: an empty one for logs.
        on_model: None without the model of a CUDA device; otherwise the name of a deliberate defect
            of `benchmarks/stream_defects/table.py`, or "".

    Returns:
        ``steps``, a list of (iteration, loss, gradient norm), ``evaluations``, a list of losses,
        ``replays``, the number of those of CUDA graphs, if the run was on the model, and ``error``,
        the end of the output of a rank that failed, or None.
    """
    warm_up()
    port = str(free_port())
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            run_rank(rank, ranks, port, flags, folder / str(rank), on_model)
        children[child] = rank
    failed = wait_for(children)
    log = folder / f"{ranks - 1}.json"
    found: dict[str, Any] = {"steps": [], "evaluations": [], "replays": [], "error": None}
    for line in log.read_text().splitlines() if log.exists() else []:
        kind, value = json.loads(line)
        found[kind].append(value)
    if failed is not None:
        found["error"] = (folder / f"{failed}.log").read_text()[-3000:]
    return found


def wait_for(children: dict[int, int]) -> int | None:
    """Wait for all children; after a failure or the limit the others are stopped.

    Returns:
        The first rank that failed, or None.
    """
    deadline, failed, left = time.monotonic() + LIMIT, None, dict(children)
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = left.pop(child)
            if status and failed is None:
                failed, deadline = rank, min(deadline, time.monotonic() + 3)
        elif time.monotonic() > deadline:
            failed = min(left.values()) if failed is None else failed
            for child in left:
                os.kill(child, signal.SIGKILL)
            deadline += LIMIT
        else:
            time.sleep(0.02)
    return failed


def run_rank(
    rank: int, ranks: int, port: str, flags: Sequence[str], output: Path, on_model: str | None
) -> None:
    """Become one rank of a run; never returns."""
    status = 1
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # The loop demands it with tensor parallelism and DDP, and refuses it with FSDP.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    is_ours, values = "--use-megatron-fsdp" in flags, Path(f"{output}.json")
    execute = run_path
    if is_ours and on_model is not None:
        execute = functools.partial(run_on_model, values, on_model)
    runpy.run_path = lambda *args, **kwargs: (record_run(values), execute(*args, **kwargs))
    sys.argv[:] = ["-m", str(PROGRAM), *flags]
    apart = join_no_collectives() if "transformer_engine" in sys.modules else nullcontext()
    wrappers = patch.object(FullyShardedDataParallel, "__init__", autospec=True, side_effect=build)
    try:
        with apart, wrappers as built:
            program.main()
        assert built.called == is_ours, "another class was trained"
        status = 0
    except SystemExit as end:
        status = int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


OF_FILES = ((safe_loading, "read_chunk"), (signing_writer, "_write"))
"""Functions that read and write files: their tensors are in host memory, whatever the model is."""


def in_host_memory(detector: Detector, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose tensors the model counts as those of the host."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with detector.making_on_host():
            return function(*args, **kwargs)

    return call


def run_on_model(path: Path, defect: str, *args: Any, **kwargs: Any) -> None:
    """Run a program on the model of a CUDA device, which must have nothing to report."""
    with ExitStack() as patches, cuda_model() as model, core_graphs(model):
        for each in [each for each in DEFECTS if each.name == defect]:
            patches.enter_context(each.made())
        for owner, name in OF_FILES:
            function = in_host_memory(model.detector, getattr(owner, name))
            patches.enter_context(patch.object(owner, name, function))
        run_path(*args, **kwargs)
    write(path, "replays", model.detector.graphs.num_replays)
    assert not model.reports, "\n".join(map(str, model.reports))


def record_run(path: Path) -> None:
    """Write loss and gradient norm of every step, and losses of evaluations, to a file."""
    training = import_module("megatron.training.training")
    path.write_text("")
    training.training_log = recorded(training.training_log, path)
    training.evaluate = evaluated(training.evaluate, path)


def recorded(training_log: Callable[..., Any], path: Path) -> Callable[..., Any]:
    @functools.wraps(training_log)
    def log(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        iteration, grad_norm = args[2], args[6]
        write(path, "steps", [iteration, loss_of(loss_dict), float(grad_norm)])
        return training_log(loss_dict, *args, **kwargs)

    return log


def evaluated(evaluate: Callable[..., Any], path: Path) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def evaluate_and_write(*args: Any, **kwargs: Any) -> Any:
        results = evaluate(*args, **kwargs)
        write(path, "evaluations", loss_of(results[0]))
        return results

    return evaluate_and_write


def loss_of(losses: dict[str, Any]) -> float | None:
    """Return the loss, which only the last stage of a pipeline has."""
    return float(losses["lm loss"]) if "lm loss" in losses else None


def write(path: Path, kind: str, value: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps([kind, value]) + "\n")


@functools.cache
def warm_up() -> None:
    """Import what every rank imports; the drop-in replaces names that were imported before."""
    if not hasattr(typing, "override"):
        vars(typing)["override"] = typing_extensions.override
    for name in (
        "megatron.mcore_adapter.drop_in",
        "megatron.training",
        "megatron.core.tokenizers.text",  # imports transformers
    ):
        import_module(name)
    read_settings_once()


def read_settings_once() -> None:
    """Keep the texts of flags: every parser reads them from the source of settings for a second."""
    factory = import_module("megatron.training.argument_utils").ArgumentGroupFactory
    read = object.__new__(factory)._get_field_docstrings
    factory._get_field_docstrings = staticmethod(functools.cache(read))
    add_arguments = import_module("megatron.training.arguments").add_megatron_arguments
    add_arguments(argparse.ArgumentParser())

# SPDX-License-Identifier: Apache-2.0
"""One rank of the pool in `tests/support/rank_pool.py`: receives jobs, runs them, sends results.

A rank has two threads. The receiver reads the pipe to the test process; when that pipe closes, the
test process is gone and the receiver kills the rank, even if its main thread hangs in a collective.
The main thread runs the jobs.
"""

import ctypes
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import random
import resource
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil

from tests.support.process_state import ProcessState

OUR_MODULES = (
    r"(megatron\.(fsdp|huggingface|mcore_adapter|checkpoint|pretrain)|megatron_fsdp)(\.|$)"
)
"""Regular expression for the modules in which a warning is an error."""

JOBS_BETWEEN_FULL_COLLECTIONS = 50
"""Caches that jobs leave are not walked after every job: it takes longer than most jobs."""

SEED = 1234
"""Every job starts with all generators seeded with this number, the same on each rank."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Number of a rank, size of its world, port of the test process' store, and its files.

    A size of 0 says that there is no world, `on_cpu` that `cpu.install()` is called first.
    """

    rank: int
    world_size: int
    store_port: int
    stack_file: str
    output_file: str
    on_cpu: bool


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call for every rank.

    `call` is the pickle of (function, args, kwargs); `sys_path` is what importing it needs.
    """

    call: bytes
    sys_path: list[str]
    fresh_world: bool


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Answer of a rank: pickled result or traceback, and its numbers of groups and threads.

    `num_steps` is how many steps of torch's optimizers the job took, `changes` names what it has
    left changed in the process for good.
    """

    result: bytes | None = None
    failure: str | None = None
    num_groups: int = 1
    num_threads: int = 1
    num_steps: int = 0
    changes: tuple[str, ...] = ()


_num_steps = 0
"""Steps of torch's optimizers in this process."""


def serve(place: RankPlace, connection: Connection) -> None:
    """Run jobs until the test process closes its end of `connection`.

    Never returns normally: the receiver ends the process.
    """
    # Own process group: Ctrl-C in the terminal does not reach it, and killing it takes its children
    # along
    os.setsid()
    _die_with_parent()
    _allow_many_sockets()
    _set_environment(place)
    _write_output_to(place.output_file)
    faulthandler.enable()  # a rank that aborts says where
    multiprocessing.set_start_method("fork", force=True)  # of data loaders, as in other programs
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_receive_jobs, args=(connection, jobs), daemon=True).start()
    with open(place.stack_file, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        _prepare_torch()
        if place.world_size > 0:
            _share_one_device()
            _join_world(place, number=0)
        if place.on_cpu:
            _install_on_cpu()
        state = ProcessState()
        connection.send(RankReport())
        for number in range(1, sys.maxsize):
            connection.send(_run_job(jobs.get(), place, number, state))


def _die_with_parent() -> None:
    """Have the system kill this process when the server that it was forked from ends.

    A stopped rank could not read the closed pipe.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _write_output_to(path: str) -> None:
    """Keep what jobs print apart from pytest's progress; the pool shows it when a job fails."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True)
    os.close(file)


def _begin_output(path: str) -> None:
    """Begin the output of a job; keep that of the job before, of which the process may yet die."""
    shutil.copyfile(path, f"{path}.before")
    os.truncate(path, 0)


def _allow_many_sockets() -> None:
    """Each group of a rank has one to every other rank; some systems allow 256 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _set_environment(place: RankPlace) -> None:
    """Set torchrun's variables, and loopback for gloo: some machines fail to resolve their name."""
    if place.world_size > 0:
        os.environ.update(
            RANK=str(place.rank),
            LOCAL_RANK=str(place.rank),
            WORLD_SIZE=str(place.world_size),
            LOCAL_WORLD_SIZE=str(place.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(place.store_port),
        )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _receive_jobs(connection: Connection, jobs: "queue.SimpleQueue[Job]") -> None:
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os.kill(0, signal.SIGKILL)  # 0: this rank's own process group, made in `serve`


def _prepare_torch() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)
    register_optimizer_step_post_hook(_count_step)


def _count_step(*_arguments: object) -> None:
    global _num_steps
    _num_steps += 1


def _install_on_cpu() -> None:
    """Let Megatron-Core run without CUDA, as the programs do that are tested on these ranks."""
    from megatron.mcore_adapter import cpu

    cpu.install()


def _share_one_device() -> None:
    """Use one gloo device for all groups of this rank: each device has a thread that polls.

    torch's arguments differ between releases. Groups whose arguments are not understood are made as
    torch makes them, with a device of their own.
    """
    import torch.distributed as dist

    kind = dist.ProcessGroupGloo
    device, make = kind.create_default_device(), kind.__init__

    def make_on_device(group: dist.ProcessGroupGloo, *args: object, **settings: object) -> None:
        options = options_of(args[3:], settings)
        if options is None:
            make(group, *args, **settings)
        else:
            make(group, *args[:3], options)  # a store, a rank and the number of ranks

    def options_of(more: tuple[object, ...], settings: dict[str, object]) -> object | None:
        if len(more) == 1 and isinstance(more[0], timedelta) and "timeout" not in settings:
            settings = {"timeout": more[0], **settings}
        elif more:
            return None
        options = kind._Options()
        options._devices = [device]
        for name, value in settings.items():
            attribute = next((key for key in (f"_{name}", name) if hasattr(options, key)), None)
            if attribute is None:
                return None
            setattr(options, attribute, value)
        return options

    kind.__init__ = make_on_device


def _join_world(place: RankPlace, number: int) -> None:
    """Build the default group.

    Gloo leaves its addresses in the store, so each world gets a name space of its own.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", place.store_port, is_master=False)
    world_store = dist.PrefixStore(f"world_{number}", store)
    dist.init_process_group("gloo", store=world_store, rank=place.rank, world_size=place.world_size)


def _run_job(job: Job, place: RankPlace, number: int, state: ProcessState) -> RankReport:
    steps_before, collections_before = _num_steps, _full_collections()
    _begin_output(place.output_file)
    try:
        _prepare(place, number, job.fresh_world)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module=OUR_MODULES)
            sys.path[:] = job.sys_path
            importlib.invalidate_caches()
            function, args, kwargs = pickle.loads(job.call)
            result = pickle.dumps(_call(function, args, kwargs))
        num_groups, num_steps = _count_groups(), _num_steps - steps_before
        _destroy_megatron_core_globals()
        is_due = number % JOBS_BETWEEN_FULL_COLLECTIONS == 0
        _collect_garbage(everything=is_due or _full_collections() > collections_before)
        state.put_back()
        return RankReport(
            result=result,
            num_groups=num_groups,
            num_threads=psutil.Process().num_threads(),
            num_steps=num_steps,
            changes=tuple(state.changes()),
        )
    except (
        BaseException
    ) as error:  # SystemExit and pytest's outcomes too: a rank must always answer
        return RankReport(failure=_format(error))


def _call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    return function(*args, **kwargs)


def _format(error: BaseException) -> str:
    """Format the traceback from the test's own function on, without the frames of this file."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
        if frames.tb_frame.f_code is _call.__code__ and frames.tb_next is not None:
            frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _count_groups() -> int:
    """Count this rank's process groups, the default one too; 0 after the world was destroyed."""
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map)


def _prepare(place: RankPlace, number: int, fresh_world: bool) -> None:
    """Seed the generators for a job, and build the world anew if it is worn."""
    import torch
    import torch.distributed as dist

    if fresh_world:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        _join_world(place, number)
        _collect_garbage(everything=True)
    random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # `torch.manual_seed` keeps a stack for each device
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)


def _collect_garbage(everything: bool) -> None:
    """Collect the garbage of the last job, or with `everything` that of all earlier jobs.

    What a job leaves is young, unless a full collection during the job has walked it.
    """
    gc.collect(2 if everything else 1)


def _full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def _forget_meshes() -> None:
    """Clear torch's caches of DTensors, which refer to the meshes of a world that is gone."""
    from torch.distributed.tensor import debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.") and module is not None:
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _destroy_megatron_core_globals() -> None:
    if (module := sys.modules.get("megatron.core.parallel_state")) is not None:
        module.destroy_model_parallel()
    if (module := sys.modules.get("megatron.core.num_microbatches_calculator")) is not None:
        module.destroy_num_microbatches_calculator()
    if (module := sys.modules.get("megatron.core.rerun_state_machine")) is not None:
        module.destroy_rerun_state_machine()
    if (module := sys.modules.get("megatron.core.transformer.moe.moe_utils")) is not None:
        # Has a place for each layer of the last model
        module.get_moe_layer_wise_logging_tracker().clear()
        module.MoEAuxLossAutoScaler.main_loss_backward_scale = (
            None  # has the shape that the last loop gave it
        )
    if (module := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:
        module.destroy_moe_metrics_tracker()  # the same since 0.18
    if (module := sys.modules.get("megatron.core.transformer.multi_token_prediction")) is not None:
        module.MTPLossLoggingHelper.tracker.clear()

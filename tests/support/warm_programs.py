# SPDX-License-Identifier: Apache-2.0
"""A process that has imported what this repository's programs need, and forks their runs.

A run started by a shell takes four seconds of imports for each of its ranks, here it takes
milliseconds. `stand_ins.py` puts a `torchrun` and a `python` in the shell's path that ask this
process. Words of torchrun are read by its own parser.
"""

import ast
import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from megatron.mcore_adapter.run.logging_setup import set_up_logging
from megatron.pretrain.arguments import build_parser
from tests.support import stand_ins
from tests.support.fork_servers import FORKSERVER, INSTALLED, Packages, forks_from

ROOT = Path(__file__).parents[2]
PRELOAD = [
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "megatron.pretrain.loop",
    "megatron.checkpoint.commands.command_line",
    "transformers.models.auto.tokenization_auto",
]


@contextmanager
def warm_commands(folder: Path, packages: Packages = INSTALLED) -> Iterator[dict[str, str]]:
    """Return variables with which a shell finds `stand_ins`, and these find warm programs.

    Args:
        folder: an empty one.
        packages: that the programs have.
    """
    stand_ins.install(folder)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    with warm_programs(folder / "socket", packages):
        yield {
            **kept,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "WARM_PROGRAMS": str(folder / "socket"),
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **packages.environment,
        }


@contextmanager
def warm_programs(socket_path: Path, packages: Packages = INSTALLED) -> Iterator[None]:
    """Run the process, listening at `socket_path`, as long as the context lasts."""
    here, there = multiprocessing.Pipe()
    with forks_from(packages):
        has_loop = packages.release is not None
        process = FORKSERVER.Process(target=serve, args=(str(socket_path), there, has_loop))
        process.start()
    there.close()
    assert here.recv() == "ready"
    yield
    here.close()  # which ends it
    process.join()


def serve(path: str, requester: Connection, has_loop: bool) -> None:
    """Fork a launcher for each request until the requester closes its end.

    Args:
        path: of the socket.
        requester: the process that wants the commands.
        has_loop: import Megatron-LM's loop too.
    """
    set_up_logging()
    multiprocessing.set_start_method("fork", force=True)  # of data loaders, as in other programs
    for name in PRELOAD:
        importlib.import_module(name)
    if has_loop:
        importlib.import_module("benchmarks.parity.loop_ranks").warm_up()
    build_parser()  # the help of its flags is read from sources
    signal.signal(signal.SIGCHLD, forget_ended_launchers)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        requester.send("ready")
        while requester not in wait([listener, requester]):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                requester.close()
                launch(connection)
            connection.close()
    os._exit(0)


def forget_ended_launchers(*_signal: object) -> None:
    """Let the system forget launchers that have ended; their time counts as this process's."""
    with contextlib.suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def launch(connection: socket.socket) -> NoReturn:
    """Start the ranks of one request and answer with an exit code; they end with the requester."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    # multiprocessing has closed the one of this process
    sys.stdin = os.fdopen(0, closefd=False)
    stream = connection.makefile("rw")
    request = json.loads(stream.readline())
    os.chdir(request["directory"])
    code = 1
    try:
        script, words, places = ranks_of(request)
        code = run_ranks(
            script, words, [{**request["environment"], **place} for place in places], connection
        )
    except BaseException:
        traceback.print_exc()
    stream.write(f"{code}\n")
    stream.flush()
    os.killpg(
        0, signal.SIGKILL
    )  # with what ranks have left behind: it would hold the requester's output open
    os._exit(0)


def ranks_of(request: dict[str, Any]) -> tuple[str, list[str], list[dict[str, str]]]:
    """Return the script, or `-m` and a module, its words, and the variables of each rank here."""
    if request["program"] == "python":
        return request["words"][0], request["words"][1:], [{}]
    from torch.distributed.run import parse_args

    args = parse_args(request["words"])
    per_node, nodes = int(args.nproc_per_node), int(args.nnodes.split(":")[0])
    node = int(request["environment"].get("SLURM_NODEID", "0")) if nodes > 1 else 0
    address, _, port = args.rdzv_endpoint.partition(":")
    if args.standalone or not port:
        address, port = "127.0.0.1", str(free_port())
    world = {"WORLD_SIZE": str(nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    world |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    places = [
        {**world, "RANK": str(node * per_node + local), "LOCAL_RANK": str(local)}
        for local in range(per_node)
    ]
    script = f"-m {args.training_script}" if args.module else args.training_script
    return script, args.training_script_args, places


def free_port() -> int:
    """Return a port that nothing uses, and that the system gives to no other socket meanwhile."""
    while True:
        port = 20000 + secrets.randbelow(12000)  # Linux takes those from 32768 on by itself
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(
    script: str, words: list[str], environments: list[dict[str, str]], connection: socket.socket
) -> int:
    """Fork the ranks and wait; as with torchrun, one that fails ends the others.

    The first exit code that is not 0.
    """
    ranks = set()
    import_what_it_imports(script)
    for environment in environments:
        rank = os.fork()
        if rank == 0:
            become_rank(script, words, environment)
        ranks.add(rank)
    terminated = threading.Event()
    watch = threading.Thread(target=end_with, args=(connection, ranks, terminated), daemon=True)
    watch.start()
    code = 0
    while ranks:
        rank, status = os.wait()
        ranks.remove(rank)
        if status and not code:
            code = abs(os.waitstatus_to_exitcode(status))
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return code or int(terminated.is_set())


def import_what_it_imports(script: str) -> None:
    """Import the packages of a script once for all ranks; what fails there says it there."""
    source = "" if script.startswith("-m ") else Path(script).read_text()
    for node in ast.parse(source).body:
        with contextlib.suppress(Exception):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                for name in node.names:  # some packages import their modules late
                    getattr(module, name.name)


def end_with(connection: socket.socket, ranks: set[int], terminated: threading.Event) -> None:
    """Pass SIGTERM on to the ranks; end everything with the requester.

    As with torchrun, the exit code is then 1, even if the ranks end well.
    """
    while connection.recv(1):
        terminated.set()
        for rank in list(ranks):
            os.kill(rank, signal.SIGTERM)
    os.killpg(0, signal.SIGKILL)


def become_rank(script: str, words: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the script as a program.

    Python's main module stays that of the server: Megatron-Core's first save imports it once more.
    """
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *words]
    code = 0
    try:
        if script.startswith("-m "):
            runpy.run_module(script.removeprefix("-m "), run_name="__main__")
        else:
            names = {"__name__": "__main__", "__file__": script, "__package__": None}
            exec(compile(Path(script).read_text(), script, "exec"), names)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # a program may have set its own
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

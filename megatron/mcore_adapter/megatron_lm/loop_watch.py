# SPDX-License-Identifier: Apache-2.0
"""The watch over the ranks of Megatron-LM's loop, and the one message of a run that fails.

A rank that dies, hangs or differs in a collective is named, with the unit and the collective: see
:mod:`megatron.mcore_adapter.watch.watch`. It begins with the process groups of the loop, and ends
with the process. Runs without ``--use-megatron-fsdp`` have none.
"""

from __future__ import annotations

import atexit
import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.backends import rendezvous
from megatron.fsdp.module.gradient_sync import GradientError
from megatron.fsdp.trace import failed_collectives
from megatron.mcore_adapter.megatron_lm.loaded_names import Arguments, Function, with_original
from megatron.mcore_adapter.run.environment import complain
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.model_parallel import backend_for
from megatron.mcore_adapter.watch.watch import Watch

FAKE = "fake"
"""The backend of --fake-process-group, which has no peers."""
FOR_THE_USER = (RunError, GradientError, NotImplementedError)
"""Errors that the user can fix by their message, which is printed once, without a traceback."""


class LoopWatch:
    """The watch of this process, once the loop has made its process groups.

    Args:
        initialize: ``megatron.training.initialize``.
    """

    def __init__(self, initialize: ModuleType):
        self._initialize = initialize
        self._watch: Watch | None = None
        self._hook = sys.excepthook

    def replacements(self) -> Iterator[tuple[object, object]]:
        """Yield pairs of a function of the loop and its replacement."""
        original = self._initialize._initialize_distributed
        yield original, with_original(original, self.begin)

    def begin(self, original: Function, given: Arguments) -> Any:
        """Make the process groups as ``_initialize_distributed`` does, and watch the ranks."""
        args = self._initialize.get_args()
        if not args.use_megatron_fsdp or self._watch is not None:
            return original(**given)
        loop_handler = signal.getsignal(signal.SIGTERM)
        watch = Watch(args).__enter__()
        self._watch = watch
        if args.exit_signal_handler:  # the loop stops after its step; the watch gets it too
            signal.signal(signal.SIGTERM, loop_handler)
        atexit.register(self.close)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with groups_of_this_attempt(backend_for(args, device)):
            result = original(**given)
        # After torch has set its own hook, which collects what is printed until the process ends.
        self._hook = sys.excepthook
        sys.excepthook = self._report
        failed_collectives.watch()
        watch.connect()
        watch.follow(lambda: getattr(args, "curr_iteration", 0))
        return result

    def close(self) -> None:
        """End the watch; a second call does nothing."""
        watch = self._watch
        if watch is not None:
            self._watch = None
            atexit.unregister(self.close)
            sys.excepthook = self._hook
            watch.__exit__()

    def _report(
        self,
        kind: type[BaseException],
        error: BaseException,
        place: TracebackType | None,
    ) -> None:
        """Report an error that ends the process, once for all ranks."""
        watch = self._watch
        if watch is None:
            self._hook(kind, error, place)
        elif isinstance(error, KeyboardInterrupt):
            watch.exit(watch.interrupted())
        elif isinstance(error, FOR_THE_USER):
            if not watch.report(f"error: {error}"):
                complain(f"error: {error}")
        else:
            if isinstance(error, Exception):
                watch.failed(error)
            self._hook(kind, error, place)


@contextmanager
def groups_of_this_attempt(backend: str) -> Iterator[None]:
    """Let ranks that torchrun has restarted connect to each other, and not to those that have died.

    The loop names no method of initialization, which means ``env://``.

    Args:
        backend: backend of the groups; the loop would take one that moves no host memory.
    """
    init_process_group = dist.init_process_group

    @functools.wraps(init_process_group)
    def init_attempt(**settings: Any) -> None:
        if settings.get("store") is None and "init_method" not in settings:
            for name in ("store", "rank", "world_size"):  # the rendezvous has them
                settings.pop(name, None)
            settings["init_method"] = rendezvous.INIT_METHOD
        if settings.get("backend") != FAKE:
            settings["backend"] = backend
        init_process_group(**settings)

    dist.init_process_group = init_attempt  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.init_process_group = init_process_group

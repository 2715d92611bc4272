# SPDX-License-Identifier: Apache-2.0
"""State of a process that a test may leave changed for the tests after it.

    state = ProcessState()
    ...
    state.put_back()                    # environment variables, log handlers, the default dtype
    assert state.changes() == []        # but not ["torch.empty", "hooks of all modules"]

Functions and classes of the modules that were loaded then are compared by identity. That notices
`cpu.install()`, and whatever a test has patched and not put back, and takes milliseconds.
"""

import logging
import os
import re
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers

MODULES = re.compile(
    r"os|random|shutil|socket|subprocess|threading|time|torch"
    r"|torch\.(autograd|cuda|cuda\.nvtx|distributed|nn\.functional|optim\..*|serialization)"
    r"|torch\.distributed\.(device_mesh|distributed_c10d|checkpoint\..*)"
    r"|megatron\..*"
)
"""Names of the modules whose functions and classes are compared."""
CLASSES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, DTensor)
"""Their methods are compared too."""
KINDS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
"""What is compared: other attributes change in use, as caches and counters do."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGALRM)


class ProcessState:
    """Functions and classes at the watched names now, and the settings of the process."""

    def __init__(self) -> None:
        self._names = [
            (path, owner, {name: it for name, it in vars(owner).items() if isinstance(it, KINDS)})
            for path, owner in _owners()
        ]
        self._modules = [
            (path, owner) for path, owner, _ in self._names if isinstance(owner, types.ModuleType)
        ]
        self._modes = _modes()
        self._environment = dict(os.environ)
        self._arguments, self._path = list(sys.argv), list(sys.path)
        self._loggers = [(each, each.level, list(each.handlers)) for each in _loggers()]
        self._directory = os.getcwd()
        self._threads = torch.get_num_threads()
        self._disabled = logging.root.manager.disable
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def put_back(self) -> None:
        """Put settings of the process back to what they were."""
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        sys.argv[:] = self._arguments
        sys.path[:] = self._path
        os.chdir(self._directory)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        logging.disable(self._disabled)
        for logger, level, handlers in self._loggers:
            logger.handlers[:] = handlers
            if logger.level != level:
                logger.setLevel(level)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(self._threads)

    def changes(self) -> list[str]:
        """Return the names of what is different from what it was then."""
        names = []
        for path, owner, values in self._names:
            now = vars(owner)
            if not values.items() <= now.items():
                changed = (name for name, value in values.items() if now.get(name) is not value)
                names += [f"{path}.{name}" for name in changed]
        modules = [path for path, owner in self._modules if sys.modules.get(path) is not owner]
        modes = _modes()
        return [*names, *modules, *(name for name in modes if modes[name] != self._modes[name])]


def _owners() -> Iterator[tuple[str, Any]]:
    """Return modules and classes with their names."""
    for path, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and MODULES.fullmatch(path):
            yield path, module
    for kind in CLASSES:
        yield kind.__name__, kind


def _loggers() -> list[logging.Logger]:
    return [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]


def _modes() -> dict[str, Any]:
    """Modes and hooks that torch keeps for a whole process."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "precision of matrix products": (
            torch.get_float32_matmul_precision(),
            matmul.allow_tf32,
            matmul.allow_bf16_reduced_precision_reduction,
        ),
        "settings of cuDNN": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "modes of dispatch": (
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        ),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "hooks of all modules": _hooks(hooks_of_modules),
        "hooks of all optimizers": _hooks(hooks_of_optimizers),
    }


def _hooks(module: types.ModuleType) -> dict[str, list[Any]]:
    """Hooks that a module of torch keeps for all instances of a class, but those of the library.

    It registers one for a process, which refuses to step weights that sharding has replaced.
    """
    return {
        name: [hook for hook in value.values() if not hook.__module__.startswith("megatron.fsdp.")]
        for name, value in vars(module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }

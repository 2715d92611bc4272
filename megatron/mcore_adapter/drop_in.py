# SPDX-License-Identifier: Apache-2.0
"""The engine in a Megatron-LM checkout, and in other Megatron-Core programs.

    import megatron.mcore_adapter.drop_in as drop_in

    drop_in.install()  # best as the first line of the program

From then on ``--use-megatron-fsdp`` trains, saves and loads with the classes of this project. Names
that were imported before are replaced too, in every module. References elsewhere (in a default
argument or a list) are not. ``torchrun -m megatron.mcore_adapter pretrain_gpt.py ...`` does the
same without a change of the program. The published package's path in Megatron-Core,
``megatron.core.distributed.fsdp.src.megatron_fsdp``, has the names of this project too.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FunctionType
from typing import Any

from megatron.mcore_adapter.releases import tested

# The imports below would fail with an error that names a file of Megatron-Core and no fix.
tested.check()

import megatron.core  # noqa: E402
from megatron.core.optimizer import DistributedOptimizer  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: E402

from megatron.mcore_adapter.data_parallel import (  # noqa: E402
    FullyShardedDataParallel,
    generation_of,
)
from megatron.mcore_adapter.megatron_lm import (  # noqa: E402
    loop_optimizer,
    loop_planner,
    loop_state_dicts,
)
from megatron.mcore_adapter.megatron_lm.loaded_names import exchange, loaded_modules  # noqa: E402
from megatron.mcore_adapter.megatron_lm.loop_program import LoopProgram  # noqa: E402
from megatron.mcore_adapter.published_paths import PACKAGE, publish  # noqa: E402
from megatron_fsdp import uneven_dtensor  # noqa: E402

ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
UNEVEN = f"{PACKAGE}.uneven_dtensor"
ENTRIES = "megatron.core.transformer.fsdp_dtensor_checkpoint"
CLASS = "FullyShardedDataParallel"
REPLACED = ("megatron.core.distributed.fsdp.", f"{ENTRIES}.")
"""Files of Megatron-Core that this project has an implementation of."""

# ---- installation

_installation: Installation | None = None


def install() -> AbstractContextManager[object]:
    """Replace Megatron-Core's classes by those of this project; a second call changes nothing.

    If ``sys.argv`` is a command line of Megatron-LM's training loop, it is completed, and the
    process is prepared for it: see :class:`LoopProgram`. The first rank prints one line, that the
    replacements are active and what was set.

    Returns:
        A context manager that undoes the changes of this call on exit. Using it is optional.

    Raises:
        LoopFlagError: if the command line contradicts itself or the machine.
        RuntimeError: for a release of Megatron-Core without the objects to replace, and if a loaded
            program uses parts of the replaced files that this module does not know. Nothing is
            changed then.
    """
    global _installation
    if _installation is not None:
        return nullcontext()
    program = LoopProgram()
    installation = Installation(program)
    try:
        installation.replace()
    except BaseException:
        installation.close()
        raise
    _installation = installation
    program.log(
        f"the drop-in is active on Megatron-Core {megatron.core.__version__}"
        f" in {megatron.core.__path__[0]}"
    )
    return installation


def is_active() -> bool:
    """Return True between :func:`install` and :func:`uninstall`."""
    return _installation is not None


def uninstall() -> None:
    """Restore everything, also in modules that have been imported since."""
    # What cpu.install() did to a process without CUDA remains. So does what wrappers did to
    # Megatron-Core's optimizers (see core_optimizers.py), which unsharded models do not notice.
    if _installation is not None:
        _installation.close()


# The loop knows Megatron-Core's class and some functions on its state dicts by name. Each is
# replaced, in every loaded module, by an object that exists for this purpose only: restoring is the
# same exchange in the other direction. Modules that are imported later find the replacements in
# place of the originals, and every new wrapper repeats the exchange.


class Installation(ExitStack):
    """The replacements while the drop-in is active; a context that undoes them when it is left."""

    def __init__(self, program: LoopProgram) -> None:
        super().__init__()
        self._replaced = _replaced_names()
        self.program = program

    def replace(self) -> None:
        """Replace names and methods, and prepare the process."""
        self.callback(_forget_installation)
        self.replace_names()
        self.callback(exchange, [(ours, theirs) for theirs, ours in self._replaced.values()])
        for owner, name, method in METHODS:
            original = vars(owner)[name]
            self.callback(setattr, owner, name, original)
            setattr(owner, name, method)
        # Names that programs have taken from the published paths remain ours.
        ours_by_path = {}
        for path, (_, ours) in self._replaced.items():
            ours_by_path[path] = ours
        publish(ours_by_path, undo=self)
        self.callback(self.program.restore)
        self.program.prepare()

    def replace_names(self) -> None:
        """Replace every name of Megatron-Core's objects in loaded modules, if all are known."""
        pairs = [*self._replaced.values()]
        known = {id(theirs) for theirs, _ in pairs}
        unknown = sorted(set(_unknown_names(known)))
        if unknown:
            raise RuntimeError(
                "the program uses parts of Megatron-Core's own FSDP that the drop-in does not"
                f" know, and that would not work on its models: {', '.join(unknown)}. Keep these"
                " imports out of the program, or load them after drop_in.uninstall()"
            )
        exchange(pairs)


def _forget_installation() -> None:
    global _installation
    _installation = None


# ---- objects that are replaced

METHODS: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (DistributedOptimizer, "sharded_state_dict", loop_optimizer.sharded_state_dict),
    (DistributedOptimizer, "load_state_dict", loop_optimizer.load_state_dict),
    (DefaultLoadPlanner, "set_up_planner", loop_planner.set_up_planner),
    (DefaultLoadPlanner, "create_global_plan", loop_planner.create_global_plan),
)
"""Methods of classes, and their replacements."""


def _replaced_names() -> dict[str, tuple[object, object]]:
    """Pair the objects of Megatron-Core's files, by their paths, with their replacements."""
    required: dict[str, dict[str, object]] = {
        ADAPTER: {CLASS: DropInDataParallel},
        UNEVEN: _by_name(loop_state_dicts.preprocess_state_dict_for_uneven_dtensor),
        ENTRIES: _by_name(
            loop_state_dicts.print_diff_in_state_dicts,
            loop_state_dicts.handle_fp8_extra_state_case,
            loop_state_dicts.handle_swiglu_in_state_dict,
            loop_state_dicts.handle_experts_in_state_dict,
        ),
    }
    if f"{CLASS}V1" in vars(sys.modules[ADAPTER]):  # since 0.20, between which a function chooses
        required[ADAPTER][f"{CLASS}V1"] = FirstGeneration
        required[ADAPTER][f"{CLASS}V2"] = SecondGeneration
    pairs: dict[str, tuple[object, object]] = {}
    absent = []
    for path, replacements in required.items():
        theirs = vars(sys.modules[path])
        for name, ours in replacements.items():
            if name in theirs:
                pairs[f"{path}.{name}"] = theirs[name], ours
            else:
                absent.append(f"{path}.{name}")
    if absent:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} in {megatron.core.__path__[0]} does not"
            f" have {', '.join(absent)}, which its training loop calls: use 0.16 or a newer release"
        )
    theirs = vars(sys.modules[UNEVEN])
    for name in uneven_dtensor.__all__:
        function = theirs.get(name)  # releases may lack some, or import torch's
        if name not in required[UNEVEN] and getattr(function, "__module__", None) == UNEVEN:
            # An object of its own: modules of this project have ours, which a restore would take.
            ours = getattr(uneven_dtensor, name)
            separate = functools.update_wrapper(functools.partial(ours), ours)
            pairs[f"{UNEVEN}.{name}"] = function, separate
    return pairs


def _by_name(*functions: Callable[..., Any]) -> dict[str, object]:
    return {function.__name__: function for function in functions}


# ---- names in loaded modules


def _unknown_names(known: set[int]) -> Iterator[str]:
    """Yield names outside Megatron-Core of objects of the replaced files that are not replaced.

    ``known`` are the identities of those that are. Classes derived from them are yielded too.
    """
    for module in loaded_modules():
        if f"{module.__name__}.".startswith("megatron.core."):
            continue
        for name, value in list(vars(module).items()):
            # isinstance asks the object for its class, and deprecated names answer that with a
            # warning.
            is_class = issubclass(type(value), type)
            is_function = type(value) is FunctionType
            if id(value) in known or not (is_class or is_function):
                continue
            if f"{value.__module__}.".startswith(REPLACED):
                yield f"{module.__name__}.{name} ({value.__module__}.{value.__qualname__})"
            elif is_class and any(id(base) in known for base in value.__mro__):
                yield f"{module.__name__}.{name} (a class made of {ADAPTER}.{CLASS})"


# ---- the class


class DropInDataParallel(FullyShardedDataParallel):
    """The replacement of Megatron-Core's class; arguments and members are those of its base.

    ``disable_bucketing`` is not passed on: the loop sets it for every virtual pipeline stage but
    the first, where buckets would gain nothing. Units bound the memory on all of them.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> DropInDataParallel:
        """Return a wrapper of this class, or of the generation that ``ddp_config`` asks for."""
        if cls is not DropInDataParallel:
            return super().__new__(cls)
        signature = inspect.signature(FullyShardedDataParallel)
        given = signature.bind(*args, **kwargs)
        config = given.arguments["ddp_config"]
        if _installation is not None:
            for name, value in _installation.program.settings().items():
                if not hasattr(config, name):  # the release has no field for it
                    setattr(config, name, value)
        if generation_of(config) == 1:
            return super().__new__(FirstGeneration)
        return super().__new__(SecondGeneration)

    def __init__(self, *args: Any, **kwargs: Any):
        if _installation is not None:
            _installation.replace_names()  # in modules that have been imported since
        kwargs["disable_bucketing"] = False
        super().__init__(*args, **kwargs)
        self._refused: tuple[Any, Exception] | None = None

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load as the base class does, but reject a state dict again that has been rejected before.

        After an error the loop calls again with ``strict=False``, and would continue with the
        entries that fit. An intended partial load passes ``strict=False`` in its first call.
        """
        if not strict and self._refused is not None:
            refused, error = self._refused
            if refused is state_dict or sys.exc_info()[1] is error:
                raise RuntimeError(
                    f"a state dict that was refused is not loaded in part: {error}"
                ) from error
        try:
            result = super().load_state_dict(state_dict, strict=strict)
        except Exception as error:
            self._refused = (state_dict, error)
            raise
        self._refused = None
        return result


class FirstGeneration(DropInDataParallel):
    """The wrapper that newer releases choose for ``megatron_fsdp_version`` 1."""


class SecondGeneration(DropInDataParallel):
    """The wrapper that newer releases choose for ``megatron_fsdp_version`` 2."""

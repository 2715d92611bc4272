# SPDX-License-Identifier: Apache-2.0
"""The engine in a Megatron-LM checkout (core_v0.16.x), and in other programs that take the class from Megatron-Core.

    import megatron.mcore_adapter.drop_in as drop_in

    drop_in.install()  # best as the first line of the program

From then on ``--use-megatron-fsdp`` trains, saves and loads with the classes of this project. What
was imported before is found and replaced too; only what a program keeps elsewhere than in a module
(a default argument, a list) stays as it was.

[Note: what stands in the loop] The loop knows Megatron-Core's class and some functions on its state
dicts by name. Each of them is replaced by an object that exists for this purpose only, in every
loaded module, so that the way back is the same exchange the other way round. Modules that are
imported later find the replacements where they look for the originals; every new wrapper looks
again. A class or function of the replaced files that this module does not know is refused, not left
in.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import megatron.core
from megatron.core.optimizer import DistributedOptimizer
from torch.distributed.checkpoint import DefaultLoadPlanner

from megatron.fsdp.dtensor import uneven_dtensor
from megatron.mcore_adapter import data_parallel
from megatron.mcore_adapter import loop_state_dicts as entries

RELEASE = "0.16"
ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
UNEVEN = "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor"
ENTRIES = "megatron.core.transformer.fsdp_dtensor_checkpoint"
REPLACED = ("megatron.core.distributed.fsdp", ENTRIES)
"""Files that this project writes anew."""

# ---- installation
# ----------------------------------------------------------------------------------------------------

_installation: Installation | None = None


def install() -> AbstractContextManager:
    """Put this project's classes in the place of Megatron-Core's; a second call changes nothing.

    Returns:
        A context that takes back, when it is left, what this call has changed. It need not be used
        as one.

    Raises:
        RuntimeError: for another release of Megatron-Core, and where a loaded program uses parts of
            the replaced files that this module does not know. Nothing is changed then.
    """
    global _installation
    if _installation is not None:
        return nullcontext()
    _check_release()
    installation = Installation()
    installation.take_names()
    installation.take_methods()
    _installation = installation
    return installation


def uninstall() -> None:
    """Put everything back as it was, also in modules that have been imported since."""
    global _installation
    if _installation is not None:
        _installation.give_back()
        _installation = None


def _check_release() -> None:
    found = megatron.core.__version__
    if found.split(".")[:2] != RELEASE.split("."):
        raise RuntimeError(
            f"the drop-in is made for Megatron-Core {RELEASE}.x but found {found}: install"
            f" megatron-core=={RELEASE}.1, or check out core_v0.16.1 of Megatron-LM"
        )


class Installation:
    """What is exchanged while the drop-in is active, as pairs of Megatron-Core's object and ours."""

    def __init__(self) -> None:
        ours = {
            ADAPTER: [FullyShardedDataParallel],
            UNEVEN: [
                entries.preprocess_state_dict_for_uneven_dtensor,
                *map(_forwarder, _FORWARDED),
            ],
            ENTRIES: [
                entries.print_diff_in_state_dicts,
                entries.handle_fp8_extra_state_case,
                entries.handle_swiglu_in_state_dict,
                entries.handle_experts_in_state_dict,
            ],
        }
        self._pairs, absent = [], []
        for path, replacements in ours.items():
            theirs = vars(sys.modules[path])  # Megatron-Core has loaded it
            self._pairs += [
                (theirs[each.__name__], each) for each in replacements if each.__name__ in theirs
            ]
            absent += [
                f"{path}.{each.__name__}"
                for each in replacements
                if each.__name__ not in {*theirs, *_FORWARDED}
            ]
        if absent:
            raise RuntimeError(
                f"Megatron-Core {megatron.core.__version__} does not have {', '.join(absent)}: use"
                f" {RELEASE}.1"
            )
        self._methods = [
            (kind, name, vars(kind)[name], replacement(vars(kind)[name]))
            for kind, name, replacement in (
                (DistributedOptimizer, "sharded_state_dict", entries.replace_sharded_state_dict),
                (DistributedOptimizer, "load_state_dict", entries.replace_load_state_dict),
                (DefaultLoadPlanner, "set_up_planner", entries.replace_set_up_planner),
                (DefaultLoadPlanner, "create_global_plan", entries.replace_create_global_plan),
            )
        ]

    def take_names(self) -> None:
        """Replace every name of Megatron-Core's objects in loaded modules, once all of them are known.

        Raises:
            RuntimeError: naming those that are not.
        """
        known = {id(theirs) for theirs, _ in self._pairs}
        unknown = sorted(set(_strangers(known)))
        if unknown:
            raise RuntimeError(
                "the program uses parts of Megatron-Core's own FSDP that the drop-in does not"
                f" know, and that would not work on its models: {', '.join(unknown)}. The drop-in"
                f" is made for Megatron-LM core_v{RELEASE}.x; keep these imports out of the"
                " program, or load them after drop_in.uninstall()"
            )
        _exchange(self._pairs)

    def take_methods(self) -> None:
        for kind, name, _, ours in self._methods:
            setattr(kind, name, ours)

    def give_back(self) -> None:
        _exchange([(ours, theirs) for theirs, ours in self._pairs])
        for kind, name, theirs, _ in self._methods:
            setattr(kind, name, theirs)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: object) -> None:
        if _installation is self:
            uninstall()


def _exchange(pairs: Sequence[tuple[object, object]]) -> None:
    """In all loaded modules, put the second of a pair where the first is; also in tuples, as for ``isinstance``."""
    new = {id(before): after for before, after in pairs}
    for module in _modules():
        names = vars(module)
        for name, value in list(names.items()):
            if id(value) in new:
                names[name] = new[id(value)]
            elif type(value) is tuple and any(id(item) in new for item in value):
                names[name] = tuple(new.get(id(item), item) for item in value)


def _strangers(known: set[int]) -> Iterator[str]:
    """Names of what the replaced files define, outside of Megatron-Core, that is not ``known``; and classes made of it."""
    for module in _modules():
        if _is_within(module.__name__, ("megatron.core",)):
            continue
        for name, value in list(vars(module).items()):
            # isinstance asks the object for its class, and deprecated names answer that with a
            # warning.
            is_class = issubclass(type(value), type)
            if not (is_class or type(value) is FunctionType) or id(value) in known:
                continue
            if _is_within(value.__module__, REPLACED):
                yield f"{module.__name__}.{name} ({value.__module__}.{value.__qualname__})"
            elif is_class and any(id(base) in known for base in value.__mro__):
                yield (
                    f"{module.__name__}.{name} (a class made of"
                    f" {ADAPTER}.{FullyShardedDataParallel.__name__})"
                )


def _modules() -> list[ModuleType]:
    """All loaded ones but those where the replacements are at home."""
    home = (__name__, entries.__name__)
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name not in home
    ]


def _is_within(name: Any, packages: tuple[str, ...]) -> bool:
    return isinstance(name, str) and any(
        name == package or name.startswith(package + ".") for package in packages
    )


# What else programs take from the same file. Programs of this project hold the originals, so the
# loop gets others.
_FORWARDED = (
    "uneven_dtensor_to_full_tensor",
    "redistribute_uneven_dtensor_to_replicated",
    "gather_uneven_dtensor_to_full_tensor",
    "gather_and_compute_chunk_metadata",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
    "split_dtensor",
    "filter_unflattened_state_dict",
    "get_unflattened_state_dict",
)


def _forwarder(name: str) -> Callable[..., Any]:
    function = getattr(uneven_dtensor, name)

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward


# ---- the class
# -------------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(data_parallel.FullyShardedDataParallel):
    """The class under the names of Megatron-Core's; arguments and members are those of the base class.

    ``disable_bucketing`` is not passed on: the loop sets it for every virtual pipeline stage but
    the first, where buckets would gain nothing. Units bound the memory on all of them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        if _installation is not None:
            _installation.take_names()  # in modules that have been imported since
        super().__init__(*args, **(kwargs | {"disable_bucketing": False}))
        self._refused: tuple[Any, Exception] | None = None

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True):
        """As in the base class, but what has been refused is not taken in part afterwards.

        After an error the loop calls again with ``strict=False``, and would train on with what
        fits. A partial load that is meant says so in its first call.

        Raises:
            RuntimeError: where ``state_dict`` does not fit; again for a second call with the same
                ``state_dict``, and for one that is made while the error of the first is handled.
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

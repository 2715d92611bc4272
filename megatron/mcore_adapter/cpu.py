# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core on machines without CUDA: replacements for its CUDA-only call sites.

Nothing here is active on a GPU.

Megatron-Core 0.16 names the device "cuda" in a few dozen places, all of which go through the
functions below, which it looks up at call time. A run also needs settings that work on a CPU (local
layers, no fused kernels), which the rules of the arguments choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _device as torch_device_context  # not loaded by `import torch`

_installed = False


def install() -> bool:
    """Make Megatron-Core run on this machine, and return True if that has no CUDA."""
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        _installed = True
        _replace_device()
        _replace_factories()
        _replace_type_strings()
        _replace_random_state()
        _replace_streams()
        _replace_uneven_collectives()
        _repair_moe()
    return True


def _replace(owner: object, **replacements: object) -> None:
    """Replace attributes of a module or class."""
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)


def _replace_device() -> None:
    """Replace the functions that name, wait for or measure the current device."""
    cpu = torch.device("cpu")
    _replace(
        torch.cuda,
        current_device=lambda: cpu,  # buffers, masks and rotary embeddings are made there
        # Timers, point-to-point communication and checkpoint staging wait for the device.
        synchronize=lambda device=None: None,
        memory_allocated=lambda device=None: 0,  # logs
        max_memory_allocated=lambda device=None: 0,
    )
    # Losses and masks are already on the right device.
    _replace(torch.Tensor, cuda=lambda self, *args, **kwargs: self)


def _replace_factories() -> None:
    """Replace the factories of optimizer scalars, loss scales and checkpoint buffers."""
    # `with torch.device(...)` acts on the functions that it finds when it is first used: those
    # below call them.
    torch_device_context._device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a factory that makes tensors on the CPU where CUDA or pinned memory is asked for."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _replace_type_strings() -> None:
    """Let ``tensor.type()`` return "torch.cuda.FloatTensor", as Megatron-Core expects."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(
        self: torch.Tensor,
        dtype: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dtype is None:
            with torch._C.DisableTorchFunctionSubclass():  # a subclass' own would come back here
                return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    _replace(torch.Tensor, type=type_)


def _replace_random_state() -> None:
    """Let the model-parallel random tracker fork the CPU's generator, which dropout uses here."""
    from megatron.core.tensor_parallel import random

    _replace(
        torch.cuda,
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        set_rng_state=lambda state, device="cuda": torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    # These two bypass torch.cuda's public functions.
    _replace(
        random,
        _get_cuda_rng_state=lambda device="cuda", clone=False, graph_safe=False: (
            torch.get_rng_state()
        ),
        _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )


class InertStream(torch.cpu.Stream):
    """A stream whose work has always finished; all are equal, because work is done in order."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InertStream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: Any = None) -> Any:
        """Return ``event``, or a new one, which has happened."""
        if event is None:
            return InertEvent()
        return event

    def synchronize(self) -> None:
        """Return at once: the stream's work has finished."""


class InertEvent(torch.cpu.Event):
    """An event that has happened; CUDA's arguments are ignored."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass


def _replace_streams() -> None:
    """Replace streams and events, which token dispatchers and shared experts use to order work."""
    _replace(
        torch.cuda,
        Stream=InertStream,
        Event=InertEvent,
        stream=lambda stream: nullcontext(),
        current_stream=lambda device=None: InertStream(),
        default_stream=lambda device=None: InertStream(),
    )
    # The combined 1F1B schedule names its parts, and records for the allocator which stream uses a
    # tensor.
    _replace(torch.cuda.nvtx, range_push=lambda message: None, range_pop=lambda: None)
    _replace(torch.Tensor, record_stream=lambda self, stream: None)


def _replace_uneven_collectives() -> None:
    """Gather and reduce-scatter parts of different sizes by all-to-all, as gloo cannot otherwise.

    If tensor-parallel ranks divide experts, their numbers of tokens differ.
    """
    from megatron.core.tensor_parallel import mappings

    gather_even = mappings._gather_along_first_dim
    reduce_scatter_even = mappings._reduce_scatter_along_first_dim

    def gather(
        tensor: torch.Tensor,
        group: Any,
        sizes: Sequence[int] | None = None,
        *others: Any,
    ) -> torch.Tensor:
        if sizes is None:
            return gather_even(tensor, group, sizes, *others)
        num_ranks = group.size()
        copies = torch.cat([tensor] * num_ranks)  # one for every rank
        sent_sizes = [len(tensor)] * num_ranks
        return mappings.all_to_all(group, copies, sizes, sent_sizes)

    def reduce_scatter(
        tensor: torch.Tensor,
        group: Any,
        sizes: Sequence[int] | None = None,
        *others: Any,
    ) -> torch.Tensor:
        if sizes is None:
            return reduce_scatter_even(tensor, group, sizes, *others)
        size = sizes[group.rank()]
        received_sizes = [size] * group.size()
        received = mappings.all_to_all(group, tensor, received_sizes, sizes)
        return torch.stack(received.split(size)).sum(0)  # the sum of one part from every rank

    _replace(
        mappings,
        _gather_along_first_dim=gather,
        _reduce_scatter_along_first_dim=reduce_scatter,
    )


def _repair_moe() -> None:
    """Repair three functions that only fail where Transformer Engine or CUDA is absent."""
    from megatron.core.fp8_utils import HAVE_TE
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # A guarded import without its fallback would be a NameError in the router.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    multi_latent_attention.HAVE_TE = HAVE_TE  # is True although its classes are stand-ins

    def maybe_move_tensor_to_cpu(
        tensor: Any,
        as_numpy: bool = False,
        **unused: Any,
    ) -> Any:
        # The original converts CUDA tensors only, and passes others on as split sizes.
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return tensor

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu

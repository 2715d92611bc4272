# SPDX-License-Identifier: Apache-2.0
"""Operations of torch on uneven DTensors, with the results that the whole tensors would give.

[Note: operations on uneven DTensors] torch's own rules for DTensors expect equal parts. Here, an
operation first runs in a mode that looks at what it consists of:

    element-wise      on the local tensors of operands that are divided alike, and numbers. The
                      result is another uneven DTensor; nothing is communicated
    anything else     the operation is started again, on whole tensors that all ranks gather. The
                      result is a plain tensor, equal on all ranks. What it has written to a whole
                      tensor is copied into the local tensor. Views of a gathered tensor refuse to
                      be written to, because that would be lost

The choice depends on shapes and layouts, which are the same on all ranks, so that all of them
gather or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import add
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.fsdp.dtensor.gathering import full_tensor, is_replicated, wrap_local
from megatron.fsdp.dtensor.random_draws import call_with_equal_draws
from megatron.fsdp.dtensor.refusals import LOST_WRITE, NO_GRADIENT, NO_MEMORY, UNKNOWN_PART
from megatron.fsdp.engine.layout import Chunk

aten = torch.ops.aten

COPIES = frozenset(
    {
        aten.clone.default,
        aten.copy_.default,
        aten._to_copy.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.zero_.default,
    }
)
"""Element-wise operations that torch does not tag as pointwise."""

ALIASES = frozenset({aten.alias.default, aten.detach.default})

RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.expand.default})
"""Operations whose second argument is a shape: aliases if it is the operand's own."""

FACTORIES = frozenset(
    {
        aten.new_empty.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
    }
)
"""Operations that take dtype and device from a tensor, and the shape from their arguments."""

ON_WHOLE_TENSORS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})
"""Functions that read the memory of a tensor without an operation that a mode sees."""

ON_MEMORY = frozenset(
    {
        torch.Tensor.__dlpack__,
        torch.Tensor.apply_,
        torch.Tensor.map_,
        torch.Tensor.map2_,
        torch.Tensor.set_,
        torch.Tensor.share_memory_,
    }
)
"""Methods that share or replace the memory of a tensor, where a DTensor has none."""

LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
"""Beginnings of the names of operations on lists of tensors."""


@dataclass(frozen=True, eq=False)
class LocalPart:
    """The part of a whole tensor that the local tensor of a DTensor contains.

    Args:
        key: equal for tensors of one mesh that all ranks divide alike; the same on all ranks.
        chunks: offsets and sizes within the whole tensor, in the order of the local elements.
        edited: called after an operation has written to the tensor; None: nobody needs to know.
        replicas: groups of ranks outside of the mesh that have the same part.
    """

    key: Hashable
    chunks: tuple[Chunk, ...]
    edited: Callable[[], None] | None = None
    replicas: tuple[dist.ProcessGroup, ...] = ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of this part of ``whole``, flat."""
        elements = [whole.new_empty(0)]
        for offsets, sizes in self.chunks:
            box = tuple(map(slice, offsets, map(add, offsets, sizes)))
            elements.append(whole[box].reshape(-1))
        return torch.cat(elements)

    def of_copies(self) -> LocalPart:
        """Return the same part for tensors that nobody watches."""
        return self if self.edited is None else replace(self, edited=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalPart, (self.key, self.chunks)


torch.serialization.add_safe_globals([LocalPart])


def part_of(dtensor: DTensor) -> LocalPart | None:
    """Return the part that the local tensor contains; None if the ranks do not know it."""
    part: LocalPart | None = getattr(dtensor, "part", None)
    return part


class GatheredView(torch.Tensor):
    """A view of a whole tensor that was gathered from all ranks; it may be read only.

    Operations on it return plain tensors, or views like itself.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tensors = tree_leaves((args, kwargs))
        if any(isinstance(each, DTensor) for each in tensors):
            return NotImplemented  # the DTensor is gathered first
        views = [each for each in tensors if isinstance(each, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            versions = [view._version for view in views]
            result = func(*args, **(kwargs or {}))
            if versions != [view._version for view in views]:
                raise RuntimeError(LOST_WRITE)
            return _as_views(result, views)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.detach().as_subclass(torch.Tensor).clone().__reduce_ex__(protocol)


class NeedsWholeTensor(Exception):  # noqa: N818  # a signal, not an error
    """The operation cannot be done on local tensors; nothing has been done yet."""


class OnLocalTensors(TorchDispatchMode):
    """A mode in which element-wise operations run on local tensors, and others are refused.

    Args:
        dtensor_class: of the DTensors that it looks at.

    Attributes:
        written: the DTensors that operations have written to.
    """

    def __init__(self, dtensor_class: type[DTensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._class = dtensor_class
        self.written: list[DTensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        operands = [each for each in tensors if isinstance(each, self._class)]
        if not operands:
            return func(*args, **kwargs)
        is_list = func._schema.name.startswith(LISTS)
        model = operands[:1]
        if func in FACTORIES and tuple(args[1]) != tuple(args[0].shape):
            return func(*self._local(args), **kwargs)
        if is_list:
            model = self._check_lists(func, (*args, *kwargs.values()))
        elif not _is_elementwise(func, args, operands, tensors):
            raise NeedsWholeTensor
        local_args = self._local(args)
        if func in RESHAPES or func in FACTORIES:
            local_args = (local_args[0], local_args[0].shape, *local_args[2:])
        result = func(*local_args, **self._local(kwargs))
        if func._schema.is_mutable:
            self._note_writes(func, args, kwargs)
        of_local = {id(each._local_tensor): each for each in operands}

        def wrap(local: torch.Tensor, like: DTensor) -> DTensor:
            """Return a local result as a DTensor, or the operand that it belongs to."""
            if id(local) in of_local:
                return of_local[id(local)]
            return self._divided_like(like, local, func in ALIASES or func in RESHAPES)

        if is_list:
            return None if result is None else list(map(wrap, result, model))
        return tree_map_only(torch.Tensor, lambda local: wrap(local, model[0]), result)

    def _divided_like(self, operand: DTensor, local: torch.Tensor, shares: bool) -> DTensor:
        if local.dtype == operand.dtype:
            result = self._class(local.new_empty(0), operand._spec, requires_grad=False)
            result._local_tensor = local
        else:
            mesh, placements = operand.device_mesh, operand.placements
            result = wrap_local(self._class, local, mesh, placements, operand.shape)
        part = part_of(operand)
        if part is not None:
            result.part = part if shares else part.of_copies()  # type: ignore[attr-defined]
        return result

    def _check_lists(self, func: Any, arguments: Sequence[Any]) -> list[DTensor]:
        """Return the first list of tensors; those at one position of all lists must be alike."""
        lists = [each for each in arguments if isinstance(each, (list, tuple)) and len(each)]
        lists = [each for each in lists if isinstance(each[0], torch.Tensor)]
        if func._schema.name in ("aten::_foreach_norm", "aten::_foreach_max"):
            raise NeedsWholeTensor
        for column in zip(*lists):
            sharded = [each for each in column if isinstance(each, self._class)]
            if not _can_meet(sharded, column) or column[0] is not sharded[0]:
                raise NeedsWholeTensor
        return list(lists[0])

    def _local(self, value: Any) -> Any:
        return tree_map_only(self._class, _local_tensor, value)

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written += [each for each in tree_leaves(value) if isinstance(each, DTensor)]
        out = kwargs.get("out")
        self.written += [each for each in tree_leaves(out) if isinstance(each, DTensor)]


def operate(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtensor_class: type[DTensor],
) -> Any:
    """Call a function of torch; see [Note: operations on uneven DTensors].

    Args:
        func: the function, called below ``__torch_function__``.
        args: its arguments, with uneven DTensors among them.
        kwargs: its keyword arguments.
        dtensor_class: the class of uneven DTensors.

    Raises:
        RuntimeError: where a backward reaches the result, for writes that would be lost, and for
            functions that need the memory of the whole tensor.
    """
    if func in ON_MEMORY:
        raise RuntimeError(NO_MEMORY)
    if func not in ON_WHOLE_TENSORS:
        mode = OnLocalTensors(dtensor_class)
        try:
            with mode:
                result = func(*args, **kwargs)
        except NeedsWholeTensor:
            pass
        else:
            _report_edits(mode.written)
            return _without_gradient(result)
    return _on_whole_tensors(func, args, kwargs)


def _is_elementwise(
    func: Any, args: tuple[Any, ...], operands: list[DTensor], tensors: list[torch.Tensor]
) -> bool:
    """Return True if each element of the result depends on the same element of the operands."""
    if func in ALIASES:
        return True
    if func in RESHAPES or func in FACTORIES:
        return tuple(args[1]) == tuple(operands[0].shape)
    # Numbers that are drawn for the whole tensor are in the order of its elements.
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_pointwise = torch.Tag.pointwise in func.tags and not is_random
    return (is_pointwise or func in COPIES) and _can_meet(operands, tensors)


def _can_meet(sharded: Sequence[DTensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if DTensors are divided alike, and all other tensors are single numbers."""
    if not sharded or not all(_are_alike(sharded[0], each) for each in sharded[1:]):
        return False
    numbers = [each for each in tensors if each.ndim == 0 and not isinstance(each, DTensor)]
    return len(sharded) + len(numbers) == len(tensors)


def _are_alike(left: DTensor, right: DTensor) -> bool:
    """Return True if all ranks have the same elements of two DTensors."""
    if left is right:
        return True
    if (left.shape, left.placements) != (right.shape, right.placements):
        return False
    if left.device_mesh != right.device_mesh:
        return False
    if is_replicated(left) and left.shape:
        return True
    of_left, of_right = part_of(left), part_of(right)
    return of_left is not None and of_right is not None and of_left.key == of_right.key


def _local_tensor(dtensor: DTensor) -> torch.Tensor:
    return dtensor._local_tensor


# ---- whole tensors


def _on_whole_tensors(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    wholes: dict[int, torch.Tensor] = {}
    dtensors: dict[int, DTensor] = {}

    def whole(dtensor: DTensor) -> torch.Tensor:
        if id(dtensor) not in wholes:
            dtensors[id(dtensor)] = dtensor
            wholes[id(dtensor)] = _gather(dtensor)
        return wholes[id(dtensor)]

    with torch.inference_mode(False):  # which would not count what is written
        args, kwargs = tree_map_only(DTensor, whole, (args, kwargs))
    versions = {key: each._version for key, each in wholes.items()}
    views = [each for each in tree_leaves((args, kwargs)) if isinstance(each, GatheredView)]
    versions_of_views = [view._version for view in views]
    groups = dict.fromkeys(chain.from_iterable(map(_groups_of, dtensors.values())))
    result = call_with_equal_draws(partial(func, *args, **kwargs), [*wholes.values()], groups)
    if versions_of_views != [view._version for view in views]:
        raise RuntimeError(LOST_WRITE)
    for key, each in wholes.items():
        if each._version != versions[key]:
            _write_back(dtensors[key], each)
    own = {id(each): dtensors[key] for key, each in wholes.items()}
    gathered = [each for key, each in wholes.items() if not _has_whole(dtensors[key])]
    result = _without_gradient(result)
    if isinstance(result, torch.Tensor) and id(result) in own:
        return own[id(result)]
    return _as_views(result, gathered)


def _groups_of(dtensor: DTensor) -> list[dist.ProcessGroup]:
    part, mesh = part_of(dtensor), dtensor.device_mesh
    return [*map(mesh.get_group, range(mesh.ndim)), *(part.replicas if part is not None else ())]


def _gather(dtensor: DTensor) -> torch.Tensor:
    is_whole = _has_whole(dtensor)
    whole = dtensor._local_tensor.detach() if is_whole else full_tensor(dtensor)
    if torch.is_grad_enabled() and dtensor.requires_grad:
        whole.requires_grad_()
    return whole


def _has_whole(dtensor: DTensor) -> bool:
    # The placements of a scalar are Replicate, but only one rank may have its element.
    return is_replicated(dtensor) and bool(dtensor.shape)


@torch.no_grad()
def _write_back(dtensor: DTensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into the local tensor.

    Raises:
        RuntimeError: for another shape, and if the part is not known; on all ranks alike.
    """
    if whole.shape != dtensor.shape:
        raise RuntimeError(
            f"a sharded tensor of shape {tuple(dtensor.shape)} cannot get the shape"
            f" {tuple(whole.shape)} in place: use the operation that returns a new tensor, and"
            " parameter.copy_(value) for a value of the parameter's shape"
        )
    part = part_of(dtensor)
    if not _has_whole(dtensor):
        if part is None:
            raise RuntimeError(UNKNOWN_PART)
        local = dtensor._local_tensor
        local.copy_(part.of(whole.detach()).view(local.shape))
    _report_edits([dtensor])


def _report_edits(written: Iterable[DTensor]) -> None:
    for dtensor in written:
        part = part_of(dtensor)
        if part is not None and part.edited is not None:
            part.edited()


def _as_views(result: Any, gathered: Sequence[torch.Tensor]) -> Any:
    """Mark tensors in a result that share storage with gathered ones; NumPy arrays as well."""
    if isinstance(result, (torch.Tensor, list, tuple)):
        storages = {each.untyped_storage().data_ptr() for each in gathered} - {0}

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            has_storage = tensor.layout is torch.strided and not isinstance(tensor, DTensor)
            is_view = has_storage and tensor.untyped_storage().data_ptr() in storages
            return tensor.as_subclass(GatheredView) if is_view else tensor

        return tree_map_only(torch.Tensor, mark, result)
    if gathered and hasattr(result, "setflags"):  # a NumPy array
        result.setflags(write=False)
    return result


# ---- autograd


def _without_gradient(result: Any) -> Any:
    """Let a backward that reaches a result end in an error: its gradient would be lost."""
    if torch.is_grad_enabled() and isinstance(result, (torch.Tensor, list, tuple)):
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.register_hook(_refuse_gradient)
    return result


def _refuse_gradient(gradient: torch.Tensor) -> NoReturn:
    raise RuntimeError(NO_GRADIENT)

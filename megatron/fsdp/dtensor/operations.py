# SPDX-License-Identifier: Apache-2.0
"""Operations of torch on uneven DTensors, with the results that the whole tensors would give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.fsdp.dtensor.tensor_part import (
    divided_like,
    full_tensor,
    is_replicated,
    own_part,
    part_of,
    wrap_local,
)
from megatron.fsdp.engine.collectives import broadcast_over
from megatron.fsdp.engine.weight_guard import FunctionsOfTorch

aten = torch.ops.aten
Function = Callable[..., Any]  # of torch

# Element-wise operations that torch does not tag as pointwise.
UNTAGGED = frozenset(
    {
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.masked_fill.Tensor,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.copy_.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.zero_.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zeros_like.default,
    }
)
ALIASES = frozenset({aten.alias.default, aten.detach.default})
# Aliases if their second argument is the operand's own shape.
RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.expand.default,
    }
)
# Operations that take dtype and device from a tensor, and the shape from their arguments.
FACTORIES = frozenset(
    {
        aten.new_empty.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
    }
)
# Functions that draw a number for each element; whole tensors have the numbers in their order.
RANDOM = frozenset(
    {
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
        torch.bernoulli,
        torch.Tensor.bernoulli,
        torch.poisson,
        torch.normal,
        torch.binomial,
    }
)
# Functions that read the memory of a tensor without an operation that a mode sees.
ON_WHOLE_TENSORS = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__array__,
    }
)
# Methods that share or replace the memory of a tensor, where a DTensor has none.
ON_MEMORY: frozenset[Function] = frozenset(
    {
        torch.Tensor.__dlpack__,
        torch.Tensor.apply_,
        torch.Tensor.map_,
        torch.Tensor.map2_,
        torch.Tensor.set_,
        torch.Tensor.share_memory_,
    }
)
# Beginnings of the names of operations on lists of tensors.
LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")

NO_MEMORY = (
    "a sharded tensor has no memory that can be shared or replaced as a whole: use its"
    " full_tensor(), to_local() for the part of this rank, and parameter.copy_(value) to write"
)
NO_GRADIENT = (
    "autograd does not go through operations on a sharded parameter outside of a forward, since"
    " gradients are those of the module's own parameters. Compute the term inside the forward of"
    " the module that owns the parameter (for a decay of weights use the optimizer's weight_decay)."
    " To look at values only, use parameter.detach() or torch.no_grad()"
)
STALE_VIEW = (
    "a view of a sharded tensor was gathered from all ranks, and the tensor, or a neighbour in its"
    " unit, has been written to since: writing to the view would undo that. Take the view again, or"
    " write to the tensor itself (parameter[index] = value, parameter.copy_(value))"
)
UNKNOWN_PART = (
    "the ranks do not know which part of this DTensor each of them has, so a whole result cannot"
    " be written back: assign the result of the operation on dtensor.full_tensor()"
)


# [Note: operations on uneven DTensors] An operation first runs in a mode, on local tensors. If a
# part of it is not element-wise on operands divided alike, it is started again, on whole tensors
# (docs/decisions/operations_on_whole_tensors.md).


def operate(
    func: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtensor_class: type[DTensor],
) -> Any:
    """Call a function of torch on uneven DTensors, below ``__torch_function__``.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its arguments by name.
        dtensor_class: the class of uneven DTensors, which the results have.

    Raises:
        RuntimeError: for functions that share or replace memory, and writes that are impossible.
    """
    if func in ON_MEMORY:
        raise RuntimeError(NO_MEMORY)
    if func not in ON_WHOLE_TENSORS:
        try:
            with OnLocalTensors(dtensor_class):
                result = func(*args, **kwargs)
            return _without_gradient(result)
        except NeedsWholeTensor:
            pass
    return _on_whole_tensors(func, args, kwargs, dtensor_class)


# ---- local tensors


class NeedsWholeTensor(Exception):  # noqa: N818  # a signal, not an error
    """The operation cannot be done on local tensors; nothing has been done yet."""


class OnLocalTensors(TorchDispatchMode):
    """A mode in which element-wise operations run on local tensors, and others are refused."""

    def __init__(self, dtensor_class: type[DTensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._class = dtensor_class

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves(*args, *kwargs.values())
        if not any(isinstance(value, self._class) for value in leaves):
            return func(*args, **kwargs)
        if func in FACTORIES and tuple(args[1]) != tuple(args[0].shape):
            local_args = [self._local(value) for value in args]
            return func(*local_args, **kwargs)
        if func is aten.index_put_.default and _fills_by_mask(*args):
            func = aten.masked_fill_.Tensor
            args = (args[0], *args[1], args[2])
        is_list = func._schema.name.startswith(LISTS)
        if func._schema.is_mutable:
            args = self._own_parts_of_operands(func, args, is_list)
        leaves = _leaves(*args, *kwargs.values())
        tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
        operands = [tensor for tensor in tensors if isinstance(tensor, self._class)]
        patterns: Sequence[DTensor] = operands[:1]
        local_args = [self._local(value) for value in args]
        if is_list:
            patterns = self._check_lists(func, (*args, *kwargs.values()))
        elif func in RESHAPES or func in FACTORIES:
            if tuple(args[1]) != tuple(operands[0].shape):
                raise NeedsWholeTensor
            local_args[1] = local_args[0].shape
        elif func not in ALIASES:
            is_local = _is_pointwise(func) and _can_meet(operands, tensors)
            if not is_local:
                raise NeedsWholeTensor
        if func._schema.is_mutable:  # before, so that a gather of the weights waits or is over
            _report_writes(func, args, kwargs)
        local_kwargs = {name: self._local(value) for name, value in kwargs.items()}
        result = func(*local_args, **local_kwargs)
        shares_memory = func in ALIASES or func in RESHAPES
        operand_of = {id(operand._local_tensor): operand for operand in operands}

        def wrap(local: torch.Tensor, pattern: DTensor) -> DTensor:
            if id(local) in operand_of:
                return operand_of[id(local)]
            wrapped = divided_like(pattern, local, self._class)
            if shares_memory:
                wrapped.on_write = getattr(pattern, "on_write", None)  # type: ignore[attr-defined]
            return wrapped

        if result is None:
            return None
        if is_list:
            return [wrap(local, pattern) for local, pattern in zip(result, patterns)]
        if isinstance(result, torch.Tensor):
            return wrap(result, patterns[0])
        return tree_map_only(torch.Tensor, lambda local: wrap(local, patterns[0]), result)

    def _own_parts_of_operands(self, func: Any, args: Any, is_list: bool) -> Any:
        """Replace whole operands of an operation in place by this rank's parts."""
        written = args[0]
        if not is_list:
            if not _is_pointwise(func):
                return args
            return tuple(self._own_part(value, written) for value in args)
        result = []
        for argument, values in zip(func._schema.arguments, args):
            is_read = argument.alias_info is None
            if is_read and isinstance(values, (list, tuple)) and len(values) == len(written):
                pairs = zip(values, written)
                values = [self._own_part(value, pattern) for value, pattern in pairs]
            result.append(values)
        return tuple(result)

    def _own_part(self, value: Any, pattern: Any) -> Any:
        """Return this rank's part of ``value``, divided like ``pattern``; numbers unchanged."""
        if not isinstance(value, torch.Tensor) or not isinstance(pattern, self._class):
            return value
        if part_of(pattern) is None:
            return value
        if isinstance(value, DTensor):
            if isinstance(value, self._class) and _are_alike(pattern, value):
                return value
            value = full_tensor(value)
        elif value.ndim == 0:
            return value
        return own_part(pattern, value, self._class)

    def _check_lists(self, func: Any, arguments: Sequence[Any]) -> list[DTensor]:
        """Return the first list of tensors; those at one position of all lists must be alike."""
        if func._schema.name in ("aten::_foreach_norm", "aten::_foreach_max"):
            raise NeedsWholeTensor
        lists = []
        for values in arguments:
            if not isinstance(values, (list, tuple)) or not values:
                continue
            if isinstance(values[0], torch.Tensor):
                lists.append(values)
        for column in zip(*lists):
            sharded = [tensor for tensor in column if isinstance(tensor, self._class)]
            if not _can_meet(sharded, column):
                raise NeedsWholeTensor
            if column[0] is not sharded[0]:
                raise NeedsWholeTensor
        return list(lists[0])

    def _local(self, value: Any) -> Any:
        """Return the local tensor of a DTensor, those of a list, and any other value itself."""
        if isinstance(value, (list, tuple)):
            return [self._local(element) for element in value]
        if isinstance(value, self._class):
            return value._local_tensor
        return value


def _leaves(*arguments: Any) -> Iterator[Any]:
    """Yield arguments of an operation, and the elements of lists; a schema nests no deeper."""
    for value in arguments:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _fills_by_mask(
    target: torch.Tensor,
    indices: Sequence[Any],
    value: torch.Tensor,
    *accumulates: bool,
) -> bool:
    """Return True for ``target[mask] = number``, with the arguments of ``index_put_``."""
    if len(indices) != 1 or value.ndim or any(accumulates):
        return False
    mask = indices[0]
    if mask is None or mask.dtype != torch.bool:
        return False
    return bool(mask.shape == target.shape)


def _is_pointwise(func: Any) -> bool:
    if func in UNTAGGED:
        return True
    # Numbers that are drawn for the whole tensor are in the order of its elements.
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return torch.Tag.pointwise in func.tags and not is_random


def _can_meet(sharded: Sequence[DTensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if DTensors are divided alike, and all other tensors are single numbers."""
    if not sharded:
        return False
    num_numbers = 0
    for tensor in tensors:
        if tensor.ndim == 0 and not isinstance(tensor, DTensor):
            num_numbers += 1
    if len(sharded) + num_numbers != len(tensors):
        return False
    first, *others = sharded
    return all(_are_alike(first, other) for other in others)


def _are_alike(left: DTensor, right: DTensor) -> bool:
    """Return True if all ranks have the same elements of two DTensors."""
    if left is right:
        return True
    if left.shape != right.shape:
        return False
    if left.placements != right.placements:
        return False
    if left.device_mesh != right.device_mesh:
        return False
    if is_replicated(left) and left.shape:
        return True
    of_left = part_of(left)
    of_right = part_of(right)
    if of_left is None or of_right is None:
        return False
    key = of_left.key
    return bool(key) and key == of_right.key


def _report_writes(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Report the DTensors that an operation writes to, before it does."""
    values = [kwargs.get("out")]
    for argument, value in zip(func._schema.arguments, args):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            values.append(value)
    for dtensor in _leaves(*values):
        if isinstance(dtensor, DTensor):
            if not dtensor._local_tensor.is_inference():
                # Below autograd, where modes run, no versions are counted.
                torch.autograd.graph.increment_version(dtensor._local_tensor)
            _report_write(dtensor)


def _report_write(dtensor: DTensor) -> None:
    on_write = getattr(dtensor, "on_write", None)
    if on_write is not None:
        on_write.target()


def _version(tensor: torch.Tensor) -> int | None:
    if tensor.is_inference():
        return None
    return tensor._version


# ---- whole tensors


class Whole:
    """The whole tensor of a DTensor, for an operation and for later writes to views of it."""

    def __init__(self, dtensor: DTensor):
        self.dtensor = dtensor
        local = dtensor._local_tensor
        # Only one rank may have a scalar's element, although its placement is Replicate.
        self.is_local = is_replicated(dtensor) and bool(dtensor.shape)
        if self.is_local:
            self.tensor = local.detach()
        else:
            self.tensor = full_tensor(dtensor)
        if torch.is_grad_enabled() and dtensor.requires_grad:
            self.tensor.requires_grad_()
        self.version = _version(local)  # the one that the whole tensor is equal to

    def check_write(self) -> None:
        """Raise ``RuntimeError``, on all ranks alike, if the tensor cannot be written back."""
        dtensor = self.dtensor
        if self.tensor.shape != dtensor.shape:
            raise RuntimeError(
                f"a sharded tensor of shape {tuple(dtensor.shape)} cannot get the shape"
                f" {tuple(self.tensor.shape)} in place: use the operation that returns a new"
                " tensor, and parameter.copy_(value) for a value of the parameter's shape"
            )
        if not self.is_local and _version(dtensor._local_tensor) != self.version:
            raise RuntimeError(STALE_VIEW)
        if type(dtensor) is not DTensor and part_of(dtensor) is None:
            raise RuntimeError(UNKNOWN_PART)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part into the local tensor."""
        _report_write(self.dtensor)
        if self.is_local:
            return
        local = self.dtensor._local_tensor
        whole = self.tensor.detach()
        part = part_of(self.dtensor)
        if part is not None:
            local.copy_(part.of(whole).view(local.shape))
        else:  # torch has divided it
            mesh = self.dtensor.device_mesh
            replicated = wrap_local(
                DTensor,
                whole,
                mesh=mesh,
                placements=[Replicate()] * mesh.ndim,
                shape=whole.shape,
            )
            divided = replicated.redistribute(placements=self.dtensor.placements)
            local.copy_(divided._local_tensor)


class WholeView(FunctionsOfTorch, torch.Tensor):
    """A view of a gathered tensor; what is written to it is copied into the local tensor."""

    whole: Whole

    @classmethod
    def call(
        cls,
        func: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function of torch on whole tensors, and copy its writes into local tensors.

        Args:
            func: the function.
            args: its arguments, of which some are views of whole tensors.
            kwargs: its arguments by name.
        """
        if any(isinstance(value, DTensor) for value in tree_leaves((args, kwargs))):
            return NotImplemented  # the DTensor is gathered first
        return _call_on_wholes(func, args, kwargs, [])

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        copied = self.__deepcopy__({})
        return copied.__reduce_ex__(protocol)


def _on_whole_tensors(
    func: Function,
    args: Any,
    kwargs: Any,
    cls: type[DTensor],
) -> Any:
    wholes: dict[int, Whole] = {}

    def tensor_of(dtensor: DTensor) -> torch.Tensor:
        if id(dtensor) not in wholes:
            wholes[id(dtensor)] = Whole(dtensor)
        return wholes[id(dtensor)].tensor

    with torch.inference_mode(False):  # inference tensors have no version to count writes
        args, kwargs = tree_map_only(DTensor, tensor_of, (args, kwargs))
    result = _call_on_wholes(func, args, kwargs, list(wholes.values()))
    result = _without_gradient(result)
    if func in RANDOM and "out" not in kwargs:
        pattern = next(iter(wholes.values())).dtensor
        if isinstance(pattern, cls) and part_of(pattern) is not None:
            return own_part(pattern, result, cls)
    for whole in wholes.values():
        if result is whole.tensor:
            return whole.dtensor
    return result


def _call_on_wholes(
    func: Function,
    args: Any,
    kwargs: Any,
    wholes: Sequence[Whole],
) -> Any:
    """Call a function on plain tensors, and copy its writes into local tensors.

    Writes to whole tensors and to views of them, which are among the arguments, are copied.
    """
    tensors = [whole.tensor for whole in wholes]
    whole_of = list(wholes)  # for each tensor
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, WholeView):
            tensors.append(value)
            whole_of.append(value.whole)
    versions = [tensor._version for tensor in tensors]
    device = tensors[0].device
    state = _generator_state(device)
    result = func(*args, **kwargs)
    if not torch.equal(state, _generator_state(device)):
        changed = []
        for tensor, version in zip(tensors, versions):
            if tensor._version != version:
                changed.append(tensor)
        _make_equal((result, changed), whole_of)
    written: list[Whole] = []
    for tensor, whole, version in zip(tensors, whole_of, versions):
        if tensor._version != version and whole not in written:
            whole.check_write()
            written.append(whole)
    for whole in written:
        whole.write_back()
    for whole in written:
        whole.version = _version(whole.dtensor._local_tensor)
    return _as_views(result, whole_of)


def _as_views(result: Any, wholes: Sequence[Whole]) -> Any:
    """Mark tensors in a result that share storage with whole ones; NumPy arrays as well."""
    if isinstance(result, (torch.Tensor, list, tuple)):
        whole_at = {}  # by the address of its storage
        for whole in wholes:
            pointer = whole.tensor.untyped_storage().data_ptr()
            whole_at[pointer] = whole
        tensors = {id(whole.tensor) for whole in whole_at.values()}

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided or id(tensor) in tensors:
                return tensor
            pointer = tensor.untyped_storage().data_ptr()
            if not pointer or pointer not in whole_at:
                return tensor
            view = tensor.as_subclass(WholeView)
            view.whole = whole_at[pointer]
            return view

        return tree_map_only(torch.Tensor, mark, result)
    if hasattr(result, "setflags") and not all(whole.is_local for whole in wholes):
        result.setflags(write=False)  # a NumPy array
    return result


def _make_equal(values: Any, wholes: Iterable[Whole]) -> None:
    """Broadcast values computed with random numbers: programs seed ranks differently."""
    groups: dict[dist.ProcessGroup, None] = {}  # one after the other, they reach all ranks
    for whole in wholes:
        mesh = whole.dtensor.device_mesh
        groups.update(dict.fromkeys(mesh.get_all_groups()))
        part = part_of(whole.dtensor)
        if part is not None:
            groups.update(dict.fromkeys(part.replicas))
    for tensor in tree_leaves(values):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        if tensor.numel():
            content = tensor.detach().contiguous()
            content_bytes = content.view(-1).view(torch.uint8)
            broadcast_over(content_bytes, groups)
            tensor.detach().copy_(content)


def _generator_state(device: torch.device) -> Any:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


# ---- autograd


def _without_gradient(result: Any) -> Any:
    """Make a backward that reaches a result raise an error: its gradient would be lost."""
    if torch.is_grad_enabled() and isinstance(result, (torch.Tensor, list, tuple)):
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(_refuse_gradient)
    return result


def _refuse_gradient(gradient: torch.Tensor) -> NoReturn:
    raise RuntimeError(NO_GRADIENT)

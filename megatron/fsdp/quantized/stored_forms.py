# SPDX-License-Identifier: Apache-2.0
"""The choice of the form in which parameters are stored, and what cannot be stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import get_mcore_tensor_parallel_partition_dim
from megatron.fsdp.engine.layout import PREFER_ROWS, ROWS
from megatron.fsdp.engine.param_group import ParamGroup, StoredForm
from megatron.fsdp.engine.policy import Precision, ShardingStrategy
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.quantized.all_gather_extension import (
    ExtensionForm,
    speaks_extension,
    values_inside,
)
from megatron.fsdp.quantized.frozen_bytes import BytesForm, tensors_inside


class FormKey(NamedTuple):
    """The form of a parameter; those of which it is the same share a group."""

    form: type[StoredForm]
    alike: object  # the class, or the parameter itself if it is alone in its group
    dtype: torch.dtype  # of the values that are sharded


def form_of(parameter: nn.Parameter) -> FormKey:
    """Return the form in which a parameter is stored."""
    local = local_tensor(parameter)
    if speaks_extension(local) and values_inside(local) is not None:
        return FormKey(ExtensionForm, parameter, parameter.dtype)
    if hasattr(local, "__tensor_flatten__"):
        return FormKey(BytesForm, type(local), torch.uint8)
    return FormKey(StoredForm, None, parameter.dtype)


def make_form(
    key: FormKey,
    named: dict[str, nn.Parameter],
    module: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    precision: Precision,
    only_rows: bool,
) -> StoredForm:
    """Return the form of a group; a collective for some classes of parameters.

    Args:
        key: what :func:`form_of` returns for each of the parameters.
        named: the parameters of the group by name.
        module: a module that contains them.
        mesh: the ranks that shard them.
        device: the device of the shards.
        precision: the dtypes of the group.
        only_rows: no cut between shards falls inside a row.
    """
    if key.form is BytesForm:
        return BytesForm()
    if key.form is StoredForm:
        return StoredForm(ROWS if only_rows else PREFER_ROWS)
    ((name, parameter),) = named.items()  # the key is that of one parameter
    owners = []
    for inner in module.modules():
        for own_name, own in inner.named_parameters(recurse=False, remove_duplicate=False):
            if own is parameter:
                owners.append((inner, own_name))
    policy = MixedPrecisionPolicy(precision.compute, precision.grad_comm)
    return ExtensionForm(name, parameter, owners, mesh, device, precision.main_param, policy)


def refuse_own_memory(group: ParamGroup, index: int) -> None:
    """Raise ``NotImplementedError`` if a plain parameter has not taken its part of the buffer."""
    parameter, view = group.parameters[index], group.compute.views[index]
    is_plain = type(group.form) is StoredForm
    if is_plain and local_tensor(parameter).data_ptr() != view.data_ptr():
        raise NotImplementedError(
            f"{group.names[index]}: a {type(parameter).__name__} cannot be sharded, because it does"
            " not take the memory that is assigned to its data"
        )


Refusal = tuple[Callable[[nn.Parameter], bool], str]


def refusals(level: ShardingStrategy, shards_outer: bool, uses_slots: bool) -> Iterator[Refusal]:
    """Yield what is refused of parameters that are tensor subclasses, and why."""

    def is_extended(parameter: nn.Parameter) -> bool:
        return form_of(parameter).form is ExtensionForm

    def is_bytes(parameter: nn.Parameter) -> bool:
        return form_of(parameter).form is BytesForm

    yield (
        lambda one: speaks_extension(local_tensor(one)) and form_of(one).form is StoredForm,
        "have fsdp_pre_all_gather and no __tensor_flatten__, so no part of them can be made",
    )
    yield (
        lambda one: is_bytes(one) and one.requires_grad,
        "are tensor subclasses around other tensors, and trained: only those around one tensor of"
        " high precision with fsdp_pre_all_gather and fsdp_post_all_gather, the methods that FSDP2"
        " calls, have main weights to train; freeze them, or use plain parameters",
    )
    yield (
        lambda one: is_bytes(one) and (isinstance(one, DTensor) or _is_divided(one)),
        "are tensor subclasses around other tensors, and divided by tensor parallelism",
    )
    yield (
        lambda one: is_bytes(one) and any(type(part) is not torch.Tensor for part in _inside(one)),
        "are tensor subclasses around tensor subclasses",
    )
    if not level.shards_optimizer:
        yield is_extended, "are gathered by their class, and level 0 gathers nothing: use level 1"
    if shards_outer:
        yield is_extended, "are gathered by their class over one axis: not with Strategy.outer"
    if uses_slots:
        yield is_extended, "are gathered by their class, which knows no memory slots"


def _is_divided(parameter: nn.Parameter) -> bool:
    return get_mcore_tensor_parallel_partition_dim(parameter) is not None


def _inside(parameter: nn.Parameter) -> Sequence[torch.Tensor]:
    return tensors_inside(local_tensor(parameter))


def refuse_parameters(
    named: dict[str, nn.Parameter], level: ShardingStrategy, shards_outer: bool, uses_slots: bool
) -> None:
    """Raise ``NotImplementedError`` for parameters that cannot be stored with these settings."""
    found = []
    for is_refused, reason in refusals(level, shards_outer, uses_slots):
        names = [name for name, parameter in named.items() if is_refused(parameter)]
        if names:
            classes = {type(local_tensor(named[name])).__name__ for name in names}
            found.append(f"{', '.join(names[:5])} ({', '.join(sorted(classes))}) {reason}")
    if found:
        raise NotImplementedError("; ".join(found))

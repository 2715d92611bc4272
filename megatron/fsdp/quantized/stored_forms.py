# SPDX-License-Identifier: Apache-2.0
"""The choice of the form in which parameters are stored, and the parameters that cannot be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import get_mcore_tensor_parallel_partition_dim
from megatron.fsdp.engine.layout import PREFER_ROWS, PREFER_TENSORS, ROWS, Granularity
from megatron.fsdp.engine.mesh import Axes
from megatron.fsdp.engine.param_group import ParamGroup, StoredForm
from megatron.fsdp.engine.policy import Precision, ShardingStrategy
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.quantized.all_gather_extension import ExtensionForm
from megatron.fsdp.quantized.backward_codes import TwoSidedGroup
from megatron.fsdp.quantized.frozen_bytes import BytesForm
from megatron.fsdp.quantized.tensor_subclasses import (
    has_extension,
    has_values_inside,
    is_of_transformer_engine,
    tensors_inside,
)
from megatron.fsdp.quantized.transformer_engine_weights import (
    CODES,
    TransformerEngineForm,
    initial_values,
)


class FormKey(NamedTuple):
    """The form of a parameter; parameters with equal keys share a group."""

    form: type[StoredForm]
    alike: object  # the parameter's class, or its id if it is alone in its group
    dtype: torch.dtype  # dtype of the values that are sharded


def form_of(parameter: nn.Parameter) -> FormKey:
    """Return the form in which a parameter is stored."""
    local = local_tensor(parameter)
    if is_of_transformer_engine(local) and parameter.requires_grad:
        return FormKey(TransformerEngineForm, type(local), parameter.dtype)
    if has_extension(local) and has_values_inside(local):
        return FormKey(ExtensionForm, id(parameter), parameter.dtype)
    if tensors_inside(local):
        return FormKey(BytesForm, type(local), torch.uint8)
    return FormKey(StoredForm, None, parameter.dtype)


GRANULARITIES = {"rows": ROWS, "prefer_rows": PREFER_ROWS, "prefer_tensors": PREFER_TENSORS}


def make_form(
    key: FormKey,
    named: dict[str, nn.Parameter],
    module: nn.Module,
    axes: Axes,
    shards_outer: bool,
    device: torch.device,
    precision: Precision,
    boundaries: str | int,
    keeps_copies: bool,
) -> StoredForm:
    """Return the form of a group; a collective for some classes of parameters.

    Args:
        key: the result of :func:`form_of` for each of the parameters.
        named: the parameters of the group by name.
        module: a module that contains them.
        axes: the mesh axes of the parameters.
        shards_outer: the outer axis shards optimizer state too.
        device: the device of the shards.
        precision: the dtypes of the group.
        boundaries: where cuts between shards fall, as in :class:`Strategy`.
        keeps_copies: keep copies for the backward between forward and backward.

    Raises:
        NotImplementedError: for Transformer Engine's weights over two axes without a process group
            of both.
    """
    if key.form is BytesForm:
        return BytesForm()
    if key.form is StoredForm:
        if isinstance(boundaries, int):
            return StoredForm(Granularity("blocks", boundaries))
        return StoredForm(GRANULARITIES[boundaries])
    if key.form is TransformerEngineForm:
        group = axes.data_group if shards_outer else axes.inner.get_group()
        if group is None:
            raise NotImplementedError(
                "Transformer Engine's weights need Mesh.data_group: give the process group of all"
                " data ranks"
            )
        wanted = set(named.values())
        owners = []
        for inner in module.modules():
            if wanted.intersection(inner._parameters.values()):
                owners.append(inner)
        return TransformerEngineForm(list(named.values()), owners, group, keeps_copies)
    ((name, parameter),) = named.items()  # the key is that of one parameter
    return ExtensionForm(
        name,
        parameter,
        owners=_owners_of(parameter, module),
        mesh=axes.inner,
        device=device,
        main_dtype=precision.main_param,
        policy=MixedPrecisionPolicy(precision.compute, precision.grad_comm),
    )


def _owners_of(
    parameter: nn.Parameter,
    module: nn.Module,
) -> list[tuple[nn.Module, str]]:
    """List the modules that have a parameter, each with the parameter's name in it."""
    owners = []
    for inner in module.modules():
        for name, owned in inner.named_parameters(recurse=False, remove_duplicate=False):
            if owned is parameter:
                owners.append((inner, name))
    return owners


def group_class(form: StoredForm) -> type[ParamGroup]:
    """Return the class of a group of parameters that are stored in this form."""
    if isinstance(form, TransformerEngineForm) and form.num_sides > 1:
        return TwoSidedGroup
    return ParamGroup


def refuse_own_memory(group: ParamGroup, index: int) -> None:
    """Raise ``NotImplementedError`` if a plain parameter has not taken its part of the buffer."""
    parameter = group.parameters[index]
    view = group.compute.views[index]
    is_plain = type(group.form) is StoredForm
    if is_plain and local_tensor(parameter).data_ptr() != view.data_ptr():
        raise NotImplementedError(
            f"{group.names[index]}: a {type(parameter).__name__} cannot be sharded, because it does"
            " not take the memory that is assigned to its data"
        )


class Sharding(NamedTuple):
    """The settings on which it depends whether parameters can be stored."""

    level: ShardingStrategy
    shards_outer: bool
    uses_slots: bool
    has_tensor_axis: bool


def _problems_of(parameter: nn.Parameter, sharding: Sharding) -> Iterator[str]:
    """Yield the reasons why a parameter, maybe a tensor subclass, cannot be stored."""
    local = local_tensor(parameter)
    form = form_of(parameter).form
    if form is StoredForm and has_extension(local):
        yield "have fsdp_pre_all_gather and no __tensor_flatten__, so no part of them can be made"
    if form is BytesForm:
        if parameter.requires_grad:
            yield (
                "are tensor subclasses around other tensors, and trained: only those around one"
                " tensor of high precision with fsdp_pre_all_gather and fsdp_post_all_gather, the"
                " methods that FSDP2 calls, have main weights to train; freeze them, or use plain"
                " parameters"
            )
        inside = tensors_inside(local).values()
        if any(type(tensor) is not torch.Tensor for tensor in inside):
            yield "are tensor subclasses around tensor subclasses"
    if sharding.has_tensor_axis and form is not StoredForm:
        is_divided = get_mcore_tensor_parallel_partition_dim(parameter) is not None
        if isinstance(parameter, DTensor) or (form is BytesForm and is_divided):
            yield "are tensor subclasses around other tensors, and divided by tensor parallelism"
    if form is TransformerEngineForm:
        if type(parameter).__name__ not in CODES:
            yield (
                "of Transformer Engine cannot be sharded yet: use another recipe"
                f" ({', '.join(CODES)} can), or build the model without quantized_model_init"
            )
        if initial_values(parameter) is None:
            yield (
                "of Transformer Engine have no values before quantization: build the model in"
                " quantized_model_init(..., preserve_high_precision_init_val=True)"
            )
    is_extended = form is ExtensionForm
    if not sharding.level.shards_optimizer and (is_extended or form is TransformerEngineForm):
        yield "are made of the shards of main weights: use level 1, 2 or 3"
    if sharding.uses_slots and is_extended:
        yield "keep gathered tensors at one address, which memory slots change"
    if sharding.shards_outer and is_extended:
        yield "are gathered by their class over one axis: not with Strategy.outer"


def refuse_parameters(named: dict[str, nn.Parameter], sharding: Sharding) -> None:
    """Raise ``NotImplementedError`` for parameters that cannot be stored with these settings."""
    names_of: dict[str, list[str]] = defaultdict(list)  # names by reason
    for name, parameter in named.items():
        for reason in _problems_of(parameter, sharding):
            names_of[reason].append(name)
    found = []
    for reason, names in names_of.items():
        classes = {type(local_tensor(named[name])).__name__ for name in names}
        found.append(f"{', '.join(names[:5])} ({', '.join(sorted(classes))}) {reason}")
    if found:
        raise NotImplementedError("; ".join(found))

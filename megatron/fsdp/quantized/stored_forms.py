# SPDX-License-Identifier: Apache-2.0
"""The choice of the form in which parameters are stored, and what cannot be stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    has_values_inside,
    is_of_transformer_engine,
    speaks_extension,
    tensors_inside,
)
from megatron.fsdp.quantized.transformer_engine_weights import (
    CODES,
    TransformerEngineForm,
    initial_values,
)


class FormKey(NamedTuple):
    """The form of a parameter; those of which it is the same share a group."""

    form: type[StoredForm]
    alike: object  # the class, or a number of its own if it is alone in its group
    dtype: torch.dtype  # of the values that are sharded


def form_of(parameter: nn.Parameter) -> FormKey:
    """Return the form in which a parameter is stored."""
    local = local_tensor(parameter)
    if is_of_transformer_engine(local) and parameter.requires_grad:
        return FormKey(TransformerEngineForm, type(local), parameter.dtype)
    if speaks_extension(local) and has_values_inside(local):
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
        key: what :func:`form_of` returns for each of the parameters.
        named: the parameters of the group by name.
        module: a module that contains them.
        axes: the mesh axes of the parameters.
        shards_outer: the outer axis shards optimizer state too.
        device: the device of the shards.
        precision: the dtypes of the group.
        boundaries: where cuts between shards fall, as in :class:`Strategy`.
        keeps_copies: keep copies for the backward between forward and backward.
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
            raise NotImplementedError("Transformer Engine's weights need Mesh.data_group")
        wanted = set(named.values())
        owners = [one for one in module.modules() if wanted.intersection(one._parameters.values())]
        return TransformerEngineForm(list(named.values()), owners, group, keeps_copies)
    ((name, parameter),) = named.items()  # the key is that of one parameter
    places = []
    for inner in module.modules():
        for own_name, own in inner.named_parameters(recurse=False, remove_duplicate=False):
            if own is parameter:
                places.append((inner, own_name))
    policy = MixedPrecisionPolicy(precision.compute, precision.grad_comm)
    return ExtensionForm(name, parameter, places, axes.inner, device, precision.main_param, policy)


def group_class(form: StoredForm) -> type[ParamGroup]:
    """Return the class of a group of parameters that are stored in this form."""
    is_two_sided = isinstance(form, TransformerEngineForm) and form.num_sides > 1
    return TwoSidedGroup if is_two_sided else ParamGroup


def refuse_own_memory(group: ParamGroup, index: int) -> None:
    """Raise ``NotImplementedError`` if a plain parameter has not taken its part of the buffer."""
    parameter, view = group.parameters[index], group.compute.views[index]
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


Refusal = tuple[Callable[[nn.Parameter], bool], str]


def refusals(sharding: Sharding) -> Iterator[Refusal]:
    """Yield what is refused of parameters that are tensor subclasses, and why."""

    def is_of(*forms: type[StoredForm]) -> Callable[[nn.Parameter], bool]:
        return lambda one: form_of(one).form in forms

    is_plain, is_extended, is_bytes = is_of(StoredForm), is_of(ExtensionForm), is_of(BytesForm)
    is_engines = is_of(TransformerEngineForm)
    needs_shards = is_of(ExtensionForm, TransformerEngineForm)
    yield (
        lambda one: is_plain(one) and speaks_extension(local_tensor(one)),
        "have fsdp_pre_all_gather and no __tensor_flatten__, so no part of them can be made",
    )
    yield (
        lambda one: is_bytes(one) and one.requires_grad,
        "are tensor subclasses around other tensors, and trained: only those around one tensor of"
        " high precision with fsdp_pre_all_gather and fsdp_post_all_gather, the methods that FSDP2"
        " calls, have main weights to train; freeze them, or use plain parameters",
    )
    yield (
        lambda one: is_bytes(one) and has_subclasses_inside(one),
        "are tensor subclasses around tensor subclasses",
    )
    if sharding.has_tensor_axis:
        yield (
            lambda one: (
                (is_bytes(one) and get_mcore_tensor_parallel_partition_dim(one) is not None)
                or (isinstance(one, DTensor) and not is_plain(one))
            ),
            "are tensor subclasses around other tensors, and divided by tensor parallelism",
        )
    yield (
        lambda one: is_engines(one) and type(one).__name__ not in CODES,
        "of Transformer Engine cannot be sharded yet: use another recipe"
        f" ({', '.join(CODES)} can), or build the model without quantized_model_init",
    )
    yield (
        lambda one: is_engines(one) and initial_values(one) is None,
        "of Transformer Engine have no values before quantization: build the model in"
        " quantized_model_init(..., preserve_high_precision_init_val=True)",
    )
    if not sharding.level.shards_optimizer:
        yield needs_shards, "are made of the shards of main weights: use level 1, 2 or 3"
    if sharding.uses_slots:
        yield is_extended, "keep what is gathered at one place, which memory slots change"
    if sharding.shards_outer:
        yield is_extended, "are gathered by their class over one axis: not with Strategy.outer"


def has_subclasses_inside(parameter: nn.Parameter) -> bool:
    """Return True if a tensor inside of a subclass is one too."""
    inside = tensors_inside(local_tensor(parameter)).values()
    return any(type(tensor) is not torch.Tensor for tensor in inside)


def refuse_parameters(named: dict[str, nn.Parameter], sharding: Sharding) -> None:
    """Raise ``NotImplementedError`` for parameters that cannot be stored with these settings."""
    found = []
    for is_refused, reason in refusals(sharding):
        names = [name for name, parameter in named.items() if is_refused(parameter)]
        if names:
            classes = {type(local_tensor(named[name])).__name__ for name in names}
            found.append(f"{', '.join(names[:5])} ({', '.join(sorted(classes))}) {reason}")
    if found:
        raise NotImplementedError("; ".join(found))

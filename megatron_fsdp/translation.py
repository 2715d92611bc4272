# SPDX-License-Identifier: Apache-2.0
"""The translation of published keywords and fields into the settings of ``megatron.fsdp``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

from megatron.fsdp.config.memory import Memory
from megatron.fsdp.config.meta_initialisation import MetaInitialisation
from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import Gradients, Settings, Strategy, parse_precision
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, Overlap
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig

DEFAULT_PRECISION = MixedPrecisionPolicy()
"""The default policy. If the user passes no other, the older keywords may replace it."""

KEYWORDS: dict[type, dict[str, str]] = {
    Mesh: {
        "device_mesh": "device_mesh",
        "inner": "dp_shard_dim",
        "outer": "dp_outer_dim",
        "tensor": "tp_dim",
        "data_group": "hybrid_fsdp_group",
        "gather_group": "fsdp_group_ag",
        "expert_mesh": "expt_device_mesh",
        "expert_data_group": "hybrid_fsdp_expt_group",
        "expert_gather_group": "expt_fsdp_group_ag",
    },
    Strategy: {
        "level": "zero_dp_strategy",
        "outer": "outer_dp_sharding_strategy",
        "expert_level": "expert_zero_dp_strategy",
        "expert_outer": "expert_outer_dp_sharding_strategy",
        "embedding_level": "embedding_zero_dp_strategy",
        "boundaries": "granularity",
        "one_unit": "disable_bucketing",
        "fine_grained": "enable_fine_grained_param_gather",
        "ignored": "ignored_params",
    },
    Gradients: {
        "sum_only": "calculate_per_token_loss",
        "average_in_collective": "average_in_collective",
        "sync_each_microbatch": "sync_model_each_microbatch",
        "report_nonfinite": "report_nan_in_param_grad",
        "are_decoupled": "use_decoupled_grad",
        "find_unused": "find_unused_parameters",
    },
    Overlap: {
        "grad_reduce": "overlap_grad_reduce",
        "param_gather": "overlap_param_gather",
        "prefetch_bytes": "suggested_communication_unit_size",
    },
    Memory: {
        "device": "device",
        "uses_slots": "fsdp_double_buffer",
        "equal_sizes": "maxpool_double_buffer",
        "allows_own_storage": "fsdp_db_use_persist_buf_on_alloc_fail",
        "holds_addresses": "cuda_graph_mode",
        "registers": "nccl_ub",
        "registers_locally": "disable_symmetric_registration",
        "registers_manually": "fsdp_manual_registration",
        "keeps_copies": "keep_fp8_transpose_cache",
        "offload": "offload_policy",
    },
    MetaInitialisation: {"function": "param_init_fn"},
    Settings: {
        "units": "fsdp_unit_modules",
        "precision": "mixed_precision_policy",
        "initialisation": "init_model_with_meta_device",
    },
}
"""The keyword of each setting."""

ALL_KEYWORDS = set[str]().union(*[names.values() for names in KEYWORDS.values()])

FIELDS = {
    "zero_dp_strategy": "data_parallel_sharding_strategy",
    "expert_zero_dp_strategy": "expert_data_parallel_sharding_strategy",
    "embedding_zero_dp_strategy": "embedding_data_parallel_sharding_strategy",
    "report_nan_in_param_grad": "check_for_nan_in_grad",
    "use_decoupled_grad": "megatron_fsdp_use_decoupled_grad",
    "cuda_graph_mode": "megatron_fsdp_cuda_graph_mode",
    "enable_fine_grained_param_gather": "megatron_fsdp_enable_fine_grained_param_gather",
    "maxpool_double_buffer": "megatron_fsdp_max_pool_double_buffer",
    "offload_policy": "megatron_fsdp_offload_policy",
    "granularity": "megatron_fsdp_granularity",
}
"""The fields of ``DistributedDataParallelConfig`` that have another name than their keywords."""


def settings_of(
    keywords: Mapping[str, Any],
    mesh: Mesh | None,
    problems: Problems,
) -> Settings:
    """Return the settings for keywords of ``fully_shard_model``.

    Args:
        keywords: the keywords; those that are left out have the defaults of the settings.
        mesh: the mesh; None if it cannot be made.
        problems: problems of keywords are added to it; their settings have defaults in the result.
    """
    made: dict[type, Any] = {}
    for setting, names in KEYWORDS.items():
        if setting not in (Mesh, Settings):
            values = {field: keywords[name] for field, name in names.items() if name in keywords}
            made[setting] = problems.check(partial(setting, **values)) or setting()
    precision = problems.check(
        precision_policy,
        keywords["mixed_precision_policy"],
        keywords.get("grad_reduce_in_fp32"),
        keywords.get("preserve_fp32_weights"),
    )
    for name, value in keywords.items():
        is_checked = name not in ALL_KEYWORDS or name == "init_model_with_meta_device"
        if is_checked and value not in (True, False, None):
            problems.add(f"{name} expects True or False but got {value!r}")
    initialisation = None
    if keywords["init_model_with_meta_device"]:
        initialisation = made[MetaInitialisation]
    return Settings(
        mesh=mesh,
        units=keywords["fsdp_unit_modules"],
        strategy=made[Strategy],
        precision=precision or DEFAULT_PRECISION,
        gradients=made[Gradients],
        overlap=made[Overlap],
        memory=made[Memory],
        initialisation=initialisation,
    )


def precision_policy(
    policy: MixedPrecisionPolicy | TorchPrecision | None,
    grad_reduce_in_fp32: bool | None,
    preserve_fp32_weights: bool | None,
) -> MixedPrecisionPolicy:
    """Return the policy given by ``mixed_precision_policy`` or by the older keywords.

    Args:
        policy: ``mixed_precision_policy``. None or :data:`DEFAULT_PRECISION`: not given.
        grad_reduce_in_fp32: the older keyword; None: not given.
        preserve_fp32_weights: the older keyword; None: not given.

    Raises:
        ValueError: if both are given and contradict each other.
    """
    main_params_dtype: torch.dtype | None = torch.float32
    if preserve_fp32_weights is not None and not preserve_fp32_weights:
        main_params_dtype = None
    grads_dtype = torch.float32 if grad_reduce_in_fp32 else None
    old = MixedPrecisionPolicy(main_params_dtype, grads_dtype, grads_dtype)
    if policy is None or policy is DEFAULT_PRECISION:
        return old
    policy_given = parse_precision(policy)
    if isinstance(policy, TorchPrecision):
        if grad_reduce_in_fp32 is not None or preserve_fp32_weights is not None:
            raise ValueError(
                "grad_reduce_in_fp32 and preserve_fp32_weights contradict a mixed_precision_policy"
                " of torch, which determines both dtypes: leave them out"
            )
        return policy_given
    if (
        preserve_fp32_weights is not None
        and policy_given.main_params_dtype != old.main_params_dtype
    ):
        raise ValueError(
            f"preserve_fp32_weights={preserve_fp32_weights} contradicts"
            f" mixed_precision_policy.main_params_dtype={policy_given.main_params_dtype}: give one"
            " of them"
        )
    grad_comm_dtype = policy_given.grad_comm_dtype or policy_given.main_grads_dtype
    in_fp32 = policy_given.main_grads_dtype == torch.float32 and grad_comm_dtype == torch.float32
    if grad_reduce_in_fp32 is not None and grad_reduce_in_fp32 != in_fp32:
        raise ValueError(
            f"grad_reduce_in_fp32={grad_reduce_in_fp32} contradicts"
            f" mixed_precision_policy.main_grads_dtype={policy_given.main_grads_dtype} and"
            f" grad_comm_dtype={policy_given.grad_comm_dtype}: give one of them"
        )
    return policy_given


# ---- configuration objects


def keywords_of(config: object) -> dict[str, Any]:
    """Return the keywords for the fields of a configuration object, of this package or another.

    Fields that it lacks, and flags that are None there, have the defaults of this package.
    """
    keyword_of = {field: keyword for keyword, field in FIELDS.items()}
    keywords = {}
    for field in fields(DistributedDataParallelConfig):
        keyword = keyword_of.get(field.name, field.name)
        if keyword in ALL_KEYWORDS:
            value = getattr(config, field.name, None)
            if value is None:
                value = field.default
            keywords[keyword] = value
    return keywords


def strategy_of(config: object) -> Strategy:
    """Return the strategy of a configuration object, of this package or another."""
    keywords = keywords_of(config)
    values = {}
    for field, name in KEYWORDS[Strategy].items():
        if name in keywords:
            values[field] = keywords[name]
    with published_names(FIELDS):
        return Strategy(**values)


def config_of(keywords: Mapping[str, Any], settings: Settings) -> DistributedDataParallelConfig:
    """Return the configuration object with the keywords that it has fields for."""
    names = {field.name for field in fields(DistributedDataParallelConfig)}
    values = {}
    for keyword in ALL_KEYWORDS:
        name = FIELDS.get(keyword, keyword)
        if name in names:
            values[name] = keywords[keyword]
    precision = settings.precision
    return DistributedDataParallelConfig(
        **values,
        megatron_fsdp_main_params_dtype=precision.main_params_dtype,
        megatron_fsdp_main_grads_dtype=precision.main_grads_dtype,
        megatron_fsdp_grad_comm_dtype=precision.grad_comm_dtype,
    )


def precision_of(config: object) -> MixedPrecisionPolicy:
    """Return the precision policy of a configuration object of either package."""
    return MixedPrecisionPolicy(
        getattr(config, "megatron_fsdp_main_params_dtype", torch.float32),
        getattr(config, "megatron_fsdp_main_grads_dtype", None),
        getattr(config, "megatron_fsdp_grad_comm_dtype", None),
    )


def refuse_unbuilt(**arguments: object) -> None:
    """Raise ``NotImplementedError`` naming every argument that requests an unbuilt feature."""
    given = [f"{name}={value!r}" for name, value in arguments.items() if value]
    if given:
        raise NotImplementedError(
            f"not built yet: {', '.join(given)}; leave them at their defaults"
        )


# ---- messages


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a message with names replaced, where they are whole words."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}(?!\w)", names[name], text)
    return text


_PUBLISHED = {"Settings.initialisation=MetaInitialisation()": "init_model_with_meta_device=True"}
for _setting, _names in KEYWORDS.items():
    _PUBLISHED |= {f"{_setting.__name__}.{field}": keyword for field, keyword in _names.items()}


@contextmanager
def published_names(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Replace the names of settings by those of keywords in errors that are raised inside.

    Args:
        more: further replacements, by the names that are replaced, in the result of the others.
    """
    try:
        yield
    except (ValueError, NotImplementedError, RuntimeError) as error:
        args = []
        for argument in error.args:
            if isinstance(argument, str):
                argument = renamed(renamed(argument, _PUBLISHED), more or {})
            args.append(argument)
        error.args = tuple(args)  # its class may have a constructor of its own
        raise

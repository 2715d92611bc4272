# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's process groups, as the arguments of a run ask for them."""

from __future__ import annotations

import argparse

import torch

from megatron.mcore_adapter.releases import process_groups

GROUP_SETTINGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_tensor_parallel_size",
    "create_all_gather_group",
    "num_distributed_optimizer_instances",
    "distributed_timeout_minutes",
    "use_sharp",
    "sharp_enabled_group",
    "nccl_communicator_config_path",
    "high_priority_stream_groups",
)
"""Arguments of a run that are arguments of Megatron-Core's function too."""


def backend_for(args: argparse.Namespace, device: torch.device) -> str:
    """Return the backend of process groups, with one for host memory where shards lie there."""
    # Megatron-Core makes its groups with the backends of the whole world.
    if device.type == "cuda" and args.distributed_backend == "nccl" and args.optimizer_cpu_offload:
        return "cpu:gloo,cuda:nccl"
    return str(args.distributed_backend)


def initialize_model_parallel(args: argparse.Namespace) -> None:
    """Create Megatron-Core's process groups, for every axis of parallelism."""
    process_groups.initialize_model_parallel(
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.enable_gloo_process_groups,
        **{name: getattr(args, name) for name in GROUP_SETTINGS},
    )

# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run and the schedule of its learning rate and weight decay."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.optimizer import (
    MegatronOptimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megatron.mcore_adapter.core_optimizers import (
    build_muon,
    make_optimizer_state,
    use_new_names,
)
from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.pretrain.arguments.configs import optimizer_config


def build_optimizer(
    args: argparse.Namespace, model: list[MegatronModule]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build Megatron-Core's optimizer over the model chunks, and the schedule of its rates."""
    config = optimizer_config(args)
    settings: dict[str, Any] = {
        "config_overrides": get_standard_config_overrides(config),
        "use_gloo_process_groups": args.enable_gloo_process_groups,
    }
    if args.optimizer not in MUON:
        settings["dump_param_to_param_group_map"] = args.dump_param_to_param_group_map
        optimizer = get_megatron_optimizer(config, model, **settings)
    elif args.use_megatron_fsdp:
        optimizer = build_muon(config, model, **settings)
    else:
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        use_new_names()
        optimizer = get_megatron_muon_optimizer(config, model, **settings)
    make_optimizer_state(optimizer)
    return optimizer, build_scheduler(args, optimizer)


def build_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Build the schedule of learning rate and weight decay, which counts in samples."""
    counts_samples = args.train_samples is not None

    def in_samples(name: str) -> int | None:
        if counts_samples:
            return getattr(args, f"{name}_samples")
        iterations = getattr(args, f"{name}_iters")
        return None if iterations is None else iterations * args.global_batch_size

    decay_steps = in_samples("lr_decay")
    if args.lr_warmup_fraction is None:
        warmup_steps = in_samples("lr_warmup")
    else:
        assert decay_steps is not None  # completed with the arguments
        warmup_steps = int(args.lr_warmup_fraction * decay_steps)
    if counts_samples:
        num_samples = args.train_samples
    else:
        num_samples = args.train_iters * args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=num_samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=in_samples("lr_wsd_decay"),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )

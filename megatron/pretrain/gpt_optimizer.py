# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run and the schedule of its learning rate and weight decay."""

from __future__ import annotations

import argparse

from megatron.core.optimizer import (
    MegatronOptimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint import save

from megatron.mcore_adapter.optimizer_state import make_optimizer_state
from megatron.pretrain.arguments.configs import optimizer_config


def build_optimizer(
    args: argparse.Namespace, model: list[MegatronModule]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Megatron-Core's optimizer over the chunks of ``model``, and the scheduler that sets its rates."""
    config = optimizer_config(args)
    optimizer = get_megatron_optimizer(
        config,
        model,
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=args.enable_gloo_process_groups,
        dump_param_to_param_group_map=args.dump_param_to_param_group_map,
    )
    if args.use_megatron_fsdp and args.dump_param_to_param_group_map:
        write_group_numbers(optimizer, model, args.dump_param_to_param_group_map)
    make_optimizer_state(optimizer)
    return optimizer, build_scheduler(args, optimizer)


def write_group_numbers(
    optimizer: MegatronOptimizer, model: list[MegatronModule], directory: str
) -> None:
    """A checkpoint in ``directory`` that has the number of its param group for every parameter; a collective.

    Megatron-Core writes it in runs without --use-megatron-fsdp only. There experts have an
    optimizer, and so numbers, after all others, and names have one ``module.`` less.
    """
    number_of: dict[str, int] = {}
    experts_last = sorted(optimizer.param_groups, key=lambda group: group["is_expert_parallel"])
    for chunk in model:
        name_of = {parameter: name for name, parameter in chunk.named_parameters()}
        for number, group in enumerate(experts_last):
            members = [name_of[parameter] for parameter in group["params"] if parameter in name_of]
            number_of.update({name.removeprefix("module."): number for name in members})
    save(number_of, checkpoint_id=directory)


def build_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """The schedule, which counts in samples."""
    samples = args.train_samples is not None

    def count(name: str) -> int | None:
        value = getattr(args, f"{name}_{'samples' if samples else 'iters'}")
        return value if samples or value is None else value * args.global_batch_size

    decay_steps = count("lr_decay")
    if args.lr_warmup_fraction is None:
        warmup_steps = count("lr_warmup")
    else:
        warmup_steps = int(args.lr_warmup_fraction * decay_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_samples if samples else args.train_iters * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=count("lr_wsd_decay"),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )

# SPDX-License-Identifier: Apache-2.0
"""Rules of the schedules of learning rate and weight decay."""

from megatron.pretrain.arguments.check import Check


def complete_schedule(check: Check) -> None:
    """Complete the schedules of learning rate and weight decay."""
    args = check.args
    check.require(args.lr is not None or args.skip_train, "required but not given: --lr")
    if args.lr is not None:
        check.require(
            args.min_lr <= args.lr, f"--min-lr {args.min_lr} must be at most --lr {args.lr}"
        )
    if args.decoupled_min_lr is not None:
        check.require(args.decoupled_lr is not None, "--decoupled-min-lr needs --decoupled-lr")
    unit, other, length = (
        ("samples", "iters", args.train_samples)
        if args.train_samples
        else ("iters", "samples", args.train_iters)
    )
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if check.changed(f"{name}_{other}"):
            check.problems.append(
                f"{check.flag(f'{name}_{other}')} does not go with --train-{unit}: use"
                f" {check.flag(f'{name}_{unit}')}"
            )
    if getattr(args, f"lr_decay_{unit}") is None and length:
        setattr(args, f"lr_decay_{unit}", length)
    check_warmup(check, unit)
    check.require(
        args.lr_decay_style != "WSD" or getattr(args, f"lr_wsd_decay_{unit}"),
        f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}",
    )
    check.at_most_one("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")
    complete_weight_decay(check)


def check_warmup(check: Check, unit: str) -> None:
    """Check that the warm-up is given once and ends before the decay does."""
    args = check.args
    count, length = getattr(args, f"lr_warmup_{unit}"), getattr(args, f"lr_decay_{unit}")
    if args.lr_warmup_fraction is not None:
        check.require(
            0 <= args.lr_warmup_fraction < 1,
            f"--lr-warmup-fraction must be in [0, 1), got {args.lr_warmup_fraction}",
        )
        check.require(
            count == 0,
            f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other: give one of them",
        )
    elif length:
        check.require(
            count < length,
            f"--lr-warmup-{unit} {count} must be less than the decay length {length}",
        )
    if args.lr is not None:
        check.require(
            args.lr_warmup_init <= args.lr,
            f"--lr-warmup-init {args.lr_warmup_init} must be at most --lr {args.lr}",
        )


def complete_weight_decay(check: Check) -> None:
    """Complete start and end of weight decay."""
    args = check.args
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        check.require(
            start is None and end is None,
            "--start/--end-weight-decay need --weight-decay-incr-style linear or cosine",
        )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif start is None or end is None:
        check.problems.append(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay"
            " and --end-weight-decay"
        )
    else:
        check.require(
            0 <= start <= end,
            f"weight decay must grow: --start-weight-decay {start}, --end-weight-decay {end}",
        )
        check.require(
            not check.changed("weight_decay"),
            "--weight-decay does nothing with --start/--end-weight-decay: leave it out",
        )

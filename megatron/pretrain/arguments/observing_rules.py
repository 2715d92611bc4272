# SPDX-License-Identifier: Apache-2.0
"""Rules about what a run needs of its machine to be observed."""

import importlib.util
import os
from pathlib import Path

from megatron.checkpoint.store.stores import is_staged
from megatron.pretrain.arguments.check import Check

WITHOUT_CUDA = {
    "record_memory_history": "needs CUDA: the recorder is that of its allocator; give --profile",
}
"""Destination -> the reason why it is refused on a CPU."""
PACKAGES = {"wandb_project": "wandb"}
"""Destination -> the optional package that it needs."""


def check_observing(check: Check) -> None:
    """Refuse what this machine cannot observe, with the reason."""
    missing_devices = [] if check.machine.cuda else list(WITHOUT_CUDA)
    for dest in missing_devices:
        check.require(not getattr(check.args, dest), f"{check.flag(dest)} {WITHOUT_CUDA[dest]}")
    for dest, package in PACKAGES.items():
        check.require(
            not getattr(check.args, dest)
            or dest in missing_devices
            or importlib.util.find_spec(package) is not None,
            f"{check.flag(dest)} needs the package {package}: pip install {package}",
        )
    check.require(
        not (check.args.wandb_project and is_staged(check.args.save or ""))
        or check.args.wandb_save_dir,
        "--wandb-project with a URL for --save: its files are local, and would go with the staged"
        " ones; give --wandb-save-dir",
    )
    check.require(
        check.args.device_peak_tflops is None or check.args.device_peak_tflops > 0,
        f"--device-peak-tflops must be above 0, got {check.args.device_peak_tflops}",
    )
    check_rerun(check)
    check_replicas_to_compare(check)
    note_untimed(check)


def check_rerun(check: Check) -> None:
    """Check what the rerun machine writes."""
    args = check.args
    if args.rerun_mode != "validate_results":
        return
    if not args.save:
        check.notes.append(
            "--rerun-mode validate_results without --save: a run that ends to repeat a step"
            " elsewhere leaves no checkpoint to resume from; give --save"
        )
    if args.result_rejected_tracker_filename:
        folder = Path(args.result_rejected_tracker_filename).absolute().parent
        check.require(
            folder.is_dir() and os.access(folder, os.W_OK),
            f"--result-rejected-tracker-filename: {folder} is no directory that can be written",
        )


def check_replicas_to_compare(check: Check) -> None:
    """Refuse to compare replicas where every weight is on one rank only."""
    args = check.args
    is_sharded = (
        args.use_megatron_fsdp and args.data_parallel_sharding_strategy == "optim_grads_params"
    )
    check.require(
        not (args.check_weight_hash_across_dp_replicas_interval and is_sharded),
        "--check-weight-hash-across-dp-replicas-interval needs replicas, which"
        " --data-parallel-sharding-strategy optim_grads_params does not have",
    )


def note_untimed(check: Check) -> None:
    """Say which flags of timers change nothing without timers."""
    for dest in ("timing_log_option", "barrier_with_L1_time", "log_timers_to_tensorboard"):
        if check.changed(dest) and not check.args.timing_log_level:
            check.notes.append(
                f"{check.flag(dest)}: no effect with --timing-log-level 0, give 1 or 2"
            )

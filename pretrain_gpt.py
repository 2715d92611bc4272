# SPDX-License-Identifier: Apache-2.0
r"""Pretrain a GPT model with Megatron-Core, fully sharded with --use-megatron-fsdp.

    torchrun --nproc_per_node 2 pretrain_gpt.py --use-megatron-fsdp --num-layers 4 \
        --hidden-size 192 --num-attention-heads 6 --seq-length 256 --micro-batch-size 4 \
        --train-iters 200 --lr 2e-3

The same command runs on CPUs over gloo and on GPUs over NCCL. Flags have Megatron-LM's names and
defaults; --help lists the most needed, --help-all all. Without --data-path the data is the text of
Python's standard library.
"""

import argparse
import os
import signal
import sys
import time
from functools import partial

if __name__ == "__main__":
    # Until main() watches signals, Ctrl-C ends the process without a traceback of the imports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The imports take seconds. Without a run there is no need to wait for anything.
    without_run = {"-h", "--help", "--help-all", "--dry-run"}
    if os.environ.get("RANK", "0") == "0" and not without_run.intersection(sys.argv):
        try:
            print("pretrain_gpt.py: loading torch and Megatron-Core", flush=True)
        except OSError as error:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), 1
            )  # the end of the process prints what is left
            print(f"pretrain_gpt.py: error: standard output: {error}", file=sys.stderr)
            sys.exit(1)

import torch

from megatron.mcore_adapter.releases import tested
from megatron.mcore_adapter.run.logging_setup import set_up_logging

set_up_logging()
tested.check_or_exit()
if not torch.cuda.is_available():
    # Megatron-Core compiles small functions. On a CPU each costs ten seconds and a C++ compiler,
    # and none is worth it.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from megatron.core.fp8_utils import HAVE_TE  # noqa: E402

from megatron.fsdp.module.gradient_sync import GradientError  # noqa: E402
from megatron.mcore_adapter.run import environment  # noqa: E402
from megatron.mcore_adapter.run.errors import RunError  # noqa: E402
from megatron.mcore_adapter.watch.watch import Watch  # noqa: E402
from megatron.pretrain import megatron_lm_loop, ranks  # noqa: E402
from megatron.pretrain.arguments import (  # noqa: E402
    CommandLineError,
    dry_run_ranks,
    parse_arguments,
)
from megatron.pretrain.data.gpt_datasets import BuildDatasets, build_datasets  # noqa: E402
from megatron.pretrain.dry_run import print_dry_run  # noqa: E402
from megatron.pretrain.loop import pretrain  # noqa: E402
from megatron.pretrain.trial import check_model  # noqa: E402

GRACE_SECONDS = 5
"""Time that the first rank has to report an error before the others do."""


def main(build: BuildDatasets = build_datasets) -> int:
    """Run the program with the arguments of the process, and return its exit code.

    Other programs pass a function that makes other samples of the data than documents in a row:
    see examples/finetune/sft_packed.py.
    """
    if megatron_lm_loop.chosen_loop(sys.argv[1:]) == megatron_lm_loop.MEGATRON_LM:
        return megatron_lm_loop.main(sys.argv[1:], build)
    parse = partial(
        parse_arguments,
        world_size=dry_run_ranks(sys.argv[1:]) or environment.environment_world_size(),
        cuda=torch.cuda.is_available(),
        transformer_engine=HAVE_TE,
    )
    try:
        args, notes = parse(sys.argv[1:])
        set_up_logging(args.logging_level)
        check_model(args, sys.argv[1:], parse)
        for note in notes:
            environment.log(note)
    except CommandLineError as error:
        complain(str(error))
        return 2
    except OSError as error:  # a file that a flag names, a line that cannot be printed
        complain(f"error: {error}")
        return 2
    if args.dry_run:
        return dry_run(args)
    with Watch(args) as watch:
        try:
            device = ranks.start(args)
            watch.connect()
            pretrain(args, device, watch.follow, build)
        except KeyboardInterrupt:
            return watch.interrupted()
        except (ValueError, NotImplementedError, OSError, RunError, GradientError) as error:
            complain(f"error: {error}", watch)
            return 1
        except Exception as error:
            watch.failed(error)
            raise
    ranks.stop()
    return 0


def dry_run(args: argparse.Namespace) -> int:
    """Print what follows from the arguments, and return the exit code."""
    try:
        print_dry_run(args, environment.log)
    except (ValueError, NotImplementedError, OSError, RunError) as error:
        complain(f"error: {error}")
        return 1
    return 0


def complain(message: str, watch: Watch | None = None) -> None:
    """Print an error, once if several ranks have one.

    Before ranks know of each other the first prints at once, and torchrun then ends the others
    before they do.
    """
    if watch is not None and watch.report(message):
        return
    if environment.environment_rank() != 0:
        time.sleep(GRACE_SECONDS)
    environment.complain(message)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Flags that choose what this program does anyway: accepted, and said so in one line."""

from megatron.pretrain.arguments.check import Check

IS_THE_DEFAULT = "is the default"
DEPRECATED_DEFAULT = "deprecated, is the default"
ONE_LOGGER = "names a logger that is not public; nothing is sent"
DECIDED_BY_CORE = "deprecated, Megatron-Core decides it"

SAME_HERE: dict[str, str] = {
    "deprecated_use_mcore_models": DEPRECATED_DEFAULT,
    "ckpt_fully_parallel_save_deprecated": DEPRECATED_DEFAULT,
    "log_batch_size_to_tensorboard": DEPRECATED_DEFAULT,
    "log_learning_rate_to_tensorboard": DEPRECATED_DEFAULT,
    "log_throughput": IS_THE_DEFAULT,
    "verify_integrity": IS_THE_DEFAULT,
    "auto_detect_ckpt_format": IS_THE_DEFAULT,
    "use_tokenizer_model_from_checkpoint_args": IS_THE_DEFAULT,
    "enable_one_logger": "that logger is not public; nothing is sent anyway",
    "one_logger_project": ONE_LOGGER,
    "one_logger_run_name": ONE_LOGGER,
    "one_logger_async": ONE_LOGGER,
    "app_tag_run_name": ONE_LOGGER,
    "app_tag_run_version": ONE_LOGGER,
    "async_tensor_model_parallel_allreduce": DECIDED_BY_CORE,
}
"""Destination -> what is the same with and without the flag."""


def note_what_is_the_same(check: Check) -> None:
    """Note the flags of `SAME_HERE` that the command line has."""
    for dest, sentence in SAME_HERE.items():
        if dest in check.given and dest in check.flag_names and check.changed(dest):
            check.notes.append(f"{check.flag(dest)}: {sentence}; leave it out")

# SPDX-License-Identifier: Apache-2.0
"""Flag table: every flag of checkpoints."""

from tests.support.pretrain.arguments.flag_rows import (
    SHARDED,
    FlagRow,
    changes,
    refused,
    shown,
)

SAVES_IN_BACKGROUND = "--save s --save-interval 1 --async-save"
IN_BACKGROUND = "test_background_save.py::test_a_save_in_the_background_is_a_blocking_one"
NON_PERSISTENT = "test_non_persistent_saves.py::test_the_newer_checkpoint_of_both_kinds_is_loaded"
CHECKPOINTING = "test_checkpointing.py::"

LEFT_OUT_OF_SAVE = (
    f"{CHECKPOINTING}test_what_was_not_saved_is_missed_by_name_and_can_be_done_without"
)

LEFT_OUT_OF_LOAD = (
    f"{CHECKPOINTING}test_the_optimizer_or_the_random_state_can_be_left_out_of_a_load"
)

CHECKPOINTS = (
    shown(
        "--save",
        f"{CHECKPOINTING}test_a_resumed_run_has_bitwise_the_losses_of_one_that_never_stopped",
    ),
    shown(
        "--load",
        f"{CHECKPOINTING}test_a_resumed_run_has_bitwise_the_losses_of_one_that_never_stopped",
    ),
    shown(
        "--save-interval", "test_torch_dist_checkpoint.py::test_without_fsdp_a_run_resumes_bitwise"
    ),
    shown(
        "--save-retain-interval",
        f"{CHECKPOINTING}test_old_checkpoints_are_dropped_but_for_multiples_and_the_newest",
    ),
    shown(
        "--ckpt-format",
        "test_direct_loading.py::test_a_run_with_fsdp_saves_what_runs_with_and_without_it_load",
    ),
    refused("--ckpt-format torch", "use torch_dist or fsdp_dtensor"),
    refused("--ckpt-format torch_dcp", "use torch_dist or fsdp_dtensor"),
    refused("--ckpt-format zarr", "use torch_dist or fsdp_dtensor"),
    shown(
        "--no-strict-fsdp-dtensor-load",
        f"{CHECKPOINTING}test_a_partial_load_takes_what_there_is_and_a_strict_one_says_what_is_missing",
    ),
    FlagRow(
        "--auto-detect-ckpt-format",
        changes={"notes": "--auto-detect-ckpt-format: is the default; leave it out"},
    ),
    changes("--dist-ckpt-strictness raise_all", torch_dist__strict="raise_all"),
    changes(
        "--dist-ckpt-optim-fully-reshardable",
        SHARDED,
        torch_dist__distrib_optim_sharding_type="fully_reshardable",
    ),
    refused("--dist-ckpt-save-pre-mcore-014", "no longer writes fully_sharded_model_space"),
    shown(
        "--distrib-optim-fully-reshardable-mem-efficient",
        "test_torch_dist_checkpoint.py::test_the_first_rank_alone_gathers_the_optimizer_to_write_it",
    ),
    shown("--async-save", IN_BACKGROUND),
    shown(
        "--ckpt-assume-constant-structure",
        "test_constant_structure.py::test_saves_with_fsdp_are_planned_once_and_are_the_same",
    ),
    shown("--use-persistent-ckpt-worker", IN_BACKGROUND),
    changes("--async-strategy mcore", SAVES_IN_BACKGROUND, args__async_strategy="mcore"),
    refused("--dist-ckpt-workers 2", "one process of each rank writes"),
    shown("--non-persistent-save-interval", NON_PERSISTENT),
    shown("--non-persistent-ckpt-type", NON_PERSISTENT),
    refused("--non-persistent-ckpt-type in_memory", "not built; use --async-save, or global"),
    shown("--non-persistent-global-ckpt-dir", NON_PERSISTENT),
    refused("--non-persistent-local-ckpt-dir d", "use --async-save"),
    refused("--non-persistent-local-ckpt-algo atomic", "use --async-save"),
    FlagRow(
        "--ckpt-fully-parallel-save",
        changes={"notes": "--ckpt-fully-parallel-save: deprecated, is the default; leave it out"},
    ),
    shown(
        "--no-ckpt-fully-parallel-save",
        "test_constant_structure.py::test_without_shared_work_the_first_rank_writes_what_all_have",
    ),
    shown(
        "--ckpt-fully-parallel-load",
        "test_torch_dist_checkpoint.py::test_ranks_read_parts_and_exchange_them",
    ),
    shown("--no-save-optim", LEFT_OUT_OF_SAVE),
    shown("--no-save-rng", LEFT_OUT_OF_SAVE),
    shown("--no-load-optim", LEFT_OUT_OF_LOAD),
    shown(
        "--no-load-rng", f"{CHECKPOINTING}test_without_the_random_state_dropout_goes_another_way"
    ),
    shown("--finetune", LEFT_OUT_OF_LOAD),
    shown(
        "--no-load-fallback",
        "test_newest_checkpoint.py::test_the_newest_itself_can_be_insisted_on",
    ),
    shown(
        "--overwrite",
        "test_save_directory.py::test_a_run_overwrites_nothing_that_it_does_not_continue",
    ),
    shown(
        "--ckpt-step",
        f"{CHECKPOINTING}test_a_step_that_is_not_there_is_refused_with_those_that_are",
    ),
    shown(
        "--exit-on-missing-checkpoint",
        f"{CHECKPOINTING}test_a_run_starts_from_scratch_without_a_checkpoint_unless_told_to_stop",
    ),
    shown(
        "--use-checkpoint-args",
        "test_checkpoint_arguments.py::test_the_model_of_the_checkpoint_takes_the_place_of_the_flags",
    ),
    shown(
        "--no-check-checkpoint-args",
        "test_checkpoint_arguments.py::test_a_model_that_means_something_else_is_refused_on_all_ranks_alike",
    ),
    shown(
        "--pretrained-checkpoint",
        f"{CHECKPOINTING}test_a_pretrained_checkpoint_gives_the_weights_where_there_is_no_checkpoint_yet",
    ),
    shown(
        "--dump-param-to-param-group-map",
        "test_gpt_optimizer.py::test_the_map_of_parameters_to_groups_is_a_checkpoint_that_torch_reads",
    ),
    FlagRow(
        "--verify-integrity", changes={"notes": "--verify-integrity: is the default; leave it out"}
    ),
    shown("--no-verify-integrity", "test_integrity.py::test_damage_is_loaded_without_verification"),
    refused("--load-main-params-from-ckpt", "main weights are part of the optimizer's state"),
)

# SPDX-License-Identifier: Apache-2.0
"""Names of the published interface whose effect a test of their own shows."""

TESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "test_memory.py::test_every_level_peaks_below_the_one_before": {
        "fully_shard_model": ("zero_dp_strategy",),
    },
    "test_memory.py::test_level_3_gathers_one_unit_and_a_window": {
        "fully_shard_model": ("overlap_param_gather",),
    },
    "test_settings.py::test_a_device_without_a_number_is_the_one_of_the_rank": {
        "fully_shard_model": ("device",),
    },
    "test_meta_init.py::test_training_goes_on_as_without_sharding": {
        "fully_shard_model": ("init_model_with_meta_device",),
    },
    "test_meta_functions.py::test_a_function_initialises_every_module": {
        "fully_shard_model": ("param_init_fn",),
    },
    "test_model.py::test_the_fields_of_the_config_are_used": {
        "MixedPrecisionPolicy": ("main_params_dtype",),
    },
    "engine/test_policy.py::test_missing_dtypes_follow_the_parameter": {
        "MixedPrecisionPolicy": ("main_grads_dtype",),
    },
    "test_mixed_precision.py::test_gradients_travel_in_grad_comm_dtype": {
        "fully_shard_model": ("mixed_precision_policy",),
        "MixedPrecisionPolicy": ("grad_comm_dtype",),
    },
    "test_collectives_per_step.py::test_nothing_is_reduced_before_the_end_of_a_step": {
        "fully_shard_model": ("sync_model_each_microbatch",),
        "members": ("no_sync", "set_model_auto_sync"),
    },
    "test_collectives_per_step.py::test_all_layers_in_the_window_stay_unsharded_for_backward": {
        "fully_shard_model": ("suggested_communication_unit_size",),
    },
    "test_public_clients.py::test_weights_that_no_loss_reaches_are_left_alone": {
        "fully_shard_model": ("find_unused_parameters",),
    },
    "test_public_clients.py::test_local_parts_are_whole_rows_if_the_user_wants_rows": {
        "fully_shard_model": ("granularity",),
    },
    "test_model.py::test_bad_gradient_is_reported_with_parameter_and_rank_on_all_ranks": {
        "fully_shard_model": ("report_nan_in_param_grad",),
    },
    "test_gradients.py::test_settings_do_not_change_the_numbers": {
        "fully_shard_model": ("calculate_per_token_loss",),
    },
    "quantized/test_transformer_engine_weights.py::test_transposed_copies_are_made_anew": {
        "fully_shard_model": ("keep_fp8_transpose_cache",),
    },
    "test_double_buffer.py::test_weights_are_gathered_to_the_same_two_addresses_in_turn": {
        "fully_shard_model": ("fsdp_double_buffer",),
        "members": ("memory_slots",),
    },
    "test_slots_out_of_memory.py::test_a_rank_without_memory_for_slots_trains_with_storage_of"
    "_its_own": {
        "fully_shard_model": ("fsdp_db_use_persist_buf_on_alloc_fail",),
    },
    "test_graph_mode.py::test_gradients_stay_where_they_are": {
        "fully_shard_model": ("cuda_graph_mode",),
    },
    "backends/test_nccl_memory.py::test_a_refusal_on_one_rank_is_an_error_on_all": {
        "fully_shard_model": ("disable_symmetric_registration",),
    },
    "test_embedding_strategies.py::test_each_kind_has_its_level": {
        "fully_shard_model": ("embedding_zero_dp_strategy",),
        "DistributedDataParallelConfig": ("embedding_data_parallel_sharding_strategy",),
    },
    "test_ignored_params.py::test_training_with_ignored_parameters_matches_the_unsharded_model": {
        "fully_shard_model": ("ignored_params",),
    },
    "optimizer/test_offload.py::test_training_has_the_bits_of_one_on_the_device": {
        "fully_shard_model": ("offload_policy",),
    },
    "test_tensor_parallel.py::test_torch_tensor_parallel_models_match_the_unsharded_one": {
        "fully_shard_model": ("tp_dim",),
        "FSDPDistributedIndex": ("tp_dim",),
    },
    "test_unshard_by_hand.py::test_a_unit_that_was_unsharded_by_hand_is_not_gathered_again": {
        "members": ("unshard", "reshard"),
    },
    "test_outside_schedule.py::test_gradients_match_the_unsharded_model": {
        "members": (
            *("pre_forward", "post_forward", "pre_backward", "post_backward"),
            *("post_forward_release_module", "post_backward_release_module"),
            "is_last_microbatch",
        ),
    },
    "optimizer/test_sharded_optimizer.py::test_step_can_leave_out_reductions_and_installing": {
        "members": ("install_optimized_model_weights",),
    },
    "test_optimizer_gradients.py::test_gradients_that_are_attached_too_early_are_not_lost": {
        "members": ("attach_grad_to_optimizer_state", "scale_gradients", "zero_grad"),
    },
    "module/test_model_state.py::test_state_of_the_unsharded_model_and_optimizer_loads": {
        "members": ("named_parameters", "state_dict", "load_state_dict"),
    },
}
"""By test, which is in `tests/fsdp`: owners, and the names that it is about."""

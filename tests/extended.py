"""What `make test` leaves to `make test-all`, beside single tests that are marked `extended`.

`make test` is to take five minutes on two cores: the proofs, and one run of every main path through real processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SWEPT = {  # tests with many parameters: `make test` runs those whose ids begin with one of these
    "tests/client/test_resuming.py::test_a_call_that_breaks_anywhere_is_continued_by_another": (
        "StatusCode.UNAVAILABLE-",
    ),
    "tests/client/test_resuming.py::test_an_error_that_a_retry_cannot_repair_is_raised_at_once": ("3-",),
    "tests/core/acceptance/test_lossless.py::test_the_text_is_distributed_as_the_targets_under_every_filter": (
        "recursive-rejection-penalties",
        "traversal-verification-none",
    ),
    "tests/core/answers/test_formats.py::test_an_answer_that_must_be_calls_has_no_other_content": ("chosen0-names0-",),
    "tests/e2e/test_adapters.py::test_greedy_text_is_that_of_peft": ("a",),
    "tests/e2e/test_tools.py::test_forced_calls_follow_their_schema_and_are_equal_in_a_stream": ("any-1.0",),
    "tests/engine/checkpoints/test_padding.py::test_padding_changes_no_logit": ("grouped", "qwen3"),
    "tests/engine/checkpoints/test_padding.py::test_shapes_are_close_to_the_size_that_is_asked": ("50",),
    "tests/engine/cpu/test_adapters.py::test_a_rows_bits_do_not_depend_on_the_adapters_of_other_rows": ("bfloat16-",),
    "tests/engine/cpu/test_adapters.py::test_logits_with_an_adapter_equal_those_of_peft": ("grouped",),
    "tests/engine/cpu/test_adapters.py::test_scales_and_ranks_of_each_module_are_those_of_peft": ("modules0-terms0",),
    "tests/engine/cpu/test_engine.py::test_a_tied_head_is_the_embedding_bit_for_bit": ("bfloat16-bfloat16",),
    "tests/engine/cpu/test_engine.py::test_every_instruction_set_gives_the_logits_of_transformers": ("grouped-",),
    "tests/engine/cpu/test_engine.py::test_every_instruction_set_rounds_alike": ("bfloat16-",),
    "tests/engine/cpu/test_engine.py::test_threads_do_not_change_a_bit": ("3-",),
    "tests/engine/cpu/test_quantized.py::test_a_quantized_copys_logits_differ_within_the_quantization_error": (
        "grouped-",
    ),
    "tests/engine/gpu/test_adapters.py::test_logits_are_those_of_merged_weights_for_every_shape": ("grouped",),
    "tests/engine/gpu/test_adapters.py::test_texts_of_several_adapters_and_without_share_passes": ("0",),
    "tests/engine/gpu/test_adapters.py::test_weights_of_fewer_bits_have_adapters_in_bfloat16": ("bfloat16",),
    "tests/engine/gpu/test_eagle_drafts.py::"
    "test_drafts_are_those_of_all_features_after_any_sequence_of_slot_operations": ("eagle-0", "eagle-3-0"),
    "tests/engine/gpu/test_engine.py::test_a_long_prompt_chunk_and_a_tree_behind_it_share_a_pass": ("560-20-12",),
    "tests/engine/gpu/test_engine.py::test_a_tree_grown_level_by_level_over_scattered_rows_equals_the_cpu_engine": (
        "0",
    ),
    "tests/engine/gpu/test_engine.py::test_chosen_tokens_and_gaps_are_those_of_the_sampler": ("0.7",),
    "tests/engine/gpu/test_engine.py::test_restricted_rows_beyond_one_choice_are_chosen_in_parts": ("terms0",),
    "tests/engine/gpu/test_engine.py::test_the_best_tokens_of_a_row_are_those_of_the_sampler": ("64-1.0",),
    "tests/engine/gpu/test_engine.py::test_trees_behind_prompt_chunks_equal_the_cpu_engine_for_every_shape": (
        "grouped",
    ),
    "tests/engine/gguf/test_writer.py::test_a_folder_becomes_a_file_of_the_same_tokenizer": ("Q4_K_M",),
    "tests/engine/gpu/test_low_rank.py::test_rows_with_several_adapters_and_without_share_a_pass": ("qkv-float32-",),
    "tests/engine/gpu/test_on_fake_cuda.py::test_a_recording_has_no_tensor_on_the_host": ("grouped-",),
    "tests/gateway/contracts/test_added_tokens.py::test_an_answer_with_marks_is_right_and_the_same_in_all_four_ways": (
        "reasoning alone",
    ),
    "tests/gateway/contracts/test_every_field.py::test_null_is_as_good_as_left_out": ("/v1/chat/",),
    "tests/upstream/test_remote_drafts.py::test_a_drafter_that_dies_or_freezes_costs_its_drafts_alone": ("9]",),
    "tests/upstream/test_remote_drafts.py::test_texts_are_the_engines_own_and_take_fewer_steps": ("1.0-",),
    "tests/engine/gpu/test_tree_growth.py::test_trees_grow_under_filters_and_a_bias": ("{'top_k': 3}",),
    "tests/engine/tensor_parallel/test_adapters.py::test_several_ranks_add_the_adapter_updates_of_one_rank": (
        "six-heads-3",
    ),
    "tests/engine/tensor_parallel/test_socket_group.py::test_a_tokens_bits_do_not_depend_on_other_rows_of_the_pass": (
        "biased-bfloat16-2",
    ),
    "tests/engine/tensor_parallel/test_socket_group.py::test_two_ranks_give_the_logits_of_one": ("biased",),
    "tests/engine/test_forward.py::test_a_tree_equals_one_forward_for_each_path": (
        "compiled-small-",
        "compiled-target-0",
    ),
    "tests/engine/test_forward.py::test_logits_equal_those_of_transformers_for_every_shape": ("compiled-grouped",),
    "tests/engine/test_forward.py::test_many_sessions_in_one_pass_equal_each_session_alone": (
        "compiled-small-",
        "compiled-target-0",
    ),
    "tests/engine/test_heads.py::test_heads_with_another_padding_draft_only_ids_that_both_models_have": ("eagle-3-",),
    "tests/engine/test_heads.py::test_trees_of_several_sessions_are_drafted_as_one_path_at_a_time": (
        "medusa-on_cpu-False",
        "eagle-3-on_cpu-False",
        "eagle-3-on_device-True",
    ),
    "tests/engine/transformers/test_engine.py::test_a_prompt_in_chunks_equals_the_whole_prompt": ("gpt2",),
    "tests/engine/transformers/test_engine.py::test_a_tree_grown_level_by_level_over_scattered_rows_equals_its_paths": (
        "gpt2",
    ),
    "tests/engine/transformers/test_engine.py::test_drafts_beyond_the_context_do_not_fail": ("gpt2",),
    "tests/engine/transformers/test_engine.py::test_kv_after_commits_rollbacks_and_a_copy_equals_a_fresh_prefill": (
        "gpt2",
    ),
    "tests/engine/transformers/test_engine.py::test_sessions_with_trees_in_one_pass_equal_one_forward_for_each_path": (
        "gpt2",
        "gemma3",
    ),
    "tests/router/test_not_reading.py::test_a_generation_that_is_not_read_is_ended_within_a_second": ("cancel",),
    "tests/router/test_not_reading.py::test_clients_with_a_tiny_window_hold_up_no_other": ("a byte",),
    "tests/router/test_not_reading.py::test_other_clients_are_served_at_once_beside_clients_that_do_not_read": (
        "ten times",
    ),
    "tests/e2e/test_cluster.py::test_greedy_text_is_that_of_transformers_under_every_policy": ("goodput",),
    "tests/e2e/test_grammars.py::test_json_of_a_schema_is_equal_with_and_without_drafters": ("1.0",),
    "tests/engine/gpu/test_begun_pass.py::test_another_text_of_equal_length_in_a_slot_is_computed": ("moved",),
    "tests/gateway/test_bodies.py::test_json_that_is_too_deep_is_an_error_that_names_its_field": ("extra0-",),
    "tests/grammar/test_bounds.py::test_an_oversized_grammar_is_refused_and_others_are_followed": ("0", "4"),
    "tests/grammar/test_compiler.py::test_a_text_follows_its_grammar_to_the_end": ("1.0-",),
    "tests/router/api/test_json_bounds.py::test_json_beyond_its_bounds_is_refused_by_name": ("schema", "together"),
    "tests/router/test_idempotency.py::test_a_refused_request_leaves_nothing_in_redis": ("tokens", "storage"),
    "tests/router/test_origins.py::test_a_text_never_continues_at_a_verifier_that_might_change_it": (
        "weights-dies",
        "protocol-drains",
    ),
    "tests/router/test_sessions.py::test_a_generation_broken_off_anywhere_continues_at_another_router": ("1]", "7]"),
    "tests/router/test_tenants.py::test_an_expired_key_is_answered_like_an_unknown_one": ("Generate",),
    "tests/store/redis/test_acl.py::test_every_command_granted_to_a_role_is_needed": ("drafter ",),
    "tests/verifier/proposers/test_head_drafts.py::test_heads_that_know_the_text_are_accepted": (
        "medusa-on_cpu",
        "eagle-3-on_device",
    ),
    "tests/verifier/proposers/test_head_drafts.py::test_random_heads_change_nothing": (
        "medusa-on_cpu",
        "eagle-3-on_device",
    ),
    "tests/verifier/test_preempted_features.py::test_features_of_a_preempted_session_are_kept_for_its_drafters": (
        "eagle-3-",
    ),
    "tests/verifier/test_preempted_features.py::test_heads_draft_after_a_preemption": ("eagle-3",),
    "tests/verifier/test_preempted_features.py::test_heads_have_the_features_of_shared_pages": (
        "eagle-3-plan1-bounded",
    ),
}
EXTENDED = (  # folders, files, and tests in them
    "tests/bench/test_bad_input.py",
    "tests/bench/test_gpu.py",
    "tests/bench/test_schemas.py",
    "tests/bench/test_sharing.py",
    "tests/bench/rows/test_local.py",
    "tests/bench/test_trees.py",
    "tests/chaos/",
    "tests/cli/test_bad_input.py",
    "tests/cli/performance/test_bench.py",
    "tests/cli/test_cluster.py",
    "tests/cli/performance/test_demo.py",
    "tests/cli/servers/test_describe.py",
    "tests/cli/servers/test_gateway.py",
    "tests/cli/performance/test_simulate.py",
    "tests/cli/verification/test_verify.py",
    "tests/deploy/test_images.py::test_routers_and_gateways_run_without_torch",
    "tests/deploy/test_images.py::test_workers_run_without_torch",
    "tests/deploy/test_scraped.py",
    "tests/docs/test_pages.py::test_every_command_and_snippet_of_a_page_works",
    "tests/docs/test_references.py",
    "tests/docs/test_site.py",
    "tests/e2e/test_adapters.py::test_another_version",
    "tests/e2e/test_cancels.py",
    "tests/e2e/test_clocks.py",
    "tests/e2e/test_distribution.py",
    "tests/e2e/test_exactness.py",
    "tests/e2e/test_families.py",
    "tests/e2e/test_compiled_families.py",
    "tests/e2e/test_faults.py",
    "tests/e2e/test_hub.py",
    "tests/e2e/test_kv_memory.py",
    "tests/e2e/test_leaks.py",
    "tests/e2e/test_learning.py",
    "tests/e2e/test_lookahead.py",
    "tests/e2e/test_lookups.py",
    "tests/e2e/test_merging.py",
    "tests/e2e/test_moving.py",
    "tests/e2e/test_not_speculating.py",
    "tests/e2e/test_paddings.py",
    "tests/e2e/test_remote_heads.py",
    "tests/e2e/test_rolling_restart.py",
    "tests/e2e/test_sampling.py::test_text_and_logprobs",
    "tests/e2e/test_secured.py::test_certificates_are_replaced",
    "tests/e2e/test_standby.py",
    "tests/e2e/test_supervised.py",
    "tests/e2e/test_tiers.py",
    "tests/e2e/test_upgrades.py",
    "tests/e2e/test_verify.py",
    "tests/e2e/test_vocabularies.py",
    "tests/engine/cpu/test_sanitizers.py",
    "tests/engine/gpu/test_float8.py",
    "tests/engine/gpu/test_int4.py",
    "tests/engine/gpu/test_tree_attention.py::test_tree_attention_computes_a_chunk_of_a_prompt",
    "tests/engine/gpu/test_tree_attention.py::test_tree_attention_computes_a_tree_of_many_tiles",
    "tests/engine/gpu/test_tree_attention.py::test_tree_attention_takes_heads_of_any_size",
    "tests/engine/gpu/test_tree_attention.py::test_sessions_of_all_lengths",
    "tests/engine/gpu/test_triton_kernels.py",
    "tests/engine/test_features.py::test_rank_0",
    "tests/engine/transformers/test_engine.py::test_lower_precision",
    "tests/engine/transformers/test_engine.py::test_ranks_share",
    "tests/engine/transformers/test_engine.py::test_the_reference_target",
    "tests/engine/test_invariant.py::test_a_tokens_bits",
    "tests/engine/test_invariant.py::test_hundreds_of_rows",
    "tests/engine/test_loading.py::test_a_missing_package_is_named_with_its_install_command",
    "tests/engine/checkpoints/test_padding.py::test_a_padded_target_has_the_requested_size_and_equal_logits",
    "tests/engine/tensor_parallel/test_process_group.py::test_ranks_listen",
    "tests/engine/tensor_parallel/test_leader.py::TestTheReferenceTarget",
    "tests/engine/tensor_parallel/test_leader.py::test_a_group",
    "tests/engine/tensor_parallel/test_leader.py::test_a_rank_that_dies",
    "tests/engine/tensor_parallel/test_leader.py::test_shares",
    "tests/engine/tensor_parallel/test_leader.py::test_two_ranks",
    "tests/examples/",
    "tests/fleet/",
    "tests/gateway/test_cluster.py",
    "tests/gateway/test_leaving.py",
    "tests/gateway/test_handshakes.py::test_connections_in_their_handshake_count_and_end_in_ten_seconds",
    "tests/hostile/test_attacks.py",
    "tests/hostile/test_decoders.py",
    "tests/hostile/test_forged_ids.py",
    "tests/hostile/test_fuzz.py",
    "tests/live/",
    "tests/model/test_mutants.py",
    "tests/router/requests/test_chat_template.py::"
    "test_a_template_that_does_not_compile_is_named_when_the_router_starts[{{ 7 **",
    "tests/router/requests/test_chat_template.py::test_no_template_can_hang",
    "tests/router/test_growth.py",
    "tests/router/test_slow_readers.py",
    "tests/simulation/test_cluster.py",
    "tests/telemetry/test_tracing.py",
    "tests/training/test_distillation.py",
    "tests/training/test_drafting.py",
    "tests/training/tasks/test_heads_task.py",
    "tests/verifier/proposers/test_head_drafts.py::test_two_ranks",
    "tests/e2e/protocol/test_08_liveness.py::test_a_frozen_drafter_costs_only_speed",
    "tests/e2e/test_adapters.py::test_a_verifier_that_is_killed",
    "tests/e2e/test_adapters.py::test_the_command_loads",
    "tests/e2e/test_drafter_adapters.py::test_a_session_whose_adapter",
    "tests/e2e/test_drafter_adapters.py::test_sessions_with_and_without",
    "tests/e2e/test_prefixes.py",
    "tests/engine/gpu/test_engine.py::test_all_row_counts",
    "tests/engine/gpu/test_engine.py::test_weights_of_8_bits",
    "tests/engine/gpu/test_tree_growth.py::test_a_tree_continues_from_rows",
    "tests/engine/gpu/test_tree_growth.py::test_trees_beyond_the_maximum",
    "tests/gateway/test_bodies.py::test_the_worst_bodies",
    "tests/matrix/test_matrix.py::test_a_tenth_of_the_matrix",
    "tests/router/test_not_reading.py::test_a_deadline_ends",
    "tests/router/test_verifiers.py::test_a_request_that_stalls",
    "tests/telemetry/test_lag.py::test_a_busy_machine",
    "tests/telemetry/test_lag.py::test_a_thread_that_waits",
    "tests/bench/rows/test_pinning.py::test_each_server_of_a_pinned_cluster",
    "tests/gateway/test_answers.py::test_log_probabilities_are_stored_as_sent",
    "tests/store/redis/test_acl.py::test_a_roles_user_has_its_rights_on_a_redis_cluster_too",
    "tests/store/redis/test_client.py::test_a_write_to_a_closed_cluster_connection",
    "tests/training/online/test_trainer.py::test_a_full_disk",
    "tests/training/online/test_trainer.py::test_versions_that_redis_lost",
    "tests/core/answers/test_call_reader.py::test_marks_within_the_strings",
    "tests/docs/test_pages.py::test_a_command_that_is_wrong_is_found",
    "tests/e2e/test_drafter_adapters.py::test_a_drafter_uses",
    "tests/e2e/test_grammars.py::test_regexes",
    "tests/e2e/test_lone_verifier.py",
    "tests/e2e/test_prompt_logprobs.py::test_they_are",
    "tests/engine/gguf/test_real_files.py",
    "tests/engine/gpu/test_begun_pass.py::test_no_pass_is_begun_beyond",
    "tests/engine/gpu/test_begun_pass.py::test_no_pass_is_begun_under",
    "tests/engine/gpu/test_begun_pass.py::test_texts_of_several_contracts",
    "tests/engine/gpu/test_eagle_drafts.py::test_a_long_text",
    "tests/engine/gpu/test_engine.py::test_a_pass_never_sees",
    "tests/engine/gpu/test_engine.py::test_kv_after_many_commits",
    "tests/engine/gpu/test_engine.py::test_sessions_of_very_different_lengths",
    "tests/engine/gpu/test_ranks.py::test_each_rank_adds",
    "tests/engine/gpu/test_ranks.py::test_shares_of_every_shape",
    "tests/engine/gpu/test_tree_growth.py::test_trees_grow_on_texts",
    "tests/engine/tensor_parallel/test_adapters.py::test_torch_ranks",
    "tests/grammar/test_fuzz.py",
    "tests/verifier/test_prompt_scores.py::test_a_prompt_of_the_whole_context",
    "tests/verifier/test_prompt_scores.py::test_two_ranks",
    *(f"{test}[" for test in SWEPT),
)
MAIN = (  # of these, what `make test` runs nevertheless
    *(f"{test}[{begin}" for test, begins in SWEPT.items() for begin in begins),
    "tests/e2e/test_exactness.py::test_an_adversary_with_random_trees_changes_nothing[sampled]",
    "tests/e2e/test_exactness.py::test_concurrent_sessions_generate_the_text_of_each_session_alone[sampled]",
    "tests/e2e/test_exactness.py::test_two_drafters_of_one_session_change_nothing[filtered]",
    "tests/e2e/test_sampling.py::test_text_and_logprobs_are_those_of_plain_decode_and_of_transformers[min-p]",
    "tests/e2e/test_tiers.py::test_drafts_of_three_tiers_are_accepted_and_the_text_is_the_targets[0.8]",
    "tests/engine/gguf/test_real_files.py::test_a_small_instruct_model_answers",
    "tests/engine/test_invariant.py::test_a_tokens_bits_do_not_depend_on_batch_tree_chunks_or_rows[qwen3-bfloat16]",
    "tests/engine/tensor_parallel/test_leader.py::TestTheReferenceTarget::test_trees_of_many_sessions_and_chunks_in_one_pass[sockets-2]",
    *(
        "tests/hostile/test_attacks.py::"
        f"test_an_attack_changes_no_answer_of_another_tenant_reads_nothing_and_takes_bounded_memory[{attack}]"
        for attack in (
            "gateway-answers",
            "claims",
            "grammars",
            "frames",
            "handshakes",
            "clocks",
        )
    ),
    "tests/simulation/test_cluster.py::test_plain_decode_commits_a_token_a_pass",
)


class Extended:
    """Marks them, and does not even import files that have nothing to run."""

    def __init__(self, left_out: bool) -> None:
        self._left_out = left_out

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """True for a file that is not to run; None: others decide."""
        if not self._left_out or collection_path.suffix != ".py" or not collection_path.is_relative_to(ROOT):
            return None
        file = str(collection_path.relative_to(ROOT))
        return (file.startswith(EXTENDED) and not any(main.startswith(f"{file}::") for main in MAIN)) or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        """Marks the tests of the extended run, before `-m` selects."""
        for item in items:
            if item.nodeid.startswith(EXTENDED) and not item.nodeid.startswith(MAIN):
                item.add_marker("extended")

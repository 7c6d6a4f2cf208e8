"""What `make test` leaves to `make test-all`, beside single tests that are marked `extended`.

`make test` is to take five minutes on two cores: the proofs, and one run of every main path through real processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTENDED = (  # folders, files, and tests in them
    "tests/bench/test_bad_input.py",
    "tests/bench/test_gpu.py",
    "tests/bench/test_schemas.py",
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
    "tests/deploy/test_scraped.py",
    "tests/docs/test_pages.py::test_every_command_and_snippet_of_a_page_works",
    "tests/docs/test_references.py",
    "tests/docs/test_site.py",
    "tests/e2e/test_cancels.py",
    "tests/e2e/test_clocks.py",
    "tests/e2e/test_distribution.py",
    "tests/e2e/test_exactness.py",
    "tests/e2e/test_families.py",
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
    "tests/engine/gpu/test_tree_attention.py::test_tree_attention_computes_a_chunk_of_a_prompt",
    "tests/engine/gpu/test_tree_attention.py::test_tree_attention_computes_a_tree_of_many_tiles",
    "tests/engine/gpu/test_tree_attention.py::test_tree_attention_takes_heads_of_any_size",
    "tests/engine/gpu/test_tree_attention.py::test_sessions_of_all_lengths",
    "tests/engine/test_features.py::test_rank_0",
    "tests/engine/transformers/test_engine.py::test_lower_precision",
    "tests/engine/transformers/test_engine.py::test_ranks_share",
    "tests/engine/transformers/test_engine.py::test_the_reference_target",
    "tests/engine/test_invariant.py::test_a_tokens_bits",
    "tests/engine/test_invariant.py::test_hundreds_of_rows",
    "tests/engine/test_loading.py::test_a_missing_package_is_named_with_its_install_command",
    "tests/engine/checkpoints/test_padding.py::test_a_padded_target_has_the_requested_size_and_equal_logits",
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
)
MAIN = (  # of these, what `make test` runs nevertheless
    "tests/e2e/test_exactness.py::test_an_adversary_with_random_trees_changes_nothing[sampled]",
    "tests/e2e/test_exactness.py::test_concurrent_sessions_generate_the_text_of_each_session_alone[sampled]",
    "tests/e2e/test_exactness.py::test_two_drafters_of_one_session_change_nothing[filtered]",
    "tests/e2e/test_sampling.py::test_text_and_logprobs_are_those_of_plain_decode_and_of_transformers[min-p]",
    "tests/e2e/test_tiers.py::test_drafts_of_three_tiers_are_accepted_and_the_text_is_the_targets[0.8]",
    "tests/engine/test_invariant.py::test_a_tokens_bits_do_not_depend_on_batch_tree_chunks_or_rows[qwen3-bfloat16]",
    "tests/engine/tensor_parallel/test_leader.py::TestTheReferenceTarget::test_trees_of_many_sessions_and_chunks_in_one_pass[sockets-2]",
    *(
        "tests/hostile/test_attacks.py::"
        f"test_an_attack_changes_no_answer_of_another_tenant_reads_nothing_and_takes_bounded_memory[{attack}]"
        for attack in (
            "invalid-requests",
            "gateway-json",
            "gateway-answers",
            "claims",
            "grammars",
            "frames",
            "adapters",
        )
    ),
    "tests/simulation/test_cluster.py::test_an_equal_seed_gives_equal_figures",
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
            if item.nodeid.startswith(EXTENDED) and item.nodeid not in MAIN:
                item.add_marker("extended")

"""The second page: what is drafted, what of it is accepted, and what a step costs."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Row, levels, quantiles, rates, shares, total

_ACCEPTED = Row(
    "What is accepted",
    [
        Panel(
            "Acceptance length",
            "Tokens that a verified tree brought, the target's own included: 1 is no gain.",
            "suffix: tok",
            levels("instance:outrider_acceptance_length:rate5m"),
        ),
        Panel(
            "Acceptance by depth",
            "Of the steps that verified a node so deep, those whose accepted path went there. 0 is below the root.",
            "percentunit",
            shares(
                "spec_decode_num_accepted_tokens_per_pos_total",
                "spec_decode_num_draft_tokens_per_pos_total",
                "position",
            ),
        ),
        Panel(
            "Nodes",
            "Sent by drafters, verified by the target, and accepted. What else was sent came late or was pruned.",
            "suffix: tok/s",
            [
                total("outrider_draft_nodes_total", "sent"),
                total("spec_decode_num_draft_tokens_total", "verified"),
                total("spec_decode_num_accepted_tokens_total", "accepted"),
            ],
        ),
        Panel(
            "Tokens of a tree",
            "Nodes of it that were verified: what is much above the acceptance length costs rows.",
            "suffix: tok",
            shares("spec_decode_num_draft_tokens_total", "spec_decode_num_drafts_total", "instance"),
        ),
    ],
)

_DRAFTERS = Row(
    "How far ahead, and who is worth it",
    [
        Panel(
            "Why not",
            "Steps, by whether they verified drafts (drafting) or what kept them from it.",
            "ops",
            rates("outrider_speculation_steps_total", "reason"),
            stacked=True,
        ),
        Panel(
            "Gamma",
            "How deep drafting may run ahead: the ceiling, a mean over the generations of a router.",
            "suffix: tok",
            levels("outrider_gamma"),
        ),
        Panel(
            "Changes of plan",
            "How often the policy thought otherwise.",
            "ops",
            rates("outrider_plan_changes_total", "instance"),
        ),
        Panel(
            "What drafters are worth",
            "Of a drafter's nodes that were verified, those that were committed.",
            "percentunit",
            shares("outrider_drafter_accepted_total", "outrider_drafter_verified_total", "drafter"),
        ),
        Panel(
            "What drafters bring",
            "Committed tokens that each of them drafted.",
            "suffix: tok/s",
            rates("outrider_drafter_accepted_total", "drafter"),
            stacked=True,
        ),
        Panel(
            "Round trip",
            "From a commit to the first delta drafted with it: the network both ways, and a pass of the drafter.",
            "s",
            quantiles("outrider_draft_reply_seconds"),
        ),
        Panel(
            "Wire",
            "Bytes on draft streams, both directions, for each committed token.",
            "bytes",
            shares("outrider_wire_bytes_total", "outrider_tokens_committed_total", "instance"),
        ),
        Panel(
            "Passes of drafters",
            "By drafter. One that is idle has no session, or rests.",
            "ops",
            rates("outrider_draft_passes_total", "instance"),
        ),
        Panel(
            "Draft streams",
            "That are open, at verifiers and at tiers that have others below.",
            "short",
            levels("outrider_drafters"),
            stacked=True,
        ),
    ],
)

_STEPS = Row(
    "Steps",
    [
        Panel("Forward pass", "What a step takes.", "s", quantiles("outrider_step_forward_seconds")),
        Panel(
            "Held back",
            "How long a step waited for drafts. More than they bring is a drafter that is too slow.",
            "s",
            quantiles("outrider_step_wait_seconds"),
        ),
        Panel(
            "Rows of a pass",
            "Tokens that go through the model in one: prompts, roots and nodes.",
            "suffix: tok",
            shares("outrider_step_rows_total", "outrider_steps_total", "instance"),
        ),
        Panel(
            "Tokens of a pass",
            "That it committed, over all of its sessions.",
            "suffix: tok",
            shares("outrider_tokens_committed_total", "outrider_steps_total", "instance"),
        ),
        Panel(
            "Passes",
            "By verifier.",
            "ops",
            rates("outrider_steps_total", "instance"),
        ),
        Panel(
            "Sessions",
            "That are open, at verifiers and at drafters.",
            "short",
            levels("outrider_sessions"),
        ),
    ],
)

SPECULATION = Dashboard(
    "outrider-speculation",
    "Outrider: speculation",
    "What is drafted, what of it is accepted, and what a step costs. Nothing here changes what is said.",
    [_ACCEPTED, _DRAFTERS, _STEPS],
)

"""The first page: what callers get, what waits, what is full, what fails."""

from __future__ import annotations

from deploy.grafana.panels import (
    MODEL,
    Dashboard,
    Panel,
    Row,
    greatest,
    levels,
    quantile,
    quantiles,
    rates,
    sums,
    total,
)

_ANSWERS = Row(
    "Answers",
    [
        Panel(
            "Goodput",
            "Tokens that are durable, and so the caller's. What was drafted and thrown away is not in it.",
            "suffix: tok/s",
            rates("outrider_tokens_total", "gen_ai_request_model", MODEL),
        ),
        Panel(
            "Time to first token",
            "From a request's arrival at the router: its wait for a place and the reading of its prompt are in it.",
            "s",
            quantiles("gen_ai_server_time_to_first_token_seconds", MODEL),
        ),
        Panel(
            "Time per token",
            "Of a generation, for each token after the first.",
            "s",
            quantiles("gen_ai_server_time_per_output_token_seconds", MODEL),
        ),
        Panel(
            "Requests, by outcome",
            "A reason in small letters, or the error that the caller got.",
            "reqps",
            rates("outrider_requests_total", "outcome", MODEL),
            stacked=True,
        ),
        Panel(
            "Tokens read and said",
            "Of the requests that have ended: their prompts and their answers.",
            "suffix: tok/s",
            rates("gen_ai_client_token_usage_sum", "gen_ai_token_type", MODEL),
        ),
        Panel(
            "Time of a request",
            "From its arrival to its end.",
            "s",
            quantiles("gen_ai_server_request_duration_seconds", MODEL),
        ),
    ],
)

_PLACES = Row(
    "Queue and places",
    [
        Panel(
            "Queue",
            "Queued requests, by priority. Interactive ones go first.",
            "short",
            sums("outrider_queue_depth", "priority"),
            stacked=True,
        ),
        Panel("Wait for a place", "Of the requests that got one.", "s", quantiles("outrider_queue_wait_seconds")),
        Panel(
            "Running",
            "Running generations, by router.",
            "short",
            levels("outrider_requests_running"),
            stacked=True,
        ),
        Panel(
            "Workers",
            "Announced in Redis, as the router sees it that sees most.",
            "short",
            greatest("outrider_workers", "role"),
        ),
        Panel(
            "Slots in use",
            "Open sessions of a verifier over those that it has room for.",
            "percentunit",
            levels("instance:outrider_slots_used:ratio"),
        ),
        Panel(
            "KV in use",
            "Tokens of open sessions whose keys and values are held, over those that there is room for.",
            "percentunit",
            levels("instance:outrider_kv_used:ratio"),
        ),
    ],
)

_FAULTS = Row(
    "What went wrong",
    [
        Panel(
            "Failures",
            "Of all requests, those that ended by an error that is not their caller's.",
            "percentunit",
            levels("instance:outrider_failures:ratio_rate5m"),
        ),
        Panel(
            "Errors, by kind",
            "Whosever they are.",
            "reqps",
            rates("gen_ai_server_request_duration_seconds_count", "error_type", MODEL, 'error_type!=""'),
            stacked=True,
        ),
        Panel(
            "Moves and resumes",
            "Generations that moved to another verifier, and resumed generations.",
            "ops",
            [
                total("outrider_moves_total", "moves"),
                total("outrider_resumes_total", "resumes"),
            ],
        ),
        Panel(
            "Refused frames",
            "What peers sent that is not the protocol. Handfuls when sessions end are in order.",
            "ops",
            rates("outrider_frames_refused_total", "instance"),
        ),
        Panel(
            "Append to the log",
            "Time until Redis had stored a commit's tokens. Callers see none of them before that.",
            "s",
            quantiles("outrider_log_append_seconds"),
        ),
        Panel(
            "Lag of event loops",
            "How late a server runs what is due, at the 99th percentile. Above 0.1 s all that it serves is held up.",
            "s",
            quantile("outrider_loop_lag_seconds", 0.99),
        ),
        Panel(
            "Stalls of event loops",
            "Times that one callback of a server held up all others for more than 0.1 s. There should be none.",
            "ops",
            rates("outrider_loop_stalls_total", "instance"),
        ),
        Panel(
            "Clocks",
            "By how much a server's clock is ahead of Redis'. More than a second is an error of a machine.",
            "s",
            levels("outrider_clock_skew_seconds"),
        ),
        Panel(
            "Tasks that failed",
            "Long-lived tasks that ended by themselves, by name, and were started again. There should be none.",
            "ops",
            rates("outrider_tasks_failed_total", "task"),
        ),
        Panel(
            "Gateway: answers",
            "Of its API, by HTTP status; 499 is a client that went away.",
            "reqps",
            rates("outrider_gateway_requests_total", "status", 'path=~"/v1/.+"'),
            stacked=True,
        ),
        Panel(
            "Gateway: time",
            "From a request to its answer's end.",
            "s",
            quantiles("outrider_gateway_duration_seconds", 'path=~"/v1/.+"'),
        ),
        Panel(
            "Gateway: running",
            "Requests that it is busy with.",
            "short",
            levels("outrider_gateway_running"),
        ),
    ],
)

OVERVIEW = Dashboard(
    "outrider-overview",
    "Outrider: overview",
    "What callers get, what waits, what is full, what fails. The second page is about speculation.",
    [_ANSWERS, _PLACES, _FAULTS],
)

"""`outrider top`: shows a router's live figures in a terminal, like the router's web page."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.command import reported
from outrider.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

KEPT = 60  # snapshots that the figures are computed from
MAX_ROWS = 20  # of generations
BAR = 30  # width of a full bar, in characters
TIMEOUT_S = 5.0

Snapshot = dict[str, Any]  # JSON of the router's page /live


def top(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address of the router's `metrics` page.")
    ] = "127.0.0.1:9464",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Fetch the figures twice, print them, and exit.")] = False,
) -> None:
    """Watch a router: tokens/s, acceptance by depth, gamma, the queue, its workers and generations."""
    from rich.console import Console
    from rich.live import Live

    with reported():
        seen = deque([fetch_snapshot(address)], maxlen=KEPT)
        if once:
            time.sleep(every)
            seen.append(fetch_snapshot(address))
            Console().print(screen(list(seen)))
            return
        with Live(screen(list(seen)), screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while True:
                time.sleep(every)
                problem = ""
                try:
                    seen.append(fetch_snapshot(address))
                except Unavailable as error:  # the router may come back
                    problem = str(error)
                live.update(screen(list(seen), problem), refresh=True)


def fetch_snapshot(address: str) -> Snapshot:
    """Return the router's current figures. Raises Unavailable."""
    try:
        with urllib.request.urlopen(f"http://{address}/live", timeout=TIMEOUT_S) as answer:
            snapshot: Snapshot = json.load(answer)
            return snapshot
    except (OSError, ValueError, HTTPException) as error:
        why = error if isinstance(error, OSError) else "no such page is there"
        raise Unavailable(
            f"no router shows its figures at {address} ({why}); give the address that is its `metrics`"
        ) from None


def screen(seen: Sequence[Snapshot], problem: str = "") -> Group:
    """Return the screen for some snapshots, oldest first. A single snapshot gives no rates.

    `problem`: why the latest snapshot could not be fetched.
    """
    from rich.console import Group
    from rich.text import Text

    before, now = seen[0], seen[-1]
    if before["router"] != now["router"]:  # another router answers, whose counters start at 0
        before = now
    recent = seen[-min(5, len(seen))] if before is not now else now
    steps, seconds = now["steps"] - recent["steps"], now["time"] - recent["time"]
    waiting = sum(now["waiting"].values())
    busy = [one for one in now["workers"] if one["plain_tokens_per_s"] and one["sessions"]]
    plain = sum(one["plain_tokens_per_s"] for one in busy)
    head = {
        "tokens/s": _over(now["tokens"] - recent["tokens"], seconds, "{:.0f}"),
        "speed-up": _over(sum(one["tokens_per_s"] for one in busy), plain, "{:.2f}"),
        "acceptance length": _over(steps + now["accepted"] - recent["accepted"], steps, "{:.2f}"),
        "accepted": _over(now["accepted"] - recent["accepted"], now["verified"] - recent["verified"], "{:.0%}"),
        "gamma": "-" if now["gamma"] is None else f"{now['gamma']:.1f}",
        "running": str(now["running"]),
        "waiting": f"{waiting:.0f}",
    }
    line = Text(f"outrider {now['router']}   ", style="bold")
    for name, value in head.items():
        line.append(f"{name} ", style="not bold dim").append(f"{value}   ", style="bold")
    return Group(
        line,
        Text(problem, style="red"),
        _depths(before, now),
        _models(recent, now),
        _misfits(now),
        _workers(now),
        _generations(seen[-2] if len(seen) > 1 else now, now),
    )


def _depths(before: Snapshot, now: Snapshot) -> Table:
    """For each depth, show the share of steps that accepted a node there, of the steps that verified one there."""
    table = _table("depth", "accepted", "", "steps", title="Acceptance by depth")
    for at, tried in enumerate(now["tried_by_depth"][:MAX_ROWS]):
        tried -= _at(before["tried_by_depth"], at)
        reached = _at(now["reached_by_depth"], at) - _at(before["reached_by_depth"], at)
        if tried > 0:
            share = reached / tried
            table.add_row(str(at + 1), f"{share:.0%}", "█" * round(share * BAR), str(tried))
    return table


def _models(before: Snapshot, now: Snapshot) -> Table:
    """Show, for the latest steps of each model, how many verified drafts, and the reasons why the others did not."""
    past = {one["name"]: one["steps"] for one in before["models"]}
    table = _table("model", "with drafts", "without", title="Speculation")
    table.columns[-1].no_wrap = False
    for one in now["models"]:
        steps = {reason: count - past.get(one["name"], {}).get(reason, 0) for reason, count in one["steps"].items()}
        without = {reason: count for reason, count in steps.items() if count > 0 and reason != "drafting"}
        total = steps.get("drafting", 0) + sum(without.values())
        reasons = sorted(without, key=without.__getitem__, reverse=True)
        table.add_row(
            one["name"],
            _over(steps.get("drafting", 0), total, "{:.0%}"),
            ", ".join(f"{reason} {_over(without[reason], total, '{:.0%}')}" for reason in reasons),
        )
    return table


def _misfits(now: Snapshot) -> Text:
    """Return a line for each drafter that can draft for none of a model's verifiers."""
    from rich.text import Text

    lines = [f"{worker}: {why}" for one in now["models"] for worker, why in one["misfits"]]
    return Text("\n".join(lines), style="red")


def _workers(now: Snapshot) -> Table:
    table = _table(
        "worker", "model", "tier", "zone", "sessions", "cores", "accepted", "drafting", "health", title="Workers"
    )
    for one in now["workers"]:
        verified, accepted = now["drafters"].get(one["id"], (0, 0))
        table.add_row(
            one["id"],
            one["model"],
            str(one["tier"]) if one["role"] == "drafter" else "",
            one["zone"],
            f"{one['sessions']} of {one['slots']}",
            f"{one['cores']:.2f}",
            _over(accepted, verified, "{:.0%}"),
            one["arm"],
            "[red]failed lately[/]" if one["suspected"] else "well",
        )
    return table


def _generations(before: Snapshot, now: Snapshot) -> Table:
    from rich.text import Text

    past = {one["session"]: one for one in before["generations"]}
    table = _table("session", "model", "tokens", "tokens/s", "length", "gamma", "speculation", title="Generations")
    table.columns[-1].no_wrap = False
    for one in now["generations"][:MAX_ROWS]:
        then = past.get(one["session"], {"tokens": 0, "seconds": 0.0})
        table.add_row(
            one["session"],
            one["model"],
            str(one["tokens"]),
            _over(one["tokens"] - then["tokens"], one["seconds"] - then["seconds"], "{:.0f}"),
            _over(one["steps"] + one["accepted"], one["steps"], "{:.2f}"),
            str(one["gamma"]) if one["speculation"] == "drafting" else "-",
            Text(", ".join(one["drafters"]) if one["speculation"] == "drafting" else one["why"]),
        )
    return table


def _table(*columns: str, title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", no_wrap=True)
    return table


def _at(counts: Sequence[int], at: int) -> int:
    return counts[at] if at < len(counts) else 0


def _over(part: float, whole: float, form: str) -> str:
    return form.format(part / whole) if whole > 0 else "-"

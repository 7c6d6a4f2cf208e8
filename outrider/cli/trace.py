"""`outrider trace`: a session's token trees, step by step, and what the target accepted of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.connecting import Address, Profile
from outrider.cli.reporting import INTERRUPTED, reported

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from outrider.client import AsyncClient, StepTree


def trace(
    session: Annotated[str, typer.Argument(help="A session, as `outrider generate` names it.")],
    address: Address = None,
    profile: Profile = None,
    steps: Annotated[int | None, typer.Option(min=1, help="End after so many. [default: when it is closed]")] = None,
) -> None:
    """Draw the trees that a session's steps verify from now on, and what was accepted. Shows the session's text."""
    from rich.console import Console

    from outrider.client import AsyncClient

    with reported():
        try:
            asyncio.run(_follow(Console(), AsyncClient(address, profile=profile), session, steps))
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


async def _follow(console: Console, client: AsyncClient, session: str, steps: int | None) -> None:
    shown = 0
    async with client, aclosing(client.watch(session)) as trees:
        async for tree in trees:
            console.print(drawn(tree), soft_wrap=True)
            shown += 1
            if shown == steps:
                return


def drawn(step: StepTree) -> Tree:
    """A step: its head says what was committed, below it stands each verified node with its chance."""
    from rich.text import Text
    from rich.tree import Tree

    accepted = sum(node.accepted for node in step.nodes)
    head = Text(f"{step.position} ", style="bold").append(_readable(b"".join(step.texts)), style="bold green")
    head.append(
        f"  {len(step.committed)} committed, {accepted} of {len(step.nodes)} accepted, {step.left_out} left out, "
        f"pass {step.forward_s * 1000:.1f} ms, held back {step.waited_s * 1000:.1f} ms, "
        f"gamma {step.depth}, width {step.width}",
        style="dim",
    )
    if step.missed:
        head.append(f"  ({step.missed} steps not shown)", style="yellow")
    tree = Tree(head, guide_style="dim")
    branches: list[Tree] = []
    for node in step.nodes:
        above = branches[node.parent] if node.parent >= 0 else tree
        mark, style = ("✓", "green") if node.accepted else ("✗", "red")
        line = Text(f"{mark} ", style=style).append(_readable(node.text), style=style)
        branches.append(above.add(line.append(f"  {node.chance:.0%} {node.drafter}", style="dim")))
    return tree


def _readable(text: bytes) -> str:
    """Text on one line, with its spaces seen."""
    return repr(text.decode(errors="replace"))

"""`outrider trace`: draws a session's token trees, step by step, and marks the accepted nodes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.command import INTERRUPTED, Address, Profile, reported

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from outrider.client import AsyncClient, StepTree


def trace(
    session: Annotated[str, typer.Argument(help="A session's name, as `outrider generate` prints it.")],
    address: Address = None,
    profile: Profile = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to show. [default: until the session closes]")] = None,
) -> None:
    """Draw the trees that a session's steps verify from now on, and the accepted nodes. Shows the session's text."""
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
            console.print(rendered(tree), soft_wrap=True)
            shown += 1
            if shown == steps:
                return


def rendered(step: StepTree) -> Tree:
    """Return the drawing of a step: the committed tokens at its head, and each verified node with its probability."""
    from rich.text import Text
    from rich.tree import Tree

    accepted, verified = sum(node.accepted for node in step.nodes), len(step.nodes) + step.hidden
    head = Text(f"{step.position} ", style="bold").append(_readable(b"".join(step.texts)), style="bold green")
    head.append(
        f"  {len(step.committed)} committed, {accepted} of {verified} accepted, {step.left_out} left out, "
        f"pass {step.forward_s * 1000:.1f} ms, held back {step.waited_s * 1000:.1f} ms, "
        f"gamma {step.depth}, width {step.width}",
        style="dim",
    )
    if step.hidden:
        head.append(f"  ({step.hidden} rejected nodes not shown: their drafter may hold others' texts)", style="yellow")
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
    """Return a token's text on one line, quoted so that spaces are visible."""
    return repr(text.decode(errors="replace"))

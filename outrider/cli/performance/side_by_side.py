"""Two answers to a question in the terminal, side by side as they arrive: with drafts, and without."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from outrider.cli.generation.drafted_text import DRAFTED, DraftedText
from outrider.cli.verification.compare import Verdict

if TYPE_CHECKING:
    from outrider.client import Chunk, Generation

FRAMES_PER_S = 12


class SideBySide:
    """What the terminal shows of one question. Elsewhere it prints the same once, when both answers are complete."""

    def __init__(self, screen: Console, title: str, question: str) -> None:
        self._title = title
        self._question = question
        self._columns = {True: _Column("with drafts (green: drafted)"), False: _Column("plain")}
        self._verdict: Verdict | None = None
        self._live = Live(console=screen, auto_refresh=False)
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(self._page(), refresh=self._live.console.is_terminal)
        self._live.__exit__(None, None, None)

    def add(self, drafts: bool, chunk: Chunk) -> None:
        """Add a chunk to the answer with or without drafts."""
        self._columns[drafts].add(chunk)
        if time.monotonic() - self._shown_at > 1 / FRAMES_PER_S and self._live.console.is_terminal:
            self._live.update(self._page(), refresh=True)
            self._shown_at = time.monotonic()

    def end(self, drafts: bool, result: Generation) -> None:
        """Show what an answer took."""
        usage = result.usage
        self._columns[
            drafts
        ].figures = f"{usage.completion_tokens} tokens in {usage.steps} steps, {usage.tokens_per_second:.1f} tok/s"

    def judge(self, verdict: Verdict) -> None:
        """Show whether both are the same."""
        self._verdict = verdict

    def _page(self) -> Group:
        answers = Table.grid(expand=True, padding=(0, 2))
        for _ in self._columns:
            answers.add_column(ratio=1)
        columns = self._columns.values()
        answers.add_row(*(Text(column.name, "bold cyan") for column in columns))
        answers.add_row(*(column.text for column in columns))
        answers.add_row(*(Text(column.figures, "dim") for column in columns))
        parts: list[RenderableType] = [Rule(self._title, align="left"), Text(self._question, "dim"), answers]
        if self._verdict is not None:
            style = "bold red" if self._verdict is Verdict.BUG else "bold"
            parts.append(Text(f"both answers: {self._verdict}\n", style))
        return Group(*parts)


class _Column:
    """An answer as far as it has arrived."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = Text()
        self.figures = ""
        self._drafted = DraftedText()
        self._began = 0.0
        self._tokens = 0

    def add(self, chunk: Chunk) -> None:
        for piece, guessed in self._drafted.pieces(chunk):
            self.text.append(piece, DRAFTED if guessed else None)
        if self._tokens:
            speed = self._tokens / (time.monotonic() - self._began)
            self.figures = f"{speed:.1f} tok/s"
        else:
            self._began = time.monotonic()
        self._tokens += len(chunk.token_ids)

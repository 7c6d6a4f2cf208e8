"""`outrider chat`: a conversation in the terminal, with colours for what drafters guessed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.command import Address, Profile, reported
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.client import Client

HELP = """/seed N           the next answers have this seed; without a number, each has a random one
/temperature T    0 is greedy
/plain            without drafts; again: with them
/system TEXT      instructions, in a new conversation
/new              a new conversation
/quit             or Ctrl-D; Ctrl-C ends an answer"""


def chat(
    address: Address = None,
    profile: Profile = None,
    model: Annotated[str, typer.Option(help="May be left out where one model is served.")] = "",
    system: Annotated[str, typer.Option(help="Instructions for the model.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Of every answer. [default: a random one for each]")] = None,
    max_tokens: Annotated[int, typer.Option(help="Limit on an answer; 0: as much as fits into the context.")] = 512,
) -> None:
    """Talk with a model: the tokens that drafters guessed are green. /help lists what else can be typed."""
    import readline  # noqa: F401  # gives the line its history and arrow keys

    from rich.console import Console

    from outrider.client import Client

    screen = Console(highlight=False)
    with reported(), Client(address, profile=profile) as client:
        conversation = _Conversation(client, screen, model, system, temperature, seed, max_tokens)
        screen.print("/help lists what can be typed; Ctrl-D ends.", style="dim")
        while True:
            try:
                line = screen.input("[bold]>[/] ").strip()
            except (EOFError, KeyboardInterrupt):
                screen.print()
                return
            if line == "/quit":
                return
            if line:
                conversation.say(line)


@dataclass(slots=True)
class _Conversation:
    client: Client
    screen: Console
    model: str
    system: str
    temperature: float
    seed: int | None
    max_tokens: int
    plain: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Ask the model, or do what a line that begins with / asks for."""
        try:
            if line.startswith("/"):
                self.screen.print(self._command(*line[1:].partition(" ")[::2]), style="dim", soft_wrap=True)
            else:
                self._ask(line)
        except KeyboardInterrupt:
            self.screen.print("\n(cut short)", style="dim")
        except OutriderError as error:  # the conversation goes on
            self.screen.print(str(error), style="red", markup=False)

    def _command(self, name: str, value: str) -> str:
        """Change a setting. Return what it is now."""
        try:
            match name, value.strip():
                case "seed", number:
                    self.seed = int(number) if number else None
                    return "a random seed for each answer" if self.seed is None else f"seed {self.seed}"
                case "temperature", number if float(number) >= 0:
                    self.temperature = float(number)
                    return f"temperature {self.temperature:g}"
                case "plain", "":
                    self.plain = not self.plain
                    return "without drafts" if self.plain else "with drafts"
                case "system", text:
                    self.system, self.messages = text, []
                    return "a new conversation"
                case "new", "":
                    self.messages = []
                    return "a new conversation"
        except ValueError:
            pass
        return HELP

    def _ask(self, text: str) -> None:
        from outrider.cli.generation.drafted_text import DRAFTED, DraftedText

        asked = [*self.messages, {"role": "user", "content": text}]
        stream = self.client.stream(
            messages=[*([{"role": "system", "content": self.system}] if self.system else ()), *asked],
            model=self.model,
            temperature=self.temperature,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            max_tokens=self.max_tokens or None,
            speculation="off" if self.plain else None,
            logprobs=0,
        )
        drafted = DraftedText()
        with stream:
            for chunk in stream:
                for piece, guessed in drafted.pieces(chunk):
                    self.screen.print(piece, end="", style=DRAFTED if guessed else None, markup=False, soft_wrap=True)
        usage = stream.result.usage
        self.messages = [*asked, {"role": "assistant", "content": stream.result.content}]
        self.screen.print(
            f"\n{usage.completion_tokens} tokens in {usage.steps} steps ({usage.acceptance_length:.2f} a step), "
            f"{usage.tokens_per_second:.0f} tokens/s, seed {stream.result.seed}\n",
            style="dim",
        )

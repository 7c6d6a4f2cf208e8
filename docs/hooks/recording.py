"""`make recording`: draws `outrider top` beside a cluster of this machine, once a second, as one animated SVG.

It pads the reference target to 150M parameters, starts a cluster with it, and has two callers generate meanwhile. The
pictures are shown one after the other; where animations are off, the last one stays.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.console import Console, RenderableType
from rich.segment import Segment

from outrider.cli.generation.top import KEPT, Snapshot, fetch_snapshot, screen
from outrider.cli.performance.load import read_prompts
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.fleet.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "docs" / "images" / "top.svg"
PARAMETERS = 150_000_000
WARM_UP_S, FRAMES = 20, 12  # and a second for each
TEMPERATURES = (0.6, 1.0)  # one for each caller
COLUMNS = 116
WIDTH, HEIGHT, MARGIN = 7.8, 17.0, 18.0  # of a character, of a line, around all
STYLE = """text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d7dcef; white-space: pre }
.b { font-weight: 700; fill: #fff } .d { fill: #8b94b5 } .bar { fill: #66bb6a }"""


async def record() -> list[RenderableType]:
    """The screens of `outrider top`, a second apart. Raises what a cluster raises that does not start."""
    page = f"127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        await asyncio.to_thread(pad_checkpoint, ROOT / "models" / "target", target, parameters=PARAMETERS)
        router = RouterConfig(listen="127.0.0.1:0", metrics=page, models={"target": target})
        verifier = VerifierConfig(model=target, name="target", threads=2, slots=4)
        drafter = DrafterConfig(model=ROOT / "models" / "drafter", threads=1, slots=4)
        config = ClusterConfig(router=router, verifier=[verifier], drafter=[drafter])
        async with LocalCluster(config) as cluster, AsyncClient(cluster.router_address, tls=False) as client:
            callers = [asyncio.create_task(_generate(client, at)) for at in range(len(TEMPERATURES))]
            try:
                return await _watch(page)
            finally:
                for caller in callers:
                    caller.cancel()
                await asyncio.gather(*callers, return_exceptions=True)


async def _generate(client: AsyncClient, caller: int) -> None:
    prompts = read_prompts(ROOT / "examples" / "held_out.jsonl", "#short")
    for number in range(10**6):
        prompt = prompts[(2 * number + caller) % len(prompts)][1]
        await client.generate(prompt, max_tokens=400, temperature=TEMPERATURES[caller], seed=number, ignore_eos=True)


async def _watch(page: str) -> list[RenderableType]:
    seen: deque[Snapshot] = deque(maxlen=KEPT)
    frames: list[RenderableType] = []
    while len(frames) < FRAMES:
        seen.append(await asyncio.to_thread(fetch_snapshot, page))
        if len(seen) > WARM_UP_S:
            frames.append(screen(list(seen)))
            print(f"recording: picture {len(frames)} of {FRAMES}", file=sys.stderr)
        await asyncio.sleep(1)
    return frames


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def drawn(frame: RenderableType) -> list[list[Segment]]:
    """The lines of a screen, as pieces of text that have a style each."""
    return Console(width=COLUMNS, height=100, color_system="truecolor").render_lines(frame, pad=False)


def animation(frames: Sequence[Sequence[Sequence[Segment]]]) -> str:
    """An SVG that shows each frame for a second."""
    lines = max(map(len, frames))
    width, height = round(COLUMNS * WIDTH + 2 * MARGIN), round(lines * HEIGHT + 2 * MARGIN)
    pictures = "\n".join(
        f'<g visibility="{"visible" if at == len(frames) - 1 else "hidden"}">{_animated(at, len(frames))}'
        f"{''.join(_line(line, number) for number, line in enumerate(frame))}</g>"
        for at, frame in enumerate(frames)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>outrider top, while two callers generate</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" rx="10" fill="#12151f"/>\n{pictures}\n</svg>\n'
    )


def _animated(at: int, frames: int) -> str:
    """Hidden, visible for its second, hidden: all but the ends of a time that begins or ends with the whole."""
    times, values = [at / frames, (at + 1) / frames], ["visible", "hidden"]
    if at:
        times, values = [0.0, *times], ["hidden", *values]
    if at == frames - 1:
        times, values = times[:-1], values[:-1]
    given = f'keyTimes="{";".join(f"{it:.4f}" for it in times)}" values="{";".join(values)}"'
    return f'<animate attributeName="visibility" calcMode="discrete" dur="{frames}s" repeatCount="indefinite" {given}/>'


def _line(line: Sequence[Segment], number: int) -> str:
    y = MARGIN + (number + 0.75) * HEIGHT
    return "".join(f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(text)}</text>' for x, kind, text in _pieces(line))


def _pieces(line: Sequence[Segment]) -> Iterator[tuple[float, str, str]]:
    """Of a line: where each word or row of words begins, its class, and its text."""
    column = 0
    for text, style, _ in line:
        kind = ' class="bar"' if "█" in text else ""
        if not kind and style is not None:
            kind = ' class="b"' if style.bold else ' class="d"' if style.dim else ""
        bare = text.lstrip()
        if bare.strip():
            yield MARGIN + (column + len(text) - len(bare)) * WIDTH, kind, bare.rstrip()
        column += len(text)


if __name__ == "__main__":
    OUTPUT.write_text(animation([drawn(frame) for frame in asyncio.run(record())]), encoding="utf-8")

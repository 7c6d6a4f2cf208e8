"""Draws profiles before and after a change as one picture: `python -m bench.cpu.flames BEFORE AFTER TITLE SVG`.

The profiles are folded stacks of one process of `bench.cpu`, for example by `py-spy record --format raw --pid PID`. A
box is as wide as its function's share of what the event loop's thread did outside waiting; its tooltip has the share.

Source: Brendan Gregg, The Flame Graph (ACM Queue 14, 2, 2016).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, LINE, LETTER = 1200, 15, 6.2  # pixels
LOOP, WAITING = (
    "run_until_signal",
    "EpollSelector.select",
)  # functions: above all of the loop's stacks, and at its waits
COLOURS = {  # by the beginning of a file's path
    "router/": "#f4a259",
    "verifier_svc/": "#f4a259",
    "drafter_svc/": "#f4a259",
    "outrider/v1": "#8cb369",
    "outrider/": "#f7d08a",
    "grpc/": "#8cb369",
    "google/": "#8cb369",
    "redis/": "#bc4b51",
}
OTHER = "#c9d6df"


@dataclass(slots=True)
class Flame:
    """A function, below its caller."""

    samples: int = 0
    called: dict[tuple[str, str], Flame] = field(default_factory=dict)  # by name and file


class Box(NamedTuple):
    """Where a function is drawn."""

    depth: int
    left: float  # pixels, as the width
    width: float
    name: str
    file: str
    share: float


def read(profile: Path) -> Flame:
    """Return the tree of a profile's stacks. Raises ValueError for one without stacks of the event loop."""
    root = Flame()
    for line in profile.read_text(encoding="utf-8").splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = stack.split(";")
        below = next((at for at, frame in enumerate(frames) if frame.startswith(LOOP)), None)
        if below is None or frames[-1].startswith(WAITING):
            continue
        flame, samples = root, int(count)
        root.samples += samples
        for frame in frames[below + 1 :]:
            name, _, place = frame.rpartition(" (")
            file = place.rpartition(":")[0].rpartition("site-packages/")[2]
            flame = flame.called.setdefault((name, file), Flame())
            flame.samples += samples
    if not root.samples:
        raise ValueError(f"{profile}: has no stacks of an event loop; record a server of bench.cpu with --format raw")
    return root


def boxes(flame: Flame, pixels: float, left: float = 0.0, depth: int = 0) -> Iterator[Box]:
    """Yield a box for each function that is at least a pixel wide. `pixels`: of one sample."""
    for (name, file), called in sorted(flame.called.items(), key=lambda item: -item[1].samples):
        width = pixels * called.samples
        if width >= 1.0:
            yield Box(depth, left, width, name, file, width / WIDTH)
            yield from boxes(called, pixels, left, depth + 1)
        left += width


def draw(profiles: list[tuple[str, Path]]) -> str:
    """Return a picture in SVG of profiles below one another, each with its title."""
    drawn, top = list[str](), 0
    for title, profile in profiles:
        root = read(profile)
        found = list(boxes(root, WIDTH / root.samples))
        drawn.append(f'<text x="2" y="{top + 14}" font-size="13" font-weight="bold">{escape(title)}</text>')
        drawn += [_rectangle(box, top + 20) for box in found]
        top += 34 + LINE * (1 + max(box.depth for box in found))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        'font-family="monospace" font-size="10"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _rectangle(box: Box, top: int) -> str:
    colour = next((colour for start, colour in COLOURS.items() if box.file.startswith(start)), OTHER)
    y, label = top + LINE * box.depth, escape(box.name[: int(box.width / LETTER)])
    return (
        f"<g><title>{escape(box.name)} ({escape(box.file)}) {box.share:.1%}</title>"
        f'<rect x="{box.left:.1f}" y="{y}" width="{box.width:.1f}" height="{LINE - 1}" fill="{colour}"/>'
        f'<text x="{box.left + 2:.1f}" y="{y + 11}">{label}</text></g>'
    )


def main() -> None:
    before, after, title, picture = sys.argv[1:]
    profiles = [(f"{title}, before", Path(before)), (f"{title}, after", Path(after))]
    Path(picture).write_text(draw(profiles), encoding="utf-8")


if __name__ == "__main__":
    main()

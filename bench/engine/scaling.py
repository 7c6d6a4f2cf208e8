"""Models how a pass scales over ranks with links other than this machine's, from bytes and latencies.

A pass over n rows of a model of W bytes of weights on N devices takes

    W / (N * bandwidth)  +  L * 2 * sum(n * width * 4 bytes)  +  join(embedding)  +  collect(logits)

and a sum over N ranks takes `latency + 2 * (N - 1) / N * bytes / link` (a ring, arXiv 1802.05799), a join or a
collection half of the bytes. Computation is left out: below about 200 rows the time of a GPU's pass is that of reading
its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

HBM = 4.0e12  # bytes per second that an H200 reads in practice; its datasheet has 4.8e12


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices."""

    name: str
    bytes_s: float  # in each direction, of one device
    latency_s: float  # of one small collective


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model."""

    name: str
    weight_bytes: float
    layers: int
    width: int
    vocabulary: int


LINKS = (
    Link("NVLink 4", 450e9, 10e-6),
    Link("PCIe 5 x16", 50e9, 25e-6),
    Link("25 GbE", 3.1e9, 60e-6),
)
SHAPES = (ModelShape("Llama-3.1-8B", 15.0e9, 32, 4096, 128256), ModelShape("Llama-3.1-70B", 139e9, 80, 8192, 128256))
DEGREES = (1, 2, 4, 8)
ROWS = (1, 32)


def pass_seconds(shape: ModelShape, link: Link, degree: int, rows: int) -> tuple[float, float]:
    """Return the seconds of a pass, and the part of them in communication."""
    reading = shape.weight_bytes / (degree * HBM)
    if degree == 1:
        return reading, 0.0
    share = (degree - 1) / degree
    sums = 2 * shape.layers * (link.latency_s + 2 * share * rows * shape.width * 4 / link.bytes_s)
    join = link.latency_s + share * rows * shape.width * 2 / link.bytes_s
    collect = link.latency_s + share * rows * shape.vocabulary * 4 / link.bytes_s
    return reading + sums + join + collect, sums + join + collect


def print_scaling(screen: Console) -> None:
    """Print the table: milliseconds of a pass, and the share of communication."""
    columns = [f"{degree} ranks, {rows} row{'' if rows == 1 else 's'}" for degree in DEGREES for rows in ROWS]
    table = Table("model", "link", *columns, title=f"modelled, {HBM / 1e12:g} TB/s of weights a device")
    for shape in SHAPES:
        for link in LINKS:
            cells = []
            for degree in DEGREES:
                for rows in ROWS:
                    seconds, communication = pass_seconds(shape, link, degree, rows)
                    cells.append(f"{1e3 * seconds:.2f}" + (f" ({communication / seconds:.0%})" if degree > 1 else ""))
            table.add_row(shape.name, link.name, *cells)
    screen.print(table)

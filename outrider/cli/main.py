"""The command `outrider`. Each command imports its modules when it runs, so that `--help` is quick."""

from __future__ import annotations

import typer

from outrider.cli.bench import bench
from outrider.cli.certs import certs
from outrider.cli.demo import demo
from outrider.cli.describe import describe
from outrider.cli.gateway import gateway
from outrider.cli.generate import generate
from outrider.cli.index import index
from outrider.cli.keys import keys
from outrider.cli.pad import pad
from outrider.cli.plan import plan
from outrider.cli.serve import drafter, router, verifier
from outrider.cli.simulate import simulate
from outrider.cli.top import top
from outrider.cli.trace import trace
from outrider.cli.train import train
from outrider.cli.up import up
from outrider.cli.verify import verify

app = typer.Typer(
    help="Distributed speculative decoding that never changes a token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # otherwise rich would parse "[default: 1]" as a style
)
for command in (
    demo,
    up,
    generate,
    top,
    trace,
    bench,
    verify,
    router,
    verifier,
    drafter,
    gateway,
    describe,
    pad,
    index,
    simulate,
    plan,
    certs,
):
    app.command()(command)
app.add_typer(keys, name="keys")
app.add_typer(train, name="train")

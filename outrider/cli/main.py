"""The command `outrider`. Each command imports its modules when it runs, so that `--help` is quick."""

from __future__ import annotations

import typer

from outrider.cli.generation.chat import chat
from outrider.cli.generation.generate import generate
from outrider.cli.generation.top import top
from outrider.cli.generation.trace import trace
from outrider.cli.models.adapters import adapters
from outrider.cli.models.index import index
from outrider.cli.models.pad import pad
from outrider.cli.models.quantize import quantize
from outrider.cli.models.train import train
from outrider.cli.performance.bench import bench
from outrider.cli.performance.demo import demo
from outrider.cli.performance.plan import plan
from outrider.cli.performance.simulate import simulate
from outrider.cli.servers.certs import certs
from outrider.cli.servers.describe import describe
from outrider.cli.servers.gateway import GATEWAY, gateway
from outrider.cli.servers.keys import keys
from outrider.cli.servers.redis_acl import redis_acl
from outrider.cli.servers.serve import DRAFTER, ROUTER, VERIFIER, drafter, router, verifier
from outrider.cli.servers.up import up
from outrider.cli.verification.verify import verify

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
    chat,
    top,
    trace,
    bench,
    verify,
    describe,
    pad,
    quantize,
    index,
    simulate,
    plan,
    certs,
    redis_acl,
):
    app.command()(command)
for server, flags in ((router, ROUTER), (verifier, VERIFIER), (drafter, DRAFTER), (gateway, GATEWAY)):
    app.command(cls=flags)(server)
app.add_typer(adapters, name="adapters")
app.add_typer(keys, name="keys")
app.add_typer(train, name="train")

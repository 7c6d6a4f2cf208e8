"""`python -m outrider.cli`: the command line without an installed script."""

from outrider.cli.main import app

app(prog_name="outrider")

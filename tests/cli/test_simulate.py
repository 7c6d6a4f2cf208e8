"""`outrider simulate` compares policies, and says what is wrong with a scenario."""

import re
from pathlib import Path

from typer.testing import CliRunner

from outrider.cli.main import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulations" / "shifting_load.toml"


def test_it_compares_policies_on_the_example() -> None:
    flags = ["--policy", "off", "--policy", "fixed:4", "--policy", "goodput"]
    done = CliRunner().invoke(app, ["simulate", str(EXAMPLE), *flags])
    assert done.exit_code == 0, done.output
    assert "drafters busy" in done.output
    last = done.output.strip().splitlines()[-1]
    assert re.fullmatch(
        r"simulate: goodput_over_best_fixed=\d\.\d\d goodput_over_off_at_worst=\d\.\d\d switches_per_s=\d\.\d\d", last
    )


def test_a_policy_that_there_is_not_is_refused_with_those_there_are() -> None:
    for name, told in (("best", "goodput"), ("fixed:0", "fixed:DEPTH"), ("ema:3", "fixed:DEPTH")):
        done = CliRunner().invoke(app, ["simulate", str(EXAMPLE), "--policy", name])
        assert done.exit_code == 2
        assert told in done.output
    assert CliRunner().invoke(app, ["simulate", "nowhere.toml"]).exit_code == 2

"""`outrider simulate` compares policies, and reports what is wrong with a scenario."""

import re
from pathlib import Path

from typer.testing import CliRunner

from outrider.cli.main import app

EXAMPLE = Path(__file__).parents[3] / "examples" / "simulations" / "shifting_load.toml"


def test_simulate_compares_policies(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(EXAMPLE.read_text().replace("seconds = 30", "seconds = 3"))
    flags = ["--policy", "off", "--policy", "rounds:4", "--policy", "fixed:4", "--policy", "goodput"]
    done = CliRunner().invoke(app, ["simulate", str(scenario), *flags])
    assert done.exit_code == 0, done.output
    assert re.search(r"^goodput +\d+ ", done.output, re.MULTILINE)
    last = done.output.strip().splitlines()[-1]
    figures = dict(item.split("=") for item in last.removeprefix("simulate: ").split())
    assert list(figures) == [
        "goodput_over_best_rounds",
        "goodput_over_best_fixed",
        "goodput_over_off_at_worst",
        "switches_per_s",
    ]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    for name, fragment in (("best", "goodput"), ("fixed:0", "fixed:DEPTH"), ("ema:3", "fixed:DEPTH")):
        done = CliRunner().invoke(app, ["simulate", str(EXAMPLE), "--policy", name])
        assert done.exit_code == 2
        assert fragment in done.output
    assert CliRunner().invoke(app, ["simulate", "nowhere.toml"]).exit_code == 2


def test_plan_prints_how_many_drafters_are_enough(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    text = """
[deployment]
level_ms = 3.0
[[kind]]
name = "text"
agreement = {agreement}
[[phase]]
seconds = 10
kinds = ["text"]
callers = 2
"""
    plans = {}
    for agreement in (0.9, 0.0):
        scenario.write_text(text.format(agreement=agreement))
        done = CliRunner().invoke(app, ["plan", str(scenario), "--most", "2"])
        assert done.exit_code == 0, done.output
        assert "Assumed: 1 verifier with 32 slots" in " ".join(done.output.split())
        last = done.output.strip().splitlines()[-1]
        match = re.fullmatch(r"plan: drafters=(\d+) speedup=(\d\.\d\d) tokens_per_s=\d+\.\d", last)
        assert match, last
        plans[agreement] = int(match[1]), float(match[2])
    assert plans[0.9][0] >= 1
    assert plans[0.9][1] > 1.3
    assert plans[0.0] == (0, 1.0)  # drafters that never agree are not worth buying

"""Flags, configuration sections and the command lines of a cluster's processes agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pydantic import ByteSize
from typer.testing import CliRunner

from outrider.cli import flags as section_flags
from outrider.cli.command import parse_count
from outrider.cli.main import app
from outrider.config import DrafterConfig, GatewayConfig, RouterConfig, Section, VerifierConfig
from outrider.fleet.process import flagged, flags
from outrider.rpc.lifecycle import PARENT

SECTIONS: dict[str, Section] = {
    "router": RouterConfig(
        listen="0.0.0.0:71",
        ca=Path("/ca.pem"),
        cert=Path("/cert.pem"),
        key=Path("/key.pem"),
        metrics="127.0.0.1:9",
        log_format="json",
        health="0.0.0.0:73",
        models={"a": Path("/x"), "b": Path("/y=z")},
        policy="fixed",
        depth=3,
        width=2,
        nodes=9,
        wait_us=17,
        overlap=True,
        drafters_per_session=2,
        tiers="all",
        standby=True,
        zone="here",
        max_sessions=4,
        max_request_bytes=77,
        max_calls=78,
        max_connections=79,
        share_port=True,
        trust_traces=True,
        queue=11,
        queue_per_tenant=12,
        queue_s=13.0,
        tenant_sessions=14,
        tenant_requests_per_s=1.5,
        tenant_tokens_per_min=16,
        tenant_stored_sessions=17,
        tenant_stored_bytes=ByteSize(18),
        address_requests_per_s=2.5,
        template_s=0.3,
        tool_formats={"a": "hermes", "b": "mistral11"},
        drain_s=1.0,
        window=5,
        session_ttl_s=6,
        failover_wait_s=8.0,
        lease_s=0.5,
        resume_ttl_s=7.0,
        adapter_loaders=("acme", "ops"),
        adapter_publishers=("ops",),
        teaches=("acme", "*"),
        auth="keys",
    ),
    "verifier": VerifierConfig(
        model=Path("/m"),
        kv_memory=ByteSize(2**30),
        kv_dtype="int8",
        name="n",
        listen="127.0.0.1:72",
        zone="there",
        advertise="h:1",
        ca=Path("/ca.pem"),
        cert=Path("/cert.pem"),
        key=Path("/key.pem"),
        metrics="127.0.0.1:9",
        log_format="json",
        health="0.0.0.0:73",
        backend="transformers",
        dtype="float32",
        device="cuda:1",
        numerics="invariant",
        threads=2,
        slots=3,
        context=99,
        prefill_chunk=16,
        tensor_parallel=2,
        spread=True,
        ray="auto",
        join_s=33.0,
        cpus=0.5,
        gpus=1.0,
        resources={"edge": 2.0},
        heartbeat_s=0.25,
        drain_s=0.5,
        max_nodes=7,
        adapters=Path("/a"),
        max_adapters=3,
        lookup="suffix",
        store=Path("/s"),
        store_public=True,
        heads=Path("/h"),
        features=Path("/f"),
        arm="turns 1/4",
        trusted_drafters=("edge-1", "drafter"),
    ),
    "drafter": DrafterConfig(
        model=Path("/m"),
        kv_memory=ByteSize(2**29),
        kv_dtype="int8",
        name="n",
        listen="127.0.0.1:72",
        zone="there",
        advertise="h:1",
        ca=Path("/ca.pem"),
        cert=Path("/cert.pem"),
        key=Path("/key.pem"),
        metrics="127.0.0.1:9",
        log_format="json",
        health="0.0.0.0:73",
        adapters=Path("/a"),
        max_adapters=3,
        backend="native",
        dtype="int4",
        layers=3,
        skip=(4, 1),
        device="cuda:1",
        numerics="invariant",
        threads=2,
        slots=3,
        context=99,
        prefill_chunk=16,
        tensor_parallel=2,
        spread=True,
        ray="auto",
        join_s=33.0,
        cpus=0.5,
        gpus=1.0,
        resources={"edge": 2.0},
        heartbeat_s=0.25,
        drain_s=0.5,
        heads=Path("/h"),
        drafts="retrieval",
        target=Path("/t"),
        any_target=True,
        learns=True,
        store=Path("/s"),
        store_public=True,
        level_nodes=6,
        tree="eagle-2",
        via="h:2",
        connect="h:1",
        candidates=(Path("/c"), Path("/d")),
        tier=3,
        above=1,
    ),
}


SECTIONS["gateway"] = GatewayConfig(
    listen="0.0.0.0:73",
    router="h:7070",
    cert=Path("/cert.pem"),
    key=Path("/key.pem"),
    ca=Path("/ca.pem"),
    tls=True,
    server_name="n",
    max_request_bytes=88,
    max_total_bytes=99,
    metrics="127.0.0.1:9",
    serve_metrics=True,
    max_requests=3,
    max_connections=4,
    trust_traces=True,
    cors_origins=("https://a.example", "https://b.example"),
    keep_alive_s=6.0,
    body_s=5.0,
    timeout_s=9.0,
    drain_s=2.0,
    log_format="json",
)


def parsed(role: str, arguments: list[str]) -> Section:
    """What the command makes of a command line, without running the server."""
    command = typer.main.get_command(app).commands[role]  # type: ignore[attr-defined]
    redis = [] if role == "gateway" else ["--redis", "redis://x"]
    context = command.make_context(role, [*redis, *arguments])
    found: Section = section_flags.section(context)
    return found


@pytest.mark.parametrize("role", SECTIONS)
def test_every_field_of_a_section_survives_the_command_line(role: str) -> None:
    section = SECTIONS[role]
    defaults = type(section).model_construct()
    for field in flagged(section):
        assert getattr(section, field) != getattr(defaults, field, None), f"{field} must differ to be tested"
    assert parsed(role, flags(section)) == section


def test_defaults_survive_the_command_line_too() -> None:
    minimal = VerifierConfig(model=Path("/m"))
    assert parsed("verifier", flags(minimal)) == minimal
    assert parsed("router", ["--model", "a=/x"]) == RouterConfig(models={"a": Path("/x")})


@pytest.mark.parametrize("role", SECTIONS)
def test_the_help_describes_each_flag_and_its_default(role: str) -> None:
    command = typer.main.get_command(app).commands[role]  # type: ignore[attr-defined]
    context = command.make_context(role, ["--help"], resilient_parsing=True)
    command.describe(context)
    shown = {parameter.name: parameter.help for parameter in command.get_params(context)}
    for field in flagged(SECTIONS[role]):
        default = type(SECTIONS[role]).model_fields[field].default
        assert len(shown[field].split()) > 2, field
        if isinstance(default, str | int | float) and default not in (False, ""):
            assert f"[default: {default}]" in shown[field] or ("[default: " not in shown[field] and not default), field


def test_a_unit_of_bytes_is_no_unit_of_a_count() -> None:
    found = parsed("verifier", ["--model", "m", "--kv-memory", "100B", "--slots", "2K"])
    assert (found.kv_memory, found.slots) == (100, 2000)  # type: ignore[attr-defined]


def test_counts_may_be_written_with_a_unit() -> None:
    assert [parse_count(text) for text in ("150M", "1.5b", "2k", "7")] == [150_000_000, 1_500_000_000, 2_000, 7]


def test_the_help_loads_no_heavy_package() -> None:
    script = (
        "import sys, outrider.cli.main\n"
        "heavy = {'torch', 'grpc', 'redis', 'pydantic', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "up", "generate", "router", "verifier", "drafter", "pad"):
        assert f" {command} " in result.output


def test_a_server_whose_parent_has_exited_does_not_start() -> None:
    environment = {**os.environ, PARENT: "1", "REDIS_URL": "redis://127.0.0.1:1"}
    command = [sys.executable, "-m", "outrider.cli", "drafter", "--model", "models/drafter"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize(
    "chosen", [[], ["--parameters", "20M", "--shape", "tiny"], ["--shape", "tiny", "--vocabulary", "6000"]]
)
def test_padding_is_to_a_size_or_to_a_shape_or_to_a_vocabulary(chosen: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pad", "models/drafter", str(tmp_path / "padded"), *chosen])
    assert result.exit_code == 2
    assert "one of --parameters, --shape and" in result.output
    assert not (tmp_path / "padded").exists()

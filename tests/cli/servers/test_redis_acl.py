"""`outrider redis-acl`: its lines make the users that they are to make, and hold no password."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.store.redis.acl import ACL_ROLES
from tests.store.server import Server

PASSWORDS = {role: f"long and random, of {role}" for role in ACL_ROLES}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, exit_code: int = 0) -> tuple[str, str]:
    for role, password in PASSWORDS.items():
        monkeypatch.setenv(f"OUTRIDER_REDIS_PASSWORD_{role.upper()}", password)
    result = CliRunner().invoke(app, ["redis-acl", *arguments])
    assert result.exit_code == exit_code, result.output
    assert not any(password and password in result.output for password in PASSWORDS.values())
    return result.stdout, result.stderr


def let_in(server: Server) -> set[str]:
    found = set()
    for role, password in PASSWORDS.items():
        with redis.Redis.from_url(server.url, username=f"outrider-{role}", password=password) as client:
            try:
                assert client.ping()
                found.add(role)
            except redis.AuthenticationError:
                pass
    return found


def test_the_printed_lines_are_an_aclfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, stderr = run(monkeypatch)
    assert "user default off" in stderr
    file = tmp_path / "users.acl"
    file.write_text("user default on nopass ~* &* +@all\n" + lines, encoding="utf-8")
    with Server(tmp_path, aclfile=file) as server:
        assert let_in(server) == set(ACL_ROLES)


def test_the_printed_commands_configure_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, stderr = run(monkeypatch, "--setuser", "--role", "drafter", "--role", "keys")
    assert stderr == ""
    with Server(tmp_path) as server, redis.Redis.from_url(server.url) as admin:
        for line in commands.splitlines():
            admin.execute_command(*line.split())
        assert let_in(server) == {"drafter", "keys"}


def test_a_user_without_a_password_is_named_and_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSWORDS, "verifier", "")
    lines, stderr = run(monkeypatch, "--role", "verifier")
    assert "outrider-verifier has no password" in stderr
    assert lines.startswith("user outrider-verifier on resetchannels -@all ")


def test_an_unknown_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stderr = run(monkeypatch, "--role", "gateway", exit_code=2)
    assert "gateway is none of" in stderr

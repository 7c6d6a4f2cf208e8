"""`outrider certs` and `outrider keys`: what they write, and what they refuse."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.rpc.drafter_ids import new_drafter_id
from outrider.rpc.tls import NAMES, Tls


def run(*arguments: str, exit_code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output
    return result.stdout, result.stderr


def test_each_role_gets_a_certificate_and_a_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    run("certs", str(folder), "--host", "router.example", "--host", "192.0.2.7")
    for role in NAMES:
        assert Tls.read(folder / "ca.pem", folder / f"{role}.pem", folder / f"{role}.key") is not None
    keys = list(folder.glob("*.key"))
    assert len(keys) == len(NAMES) + 1
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_a_drafter_with_a_name_gets_a_certificate_of_its_own(tmp_path: Path) -> None:
    run("certs", str(tmp_path), "--drafter", "alice", "--drafter", "b" * 63)
    for name in ("alice", "b" * 63):
        read = Tls.read(tmp_path / "ca.pem", tmp_path / f"drafter-{name}.pem", tmp_path / f"drafter-{name}.key")
        assert read is not None
        assert new_drafter_id(read.cert).startswith(f"{name}-")


@pytest.mark.parametrize("name", ["", "Alice", "a.b", "-a", "a-", "../x", "b" * 64])
def test_a_name_that_no_certificate_can_have_is_refused(tmp_path: Path, name: str) -> None:
    _, stderr = run("certs", str(tmp_path), "--drafter", name, exit_code=2)
    assert "lower-case letters" in stderr
    assert not list(tmp_path.iterdir())


def test_existing_certificates_are_overwritten_only_with_force(tmp_path: Path) -> None:
    run("certs", str(tmp_path))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    _, stderr = run("certs", str(tmp_path), exit_code=2)
    assert "--force" in stderr
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    run("certs", str(tmp_path), "--force")
    assert all(file.read_bytes() != content for file, content in before.items())
    assert {stat.S_IMODE(key.stat().st_mode) for key in tmp_path.glob("*.key")} == {0o600}


def names_and_days(file: Path) -> tuple[set[str], float]:
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    return {str(name.value) for name in names}, left / timedelta(days=1)


def test_renewed_certificates_keep_their_ca_and_their_names(tmp_path: Path) -> None:
    folder, other = tmp_path / "ours", tmp_path / "other"
    run("certs", str(folder), "--host", "router.example", "--host", "192.0.2.7")
    run("certs", str(other))
    (folder / "foreign.pem").write_bytes((other / "drafter.pem").read_bytes())
    names, days = names_and_days(folder / "router.pem")
    assert days == pytest.approx(30, abs=0.1)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    printed, _ = run("certs", str(folder), "--renew", "--days", "7", "--host", "new.example", "--host", "192.0.2.7")
    kept = {file.name for file, content in before.items() if file.read_bytes() == content}
    assert kept == {"ca.pem", "ca.key", "foreign.pem"}
    assert "router.key" in printed
    assert names_and_days(folder / "router.pem") == (names | {"new.example"}, pytest.approx(7, abs=0.1))
    assert names_and_days(folder / "verifier.pem")[0] == set(NAMES["verifier"])
    for role in NAMES:
        assert Tls.read(folder / "ca.pem", folder / f"{role}.pem", folder / f"{role}.key") is not None
    assert {stat.S_IMODE(key.stat().st_mode) for key in folder.glob("*.key")} == {0o600}


def test_certificates_are_renewed_with_the_ca_s_own_key_alone(tmp_path: Path) -> None:
    folder, other = tmp_path / "ours", tmp_path / "other"
    run("certs", str(folder))
    run("certs", str(other))
    key = folder / "ca.key"
    own = key.read_bytes()
    for content, problem in (
        (None, "where the CA's key is kept"),
        ((other / "ca.key").read_bytes(), "the CA's own key"),
    ):
        key.unlink()
        if content is not None:
            key.write_bytes(content)
        before = (folder / "router.pem").read_bytes()
        assert problem in " ".join(run("certs", str(folder), "--renew", exit_code=2)[1].split())
        assert (folder / "router.pem").read_bytes() == before
        key.touch()
    key.write_bytes(own)
    assert "make a new one by --force" in run("certs", str(folder), "--renew", "--days", "4000", exit_code=2)[1]
    assert "choose one" in run("certs", str(folder), "--renew", "--force", exit_code=2)[1]


def test_keys_are_added_listed_and_revoked(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    secret, stderr = run("keys", "add", "acme", "--name", "ci", "--days", "30")
    assert secret.startswith("outrider_")
    assert "acme" in stderr
    assert secret.strip() not in stderr
    listed, _ = run("keys", "list")
    assert "acme  ci" in listed
    assert secret.strip() not in listed
    key_id = listed.split()[0]
    assert key_id in run("keys", "revoke", key_id)[0]
    assert run("keys", "list")[0] == ""
    assert "there is no key" in run("keys", "revoke", key_id, exit_code=2)[1]


@pytest.mark.parametrize("url", ["redis://:hidden@h:1", "redis://u:hidden@h:1", "unix:///s?password=hidden"])
def test_a_password_is_not_taken_from_the_command_line(url: str) -> None:
    _, stderr = run("keys", "list", "--redis", url, exit_code=2)
    assert "REDIS_URL" in stderr
    assert "hidden" not in stderr

"""What a client sends and believes: from its arguments, or from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

import outrider
from outrider.client._access import Access
from outrider.errors import ConfigError
from outrider.rpc.certificates import make

KEY = "outrider_abc"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_API_KEY", "OUTRIDER_CA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder)
    return folder / "ca.pem"


def test_key_and_ca_come_from_the_environment_unless_they_are_given(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Access.of("h:1", None, None, None) == Access()
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)
    monkeypatch.setenv("OUTRIDER_CA", str(ca))
    from_environment = Access.of("h:1", None, None, None)
    assert from_environment.metadata == (("authorization", f"Bearer {KEY}"),)
    assert from_environment.tls is not None
    assert from_environment.tls.ca == ca.read_bytes()
    assert Access.of("h:1", "other", None, False) == Access(metadata=(("authorization", "Bearer other"),))
    assert KEY not in repr(from_environment)


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "localhost:1", "[::1]:1", "ipv4:127.0.0.1:1,127.0.0.2:2"])
def test_a_key_may_go_in_the_clear_to_this_machine(address: str) -> None:
    assert Access.of(address, KEY, None, None).tls is None


@pytest.mark.parametrize("address", ["router:7070", "192.0.2.1:1", "ipv4:127.0.0.1:1,192.0.2.1:2", "dns:///router:1"])
def test_a_key_does_not_go_in_the_clear_to_another_machine_unless_told(address: str) -> None:
    with pytest.raises(ConfigError, match="OUTRIDER_CA") as caught:
        Access.of(address, KEY, None, None)
    assert KEY not in str(caught.value)
    assert Access.of(address, KEY, None, False).tls is None
    with pytest.raises(ConfigError):
        outrider.Client(address, api_key=KEY)


def test_tls_without_a_ca_believes_whom_the_web_does() -> None:
    access = Access.of("h:1", KEY, None, True)
    assert access.tls is not None
    assert access.tls.ca is None


@pytest.mark.parametrize("key", ["two words", "line\n", "é"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        Access.of("localhost:1", key, None, None)
    assert key not in str(caught.value)


def test_a_ca_that_is_none_is_named(tmp_path: Path, ca: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.pem"):
        Access.of("h:1", None, tmp_path / "none.pem", None)
    with pytest.raises(ConfigError, match="tls: is False"):
        Access.of("h:1", None, ca, False)

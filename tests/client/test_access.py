"""What a client sends and trusts: from its arguments, else the environment, else a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.client._connection import Access, Connection, resolve
from outrider.errors import ConfigError
from outrider.rpc.certificates import make

KEY = "outrider_abc"
VARIABLES = ("ROUTER", "API_KEY", "API_KEY_FILE", "CA", "SERVER_NAME", "PROFILE", "PROFILES")
FILE = """
[default]
router = "usual:1"

[prod]
router = "prod:1"
ca = "ca.pem"
api_key_file = "prod.key"
server_name = "router.outrider"

[open]
router = "open:1"
tls = false
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"OUTRIDER_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder)
    return folder / "ca.pem"


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """Where the file of profiles is looked for, beside the files that it names."""
    folder = tmp_path / "home" / ".config" / "outrider"
    folder.mkdir(parents=True)
    (folder / "prod.key").write_text(f"{KEY}\n")
    (folder / "profiles.toml").write_text(FILE)
    return folder / "profiles.toml"


def test_a_client_without_settings_connects_to_this_machines_router() -> None:
    assert resolve() == Connection("127.0.0.1:7070")
    assert Access.of(resolve()) == Access()


def test_key_and_ca_default_to_the_environment(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ROUTER", "env:1")
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)
    monkeypatch.setenv("OUTRIDER_CA", str(ca))
    monkeypatch.setenv("OUTRIDER_SERVER_NAME", "n")
    connection = resolve()
    assert connection == Connection("env:1", KEY, ca, None, "n")
    access = Access.of(connection)
    assert access.metadata == (("authorization", f"Bearer {KEY}"),)
    assert access.tls is not None
    assert access.tls.ca == ca.read_bytes()
    assert KEY not in repr(access) + repr(connection)
    assert resolve("h:1", api_key="other", tls=False, server_name="") == Connection("h:1", "other", None, False)
    assert resolve("h:1", api_key="") == Connection("h:1", "", ca, None, "n")


def test_a_profile_is_taken_by_its_name_and_the_default_one_where_nothing_names_a_router(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prod = Connection("prod:1", KEY, profiles.parent / "ca.pem", None, "router.outrider")
    assert resolve() == Connection("usual:1")
    assert resolve(profile="prod") == prod
    assert resolve(profile="open") == Connection("open:1", tls=False)
    monkeypatch.setenv("OUTRIDER_PROFILE", "prod")
    assert resolve() == prod
    assert resolve(profile="open") == Connection("open:1", tls=False)
    assert resolve(profile="prod", tls=False, api_key="k") == Connection("prod:1", "k", None, False, "router.outrider")
    monkeypatch.setenv("OUTRIDER_ROUTER", "env:1")
    monkeypatch.setenv("OUTRIDER_CA", "/env.pem")
    assert resolve() == Connection("env:1", KEY, Path("/env.pem"), None, "router.outrider")
    assert resolve(profile="open") == Connection("open:1", tls=False)  # an argument is stronger than the environment
    other = profiles.parent / "other.toml"
    other.write_text('[prod]\nrouter = "other:1"')
    monkeypatch.setenv("OUTRIDER_PROFILES", str(other))
    monkeypatch.delenv("OUTRIDER_ROUTER")
    assert resolve().address == "other:1"


def test_a_profiles_key_is_sent_to_no_other_router_unless_the_call_names_the_profile(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles.write_text('[default]\nrouter = "usual:1"\napi_key_file = "prod.key"\n' + FILE.partition('1"')[2])
    assert resolve().api_key == KEY
    monkeypatch.setenv("OUTRIDER_ROUTER", "env:1")
    assert resolve() == Connection("env:1")
    monkeypatch.setenv("OUTRIDER_PROFILE", "prod")
    assert resolve().api_key == KEY
    assert resolve("h:1") == Connection("h:1")
    assert resolve("h:1", profile="prod").api_key == KEY


def test_a_key_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(ConfigError, match=r"OUTRIDER_API_KEY_FILE: .*/key cannot be read: No such file"):
        resolve()
    (tmp_path / "key").write_text(" \n")
    with pytest.raises(ConfigError, match=r"OUTRIDER_API_KEY_FILE: .* is empty"):
        resolve()
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert resolve().api_key == KEY
    assert resolve(api_key="other").api_key == "other"
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)
    with pytest.raises(ConfigError, match="unset one"):
        resolve()


@pytest.mark.parametrize(
    ("text", "named", "problem"),
    [
        ("[prod", {}, "profiles.toml: not valid TOML"),
        ("[a]\n[b]\n", {"profile": "prod"}, "profiles.toml: has no profile 'prod'; there are: a, b"),
        ('prod = "x"', {"profile": "prod"}, "has no profile 'prod'; there are: none"),
        ('[default]\nhost = "x"', {}, "profiles.toml: default.host: unknown key; there are: router, "),
        ('[default]\napi_key = "x"', {}, "default.api_key: a key does not belong here"),
        ("[default]\nrouter = 7070", {}, "default.router: is 7070, must be text"),
        ("[default]\ntls = 1", {}, "default.tls: is 1, must be true or false"),
        ('[default]\ntls = false\nca = "ca.pem"', {}, "default: tls is false, and there is a `ca`"),
        ('[default]\napi_key_file = "none"', {}, "profiles.toml: default.api_key_file: .*none cannot be read"),
        ('[default]\nrouter = "x"', {}, "address: is 'x', must be HOST:PORT"),
    ],
)
def test_an_error_in_a_profile_names_the_file_and_the_key(
    profiles: Path, text: str, named: dict[str, Any], problem: str
) -> None:
    profiles.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        resolve(**named)


def test_a_profile_file_that_is_named_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"profiles.toml: cannot be read: No such file"):
        resolve(profile="prod")
    monkeypatch.setenv("OUTRIDER_PROFILES", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none.toml: cannot be read"):
        resolve()
    assert resolve("h:1") == Connection("h:1")


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "localhost:1", "[::1]:1", "ipv4:127.0.0.1:1,127.0.0.2:2"])
def test_a_key_may_be_sent_in_the_clear_to_this_machine(address: str) -> None:
    assert Access.of(resolve(address, api_key=KEY)).tls is None


@pytest.mark.parametrize("address", ["router:7070", "192.0.2.1:1", "ipv4:127.0.0.1:1,192.0.2.1:2", "dns:///router:1"])
def test_a_key_is_not_sent_in_the_clear_to_another_machine_unless_tls_is_off(address: str) -> None:
    with pytest.raises(ConfigError, match="OUTRIDER_CA") as caught:
        Access.of(resolve(address, api_key=KEY))
    assert KEY not in str(caught.value)
    assert Access.of(resolve(address, api_key=KEY, tls=False)).tls is None
    with pytest.raises(ConfigError):
        outrider.Client(address, api_key=KEY)


def test_tls_without_a_ca_trusts_the_cas_of_the_web() -> None:
    access = Access.of(resolve("h:1", api_key=KEY, tls=True))
    assert access.tls is not None
    assert access.tls.ca is None


@pytest.mark.parametrize("key", ["two words", "line\n", "é"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        Access.of(resolve("localhost:1", api_key=key))
    assert key not in str(caught.value)


def test_a_missing_ca_file_is_named(tmp_path: Path, ca: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.pem"):
        Access.of(resolve("h:1", ca=tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="tls: is False"):
        resolve("h:1", ca=ca, tls=False)

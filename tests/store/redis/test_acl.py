"""Each role's user in Redis may do what the role does, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from outrider.errors import Unavailable
from outrider.store.api_keys import Keys
from outrider.store.redis import acl
from outrider.store.redis.acl import ACL_ROLES, GRANTS, AclRole, Grant, rules, setuser_command, user_line, user_name
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import EmbeddedRedis
from tests.store.cluster import redis_cluster
from tests.store.role_work import WORK, denied, works
from tests.store.server import Server

PASSWORD = "long and random"
NEEDED = [
    pytest.param(role, grant, command, id=f"{role} {command} {grant.keys}")
    for role, grants in GRANTS.items()
    for grant in grants
    for command in grant.commands.split()
]


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedRedis]:
    """A server of this file's own, because its users change."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def emptied(own: EmbeddedRedis) -> Iterator[EmbeddedRedis]:
    with redis.Redis.from_url(own.url) as admin:
        admin.flushall()
        admin.script_flush()
        admin.acl_log_reset()
        yield own


@pytest.mark.parametrize("role", ACL_ROLES)
async def test_a_roles_user_has_every_right_that_the_role_needs(emptied: EmbeddedRedis, role: AclRole) -> None:
    await works(role, emptied.url_of(role), emptied.url)
    with redis.Redis.from_url(emptied.url) as admin:
        assert denied(admin) == []


async def test_a_roles_user_has_its_rights_on_a_redis_cluster_too(tmp_path: Path) -> None:
    with redis_cluster(tmp_path) as ports:
        nodes = [redis.Redis(port=port) for port in ports]
        for node in nodes:
            for role in ACL_ROLES:
                node.execute_command(*setuser_command(role, "password").split())
        for role in ACL_ROLES:
            url = f"redis+cluster://{user_name(role)}:password@127.0.0.1:{ports[0]}"
            await works(role, url, f"redis+cluster://127.0.0.1:{ports[0]}")
        for node in nodes:
            assert denied(node) == []
            node.close()


@pytest.mark.parametrize(("role", "grant", "command"), NEEDED)
async def test_every_command_granted_to_a_role_is_needed(
    emptied: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, role: AclRole, grant: Grant, command: str
) -> None:
    fewer = " ".join(one for one in grant.commands.split() if one != command)
    less = tuple(Grant(one.keys, fewer) if one is grant else one for one in GRANTS[role])
    with redis.Redis.from_url(emptied.url) as admin:
        monkeypatch.setitem(GRANTS, role, less)
        admin.execute_command(*setuser_command(role).split())
        monkeypatch.undo()
        try:
            with pytest.raises(Unavailable, match=r"does not permit this .*`outrider redis-acl`"):
                await works(role, emptied.url_of(role), emptied.url)
        finally:
            admin.execute_command(*setuser_command(role).split())


SECRETS = [
    "GET outrider:{s1}:session",
    "HGETALL outrider:{s1}:session",
    "XRANGE outrider:{s1}:log - +",
    "HGETALL outrider:{keys}",
    "HGET outrider:{keys} x",
    "SCAN 0",
    "KEYS *",
    "RANDOMKEY",
    "MONITOR",
    "DUMP outrider:{s1}:log",
    "SORT outrider:{tickets}:keys GET outrider:{keys}",
    "EVAL return 0",
    "EVALSHA 0 0",
    "SUBSCRIBE x",
    "XRANGE outrider:{examples}:target:00 - +",
    "XREAD STREAMS outrider:{examples}:target:00 0",
    "GET outrider:idempotency:x",
]
TICKETS = [
    "ZADD outrider:{tickets}:keys 1 x",
    "DEL outrider:{tickets}:keys",
    "SET outrider:{tickets}:keys x",
    "RENAME outrider:{workers}:drafter-ids outrider:{tickets}:keys",
    "COPY outrider:{workers}:drafter-ids outrider:{tickets}:keys",
    "ZRANGESTORE outrider:{tickets}:keys x 0 -1",
    "EXPIRE outrider:{tickets}:keys 0",
]
SERVER = [
    "FLUSHALL",
    "CONFIG GET *",
    "ACL LIST",
    "ACL SETUSER outrider-drafter allkeys",
    "SCRIPT FLUSH",
    "FUNCTION LIST",
    "CLIENT LIST",
    "CLIENT KILL ID 1",
    "REPLICAOF NO ONE",
    "DEBUG SLEEP 0",
    "SHUTDOWN",
    "MIGRATE x 1 k 0 1",
]
OTHERS = [
    "SET outrider:{workers}:id:v1 x",
    "DEL outrider:{workers}:id:v1",
    "SREM outrider:{workers}:ids v1",
    "SADD outrider:{workers}:ids v1",
    "HSETNX outrider:{versions}:drafter version:9 x",
    "DEL outrider:{versions}:drafter",
]
DENIED: dict[AclRole, list[str]] = {
    "drafter": [*SECRETS, *TICKETS, *SERVER, *OTHERS, "SET outrider:{acceptance}:x y", "SET x y"],
    "verifier": [
        *SECRETS,
        *TICKETS,
        *SERVER,
        "SET outrider:{workers}:drafter-id:d1 x",
        "HGETALL outrider:{versions}:drafter",
        "GET outrider:{workers}:id:v1",
    ],
    "trainer": [
        *(it for it in (*SECRETS, *TICKETS, *SERVER, *OTHERS[:2]) if not it.startswith("XRANGE outrider:{examples}")),
        "DEL outrider:{examples}:target:00",
    ],
    "keys": [*(it for it in (*SECRETS, *TICKETS, *SERVER, *OTHERS) if "{keys}" not in it), "DEL outrider:{keys}"],
    "router": [
        *SERVER,
        "HSET outrider:{keys} x y",
        "HGETALL outrider:{keys}",
        "DEL outrider:{keys}",
        "SET outrider:{workers}:id:v1 x",
        "HGETALL outrider:{versions}:drafter",
        "HSETNX outrider:{versions}:drafter version:9 x",
        "XRANGE outrider:{examples}:target:00 - +",
        "SET somebody-else's x",
        "KEYS *",
    ],
}


@pytest.mark.parametrize("role", ACL_ROLES)
def test_commands_that_a_role_does_not_need_are_denied(own: EmbeddedRedis, role: AclRole) -> None:
    with redis.Redis.from_url(own.url) as admin:
        for command in DENIED[role]:
            answer = admin.execute_command("ACL", "DRYRUN", user_name(role), *command.split(" "))
            assert b"has no permissions to" in answer.lower(), (command, answer)
        assert admin.execute_command("ACL", "DRYRUN", user_name(role), "PING") == b"OK"


def test_roles_have_passwords_of_their_own_which_are_nowhere_to_be_read(own: EmbeddedRedis) -> None:
    passwords = {url.partition("password=")[2] for url in (own.url, *map(own.url_of, ACL_ROLES))}
    assert len(passwords) == len(ACL_ROLES) + 1
    for place in ("cmdline", "environ"):
        content = Path(f"/proc/{own.pid}/{place}").read_bytes()
        assert not any(password.encode() in content for password in passwords)
    for role in ACL_ROLES:
        with redis.Redis.from_url(own.url_of(role)) as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.config_get("*")


async def test_the_acl_lines_form_a_valid_file(tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    lines = ["user default on nopass ~* &* +@all", *(user_line(role, PASSWORD) for role in ACL_ROLES if role != "keys")]
    file.write_text("\n".join([*lines, user_line("keys")]) + "\n", encoding="utf-8")
    assert PASSWORD not in file.read_text(encoding="utf-8")
    with Server(tmp_path, aclfile=file) as server:
        for role in ACL_ROLES:
            client = redis.Redis.from_url(server.url, username=user_name(role), password=PASSWORD)
            with client:
                if role == "keys":  # without a password nobody is this user
                    with pytest.raises(redis.exceptions.AuthenticationError):
                        client.ping()
                else:
                    assert client.ping()


def test_the_rules_may_be_given_again_and_the_password_stays(emptied: EmbeddedRedis) -> None:
    with redis.Redis.from_url(emptied.url) as admin:
        before = admin.acl_list()
        for role in ACL_ROLES:
            admin.execute_command(*setuser_command(role).split())
        assert admin.acl_list() == before
        admin.execute_command(*setuser_command("keys", "another").split())
        with redis.Redis.from_url(emptied.url_of("keys")) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        secret = emptied.url_of("keys").partition("password=")[2]
        admin.execute_command(*setuser_command("keys", secret).split())


def test_rules_need_no_quotes_in_a_shell_s_here_document_nor_in_a_configuration() -> None:
    for role in ACL_ROLES:
        assert not set(rules(role)) & set("$`\"'\\\n#")


async def test_a_redis_without_these_rules_is_used_as_one_user_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acl, "_CONNECTION", "ping client|of-a-later-version")
    with caplog.at_level(logging.WARNING), EmbeddedRedis() as server:
        assert "one user" in caplog.text
        for role in ACL_ROLES:
            assert server.url_of(role) == server.url
            await works(role, server.url_of(role), server.url)
        async with connect(server.url_of("router")) as client:
            await Keys(client).listed()


def test_the_work_of_every_role_is_tested() -> None:  # bites: the roles are the code's
    assert WORK.keys() == GRANTS.keys() == set(ACL_ROLES)

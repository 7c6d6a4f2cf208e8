"""Redis ACL users, one for each role: which keys and commands it needs, and nothing else.

The one source of these rules: `outrider redis-acl` prints them, `outrider up` gives them to the Redis that it starts,
and deploy/ has them. They need Redis 7.2 or newer, or Valkey.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

from outrider.store.session_events import CHANNEL

AclRole = Literal["router", "verifier", "drafter", "trainer", "keys"]
ACL_ROLES: tuple[AclRole, ...] = get_args(AclRole)
PASSWORD = "OUTRIDER_REDIS_PASSWORD_"  # noqa: S105 - beginning of the variables with the passwords of the roles' users

# Of every connection: to one server, to the nodes of a Redis Cluster, and of transactions.
_CONNECTION = "ping select client|setinfo cluster|slots asking command multi exec"


@dataclass(frozen=True, slots=True)
class Grant:
    """Commands that a role may use on some keys or a channel. R~: it may read them; W~: write; RW~: both."""

    keys: str
    commands: str
    channel: str = ""  # a channel that the commands may use as well

    def rule(self) -> str:
        """Return the grant as a selector."""
        patterns = _joined(*(f"%{pattern}" for pattern in self.keys.split()), self.channel and f"&{self.channel}")
        return f"({patterns} {_allowed(self.commands)})"


_SESSIONS = Grant(
    "RW~outrider:{*}:session RW~outrider:{*}:log",
    "evalsha hget hgetall hmget hset hdel exists pexpire xadd xrange xrevrange del",
)
_SCRIPTS = Grant("", "script|load scan time")
_TICKET_KEYS = Grant("R~outrider:{tickets}:keys", "zrevrange")
_TIME = Grant("", "time")  # by its clock moments count that servers compare
_ANNOUNCE = "set sadd del srem"

GRANTS: dict[AclRole, tuple[Grant, ...]] = {
    "router": (
        _SESSIONS,
        Grant("RW~outrider:{leases}*", "evalsha zadd zrem zscore zrangebyscore set"),
        Grant("RW~outrider:idempotency:* RW~outrider:responses:*", "get set"),
        Grant("R~outrider:{workers}:*", "smembers mget"),
        Grant("W~outrider:{workers}:ids W~outrider:{workers}:drafter-ids", "srem"),  # ids of entries that have expired
        Grant("W~outrider:{workers}:drafter-id:* W~outrider:{workers}:drafter-ids", "set sadd del"),  # at its gate
        Grant("W~outrider:{tickets}:keys", "zadd zremrangebyscore expire"),
        Grant("R~outrider:{keys} R~outrider:{keys}:readers", "hget"),
        Grant("RW~outrider:{adapters}*", "hget hgetall hlen hset hdel"),
        Grant(
            "RW~outrider:{usage:*}:ends RW~outrider:{usage:*}:bytes RW~outrider:{usage:*}:claims",
            "evalsha hget hset hincrby hdel zadd zrem zcard zscore zrangebyscore zremrangebyscore pexpire",
        ),
        Grant("RW~outrider:{acceptance}:*", "get set"),
        Grant("W~outrider:{examples}:*", "xadd xtrim expire"),
        Grant("", "publish subscribe", CHANNEL),
        _SCRIPTS,
        Grant("", "info"),  # how full it is
    ),
    "verifier": (
        Grant("W~outrider:{workers}:id:* W~outrider:{workers}:ids", _ANNOUNCE),
        _TICKET_KEYS,
        _TIME,
    ),
    "drafter": (
        Grant("W~outrider:{workers}:drafter-id:* W~outrider:{workers}:drafter-ids", _ANNOUNCE),
        _TICKET_KEYS,
        _TIME,
        Grant("R~outrider:{versions}:*", "hgetall"),
        Grant("RW~outrider:{verdicts}:*", "hgetall hsetnx expire"),
    ),
    "trainer": (  # `outrider train online`: it reads the tenants' texts that routers share
        Grant("R~outrider:{examples}:*", "xrange xrevrange"),
        Grant("RW~outrider:{versions}:* RW~outrider:{verdicts}:*", "hget hgetall hsetnx hdel expire"),
        Grant("R~outrider:{workers}:*", "smembers mget"),
        Grant("W~outrider:{workers}:ids W~outrider:{workers}:drafter-ids", "srem"),
    ),
    "keys": (  # `outrider keys`
        Grant("RW~outrider:{keys}", "hset hget hgetall hdel"),
        Grant("W~outrider:{keys}:readers", "hset"),
        _TIME,
    ),
}


def user_name(role: AclRole) -> str:
    """Return the name of a role's user."""
    return f"outrider-{role}"


def rules(role: AclRole) -> str:
    """Return the rules of a role's user: what follows its name and password."""
    root = [grant.commands for grant in GRANTS[role] if not grant.keys and not grant.channel]
    selectors = [grant.rule() for grant in GRANTS[role] if grant.keys or grant.channel]
    return _joined("resetchannels -@all", _allowed(" ".join([_CONNECTION, *root])), *selectors)


def password_rule(password: str) -> str:
    """Return the rule that sets a password without containing it. It must be long and random, because the hash is a
    plain SHA-256."""
    return f"#{hashlib.sha256(password.encode()).hexdigest()}"


def user_line(role: AclRole, password: str = "") -> str:
    """Return a role's line of an ACL file or redis.conf. Without a password nobody can be this user."""
    return _joined("user", user_name(role), "on", password and password_rule(password), rules(role))


def setuser_command(role: AclRole, password: str = "") -> str:
    """Return the command that makes or updates a role's user on a running server. Without a password, one that is set
    stays."""
    passwords = password and f"resetpass {password_rule(password)}"
    return _joined("ACL SETUSER", user_name(role), "on resetkeys clearselectors", passwords, rules(role))


def _allowed(commands: str) -> str:
    return " ".join(f"+{command}" for command in commands.split())


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)

"""The table of Redis' keys in docs/redis.md: what each holds, when it is written, and which roles use it."""

from __future__ import annotations

from fnmatch import fnmatchcase

from docs.hooks.tables import code, table
from outrider.store.redis.acl import ACL_ROLES, GRANTS
from outrider.store.redis.key_catalogue import KEYS


def reference() -> str:
    """The table, from the grants of the roles."""
    return table(
        ("key", "what it holds, and when it is written", "read by", "written by"),
        [
            (code(key), what, ", ".join(roles_with("R", key)), ", ".join(roles_with("W", key)))
            for key, what in KEYS.items()
        ],
    )


def roles_with(access: str, key: str) -> list[str]:
    """The roles that may read ("R") or write ("W") a key."""
    patterns = {role: [it.partition("~") for grant in GRANTS[role] for it in grant.keys.split()] for role in ACL_ROLES}
    return [
        role
        for role, granted in patterns.items()
        if any(access in kinds and fnmatchcase(key, pattern) for kinds, _, pattern in granted)
    ]

"""`outrider redis-acl`: prints the rules of a Redis user for each role."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def redis_acl(
    role: Annotated[
        list[str] | None,
        typer.Option(help="Only this role: router, verifier, drafter, trainer or keys; may be repeated."),
    ] = None,
    setuser: Annotated[
        bool, typer.Option("--setuser", help="Print commands for a running server: pipe them to redis-cli.")
    ] = False,
) -> None:
    """Print a Redis user for each role, as lines of redis.conf or of its `aclfile`: each may do what its role needs.

    Passwords are read from OUTRIDER_REDIS_PASSWORD_ROUTER, OUTRIDER_REDIS_PASSWORD_VERIFIER and so on, and printed as
    their SHA-256, so they must be long and random. Needs Redis 7.2 or newer, or Valkey.
    """
    from outrider.store.redis.acl import ACL_ROLES, PASSWORD, setuser_command, user_line, user_name

    if unknown := set(role or ()).difference(ACL_ROLES):
        raise typer.BadParameter(f"{min(unknown)} is none of {', '.join(ACL_ROLES)}", param_hint="--role")
    for one in ACL_ROLES:
        if role and one not in role:
            continue
        variable = f"{PASSWORD}{one.upper()}"
        password = os.environ.get(variable, "")
        if not password and not setuser:
            print(f"outrider: {user_name(one)} has no password and lets nobody in; set {variable}", file=sys.stderr)
        print(setuser_command(one, password) if setuser else user_line(one, password))
    if not setuser:
        print(
            "outrider: an aclfile without a line for the user `default` lets everybody do everything; give it a "
            "password there, or add `user default off`",
            file=sys.stderr,
        )

"""Connections to Redis: our timeouts, and redis-py's errors as ours."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import redis.exceptions
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisClusterException, RedisError

from outrider.errors import ConfigError, InternalError, InvalidRequest, Unavailable

TIMEOUT_S = 2.0  # for a connection and for a reply; a healthy server answers within a millisecond
CONNECTIONS = 32  # of one process; further callers wait for a free one
_CLUSTER = "+cluster://"
_POOL_EXHAUSTED = "No connection available."  # redis-py's message if all connections are in use
_DECODE_ERRORS = (  # raised by decoding bytes of other programs
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    InvalidRequest,
)

REDIS_ERRORS = (RedisError, RedisClusterException, OSError)

Client: TypeAlias = Redis | RedisCluster


class _RetriedConnection:
    """Mixed into a connection: where uvloop's transport is closed, it raises the ConnectionError that is retried."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*args, **options)  # type: ignore[misc]
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
            raise redis.exceptions.ConnectionError("the connection is closed") from error


def _retried(connection_class: Any) -> Any:
    return type(f"Retried{connection_class.__name__}", (_RetriedConnection, connection_class), {})


class _PatientCluster(RedisCluster):
    """A cluster's client whose callers wait for a free connection, as `BlockingConnectionPool` lets them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._semaphore = asyncio.Semaphore(CONNECTIONS)
        retried = _retried(self.connection_kwargs["connection_class"])
        self.connection_kwargs["connection_class"] = retried
        for node in self.startup_nodes:
            node.connection_class = retried

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self._semaphore:
            return await super().execute_command(*args, **options)


def connect(redis_url: str) -> Client:
    """Return a client for redis://, rediss:// or unix:// URLs, or redis+cluster:// and rediss+cluster:// for a Redis
    Cluster.

    Any one node of a cluster is enough; it names the others. The client connects when first used; its user closes it. A
    command that lost its connection is sent once more, so all commands sent through it must be idempotent. Raises
    ConfigError for a malformed URL.
    """
    try:
        if _CLUSTER in redis_url:
            return _PatientCluster.from_url(
                redis_url.replace(_CLUSTER, "://", 1),
                max_connections=2 * CONNECTIONS,  # to one node; pipelines do not wait for the semaphore
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                protocol=2,
                retry=_retry(),
            )
        pool = BlockingConnectionPool.from_url(
            redis_url,
            max_connections=CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            protocol=2,
            retry=_retry(),
        )
    except (ValueError, RedisClusterException):
        raise ConfigError(
            "REDIS_URL: must be redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH, with [USER]:PASSWORD@ "
            "or ?password=PASSWORD where the server asks for one; redis+cluster://HOST:PORT or "
            "rediss+cluster://HOST:PORT for a Redis Cluster, which has database 0 only"
        ) from None
    pool.connection_class = _retried(pool.connection_class)
    return Redis.from_pool(pool)


async def ping(client: Client) -> None:
    """Raise Unavailable unless the server answers."""
    with redis_errors(client):
        await client.ping()


@contextmanager
def redis_errors(client: Client) -> Iterator[None]:
    """Turn errors of a task's Redis commands into Unavailable, with advice for the user.

    Also raises a cancellation that redis-py lost: it sends with `asyncio.wait_for`, which before Python 3.12 loses a
    cancellation that comes just when it is done.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    failure: Unavailable | None = None
    try:
        yield
    except REDIS_ERRORS as error:
        failure = unavailable(client, error)
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    if failure is not None:
        raise failure


def unavailable(client: Client, error: Exception) -> Unavailable:
    """Return what to raise for one of REDIS_ERRORS, with advice for the user."""
    return Unavailable(f"Redis at {address_of(client)} {_diagnosis(error)}")


def address_of(client: Client) -> str:
    """Return where a client connects to, without any password; for a cluster the nodes that it knows first."""
    if isinstance(client, RedisCluster):
        return ",".join(f"{node.host}:{node.port}" for node in client.startup_nodes)
    options: dict[str, Any] = client.connection_pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def redacted(redis_url: str) -> str:
    """Return a Redis URL without user, password and options, for logs."""
    parts = urlsplit(redis_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turn any error from decoding a stored value into InternalError, which names the value."""
    try:
        yield
    except _DECODE_ERRORS:
        raise InternalError(f"{what} in Redis is not what Outrider writes there; is the database shared?") from None


def load_object(blob: bytes, what: str) -> dict[str, Any]:
    """Return a stored JSON object. Raises InternalError, naming `what`, if it is none."""
    with decoding(what):
        value = json.loads(blob)
        if not isinstance(value, dict):
            raise TypeError("no object")
    return value


def _retry() -> Retry:
    """Return the policy: retry once after a lost connection. A server that does not answer is not tried again, because
    that takes as long."""
    return Retry(ConstantBackoff(0.01), 1, (redis.exceptions.ConnectionError,))


def _diagnosis(error: Exception) -> str:
    # redis-py hides the cause inside ConnectionErrors, and a script's error may follow its NOSCRIPT.
    chain = [one for one in (error, error.__cause__, error.__context__) if one is not None]
    text = str(error)
    # A command within a script gets another kind of error.
    if any(isinstance(one, redis.exceptions.NoPermissionError) for one in chain) or "ACL failure in script" in text:
        return f"does not permit this ({text}); give each server its role's user, which `outrider redis-acl` prints"
    if any(isinstance(one, redis.exceptions.AuthenticationError) for one in chain):
        return "refuses our password; check the one in REDIS_URL"
    # Older servers wrap the errors of commands within scripts, so that only the text shows the kind.
    if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
        return "is full; raise its maxmemory or lower session_ttl_s"
    if "MISCONF" in text:
        return "cannot write to its disk; make room where its data is (redis.data), its log says more"
    if isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY" in text:
        return "is a replica, which takes no writes; correct REDIS_URL to name the primary"
    if isinstance(error, redis.exceptions.ClusterDownError | redis.exceptions.SlotNotCoveredError):
        return "is a cluster that misses a part; start its missing nodes"
    if isinstance(error, RedisClusterException):
        return f"cannot be used as a cluster ({text.splitlines()[0]}); start its nodes, or correct REDIS_URL"
    if text == _POOL_EXHAUSTED:
        return f"answers too slowly: in {TIMEOUT_S:g} s none of {CONNECTIONS} connections was free; its log says more"
    if isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError | OSError):
        cause = chain[1] if len(chain) > 1 else error
        reason = getattr(cause, "strerror", None) or type(cause).__name__
        return f"cannot be reached ({reason}); start it, or correct REDIS_URL"
    return f"refused a command ({error}); its log says more"

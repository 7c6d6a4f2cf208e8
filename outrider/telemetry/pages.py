"""The HTTP side of a server: /metrics for Prometheus, and what else it shows.

Read only, and for the cluster's own network: it speaks no TLS and asks nobody who he is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

PATIENCE_S = 5.0  # that a connection may be silent

log = logging.getLogger(__name__)


class Content(NamedTuple):
    """What a page answers."""

    kind: str  # MIME type
    body: bytes


Page = Callable[[], Content]  # called in another thread than the event loop's


@contextmanager
def serving(listen: str, registry: CollectorRegistry, pages: Mapping[str, Page]) -> Iterator[str]:
    """Serves while the body runs. Yields the bound "host:port". Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    try:
        server = make_server(host.strip("[]"), int(port), _app(registry, pages), _Server, _Handler)
    except OSError as error:
        raise ConfigError(f"metrics: cannot bind {listen} ({error.strerror or error}); choose a free port") from None
    thread = threading.Thread(target=server.serve_forever, name="pages", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _app(registry: CollectorRegistry, pages: Mapping[str, Page]) -> WSGIApplication:
    prometheus = make_wsgi_app(registry)

    def app(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = request.get("PATH_INFO", "")
        if request.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _answer(start, "405 Method Not Allowed", Content("text/plain", b"GET it\n"))
        if path == "/metrics":
            shown: Iterable[bytes] = prometheus(request, start)
            return shown
        if path not in pages:
            return _answer(start, "404 Not Found", Content("text/plain", b"there is no such page\n"))
        try:
            return _answer(start, "200 OK", pages[path]())
        except Exception:
            log.exception("page %s failed", path)
            return _answer(start, "503 Service Unavailable", Content("text/plain", b"not now; see the log\n"))

    return app


def _answer(start: StartResponse, status: str, content: Content) -> list[bytes]:
    start(
        status,
        [
            ("Content-Type", content.kind),
            ("Content-Length", str(len(content.body))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", "default-src 'self'; img-src data:"),
            ("X-Content-Type-Options", "nosniff"),
        ],
    )
    return [content.body]


class _Server(ThreadingWSGIServer):
    """A thread for each connection."""

    daemon_threads = True


class _Handler(WSGIRequestHandler):
    """Who says nothing is not waited for; and who looks is nobody's business."""

    timeout = PATIENCE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        """Not logged."""

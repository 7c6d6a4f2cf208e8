"""The HTTP pages of a server: /metrics for Prometheus, /metrics/vllm with vLLM's names, and further pages.

Read only, and for the cluster's own network: without TLS and authentication.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from outrider.errors import ConfigError
from outrider.telemetry.vllm_names import VllmNames

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

IDLE_TIMEOUT_S = 5.0  # idle connections are closed after this time
CONNECTION_S = 10.0  # and any connection after this time, however slowly its client sends or reads
MAX_CONNECTIONS = 16  # at the same time, each with a thread; further ones are closed

log = logging.getLogger(__name__)


class PageContent(NamedTuple):
    """The content of a page."""

    kind: str  # MIME type
    body: bytes


# Called outside the event loop's thread. A page whose path ends in a slash, but for "/", receives what follows it.
Page = Callable[..., PageContent]


def json_page(figures: Callable[[], object]) -> Page:
    """Return a page that shows figures as JSON."""
    return lambda: PageContent("application/json", json.dumps(figures()).encode())


def metrics_page(registry: CollectorRegistry) -> Page:
    """Return Prometheus' page of a registry."""
    return lambda: PageContent(CONTENT_TYPE_LATEST, generate_latest(registry))


@contextmanager
def serving(listen: str, registry: CollectorRegistry, pages: Mapping[str, Page]) -> Iterator[str]:
    """Serve while the body runs. Yield the bound "host:port". Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    try:
        server = make_server(host.strip("[]"), int(port), _app(registry, pages), _PageServer, PageHandler)
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
    vllm = CollectorRegistry()
    vllm.register(VllmNames(registry))
    scraped = {"/metrics": make_wsgi_app(registry), "/metrics/vllm": make_wsgi_app(vllm)}

    def app(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = request.get("PATH_INFO", "")
        if request.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _respond(start, "405 Method Not Allowed", PageContent("text/plain", b"GET it\n"))
        if path in scraped:
            body: Iterable[bytes] = scraped[path](request, start)
            return body
        page = _found(pages, path)
        if page is None:
            return _respond(start, "404 Not Found", PageContent("text/plain", b"there is no such page\n"))
        try:
            return _respond(start, "200 OK", page())
        except Exception:
            log.exception("page %s failed", path)
            return _respond(start, "503 Service Unavailable", PageContent("text/plain", b"not now; see the log\n"))

    return app


def _found(pages: Mapping[str, Page], path: str) -> Page | None:
    folder, _, name = path.rpartition("/")
    if folder and f"{folder}/" in pages:
        return partial(pages[f"{folder}/"], name)
    return pages.get(path)


def _respond(start: StartResponse, status: str, content: PageContent) -> list[bytes]:
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


class _PageServer(ThreadingWSGIServer):
    """Serves each connection in its own thread; bounds their number and duration."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._ends: dict[socket.socket, float] = {}  # of the open connections, by time.monotonic

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, or close it if there are too many."""
        if len(self._ends) >= MAX_CONNECTIONS:
            super().shutdown_request(request)
            return
        self._ends[request] = time.monotonic() + CONNECTION_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection, in its thread."""
        self._ends.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections that take too long; called twice a second, in the server's thread."""
        now = time.monotonic()
        for request, end in tuple(self._ends.items()):
            if end < now:
                with suppress(OSError):  # it has ended meanwhile
                    request.shutdown(socket.SHUT_RDWR)  # its thread reads the end of the stream, or cannot write


class PageHandler(WSGIRequestHandler):
    """Close idle connections, and logs no requests."""

    timeout = IDLE_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        """Log nothing."""

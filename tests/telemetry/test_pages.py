"""The pages of a server take a bounded number of threads and a bounded time of a client, whatever it does."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from outrider.telemetry import pages
from outrider.telemetry.pages import PageContent, serving

LARGE = 2**24  # bytes: more than the kernel takes for a connection


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server of pages with two threads."""
    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 2)
    shown = {"/large": lambda: PageContent("text/plain", bytes(LARGE))}
    with serving("127.0.0.1:0", CollectorRegistry(), shown) as bound:
        host, _, port = bound.rpartition(":")
        yield host, int(port)


def answered(address: tuple[str, int]) -> bool:
    """Return whether the page is served, and not the connection closed."""
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=20) as answer:
            return bool(answer.status == 200)
    except (OSError, ConnectionError):
        return False


def test_connections_beyond_their_number_are_closed_without_a_thread(address: tuple[str, int]) -> None:
    before = threading.active_count()
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        while threading.active_count() < before + 2:
            time.sleep(0.01)
        with socket.create_connection(address) as third:
            third.settimeout(20)
            assert third.recv(1) == b""
        assert threading.active_count() == before + 2
        assert not answered(address)
        first.close()
        second.close()
        while not answered(address):
            time.sleep(0.01)


@pytest.mark.parametrize("sent", [b"GET /met", b"GET /large HTTP/1.0\r\n\r\n"], ids=["head", "answer"])
def test_a_client_that_sends_or_reads_slowly_is_cut_off(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(pages, "CONNECTION_S", 0.2)
    monkeypatch.setattr(pages.PageHandler, "timeout", 60.0)  # each byte would begin it anew
    with socket.create_connection(address) as slow, socket.create_connection(address) as another:
        for client in (slow, another):
            client.sendall(sent)
        while not answered(address):
            time.sleep(0.01)

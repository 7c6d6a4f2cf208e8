"""A cache of the Hugging Face hub laid out by hand, and a hub that serves folders."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def commit_of(content: str) -> str:
    """A commit's name."""
    return hashlib.sha1(content.encode()).hexdigest()


def cached(cache: Path, repository: str, source: Path, *, revision: str = "main", files: str = "*") -> Path:
    """The snapshot of a repository in the cache: links to blobs, which are links to the source's files."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    commit = commit_of(f"{repository}@{revision}")
    snapshot = folder / "snapshots" / commit
    for part in (folder / "blobs", snapshot, folder / "refs"):
        part.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    for file in source.glob(files):
        blob = folder / "blobs" / commit_of(f"{repository}@{revision}/{file.name}")
        blob.symlink_to(file.resolve())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


class Hub(ThreadingHTTPServer):
    """Serves folders as repositories' main, by the paths that the library asks for, but those with a refusal."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.refusals: dict[str, tuple[int, str]] = {}  # by repository: the status and the hub's name of the error
        self.sent: list[str] = []  # files

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/(\w+/[\w-]+)/(revision|tree)/([\w.-]+)", path):
            repository, what, revision = match.groups()
            if repository in self.server.refusals:
                self._refuse(*self.server.refusals[repository])
            elif repository not in self.server.repositories:
                self._refuse(401, "RepoNotFound")
            elif revision not in ("main", commit_of(repository)):
                self._refuse(404, "RevisionNotFound")
            else:
                files = sorted(file for file in self.server.repositories[repository].iterdir() if file.is_file())
                tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": commit_of(file.name)}
                        for file in files]  # fmt: skip
                info = {"id": repository, "sha": commit_of(repository), "siblings": []}
                self._answer(json.dumps(tree if what == "tree" else info).encode(), "json")
        elif match := re.fullmatch(r"/(\w+/[\w-]+)/resolve/(\w+)/([\w.-]+)", path):
            repository, _, name = match.groups()
            if self.command == "GET":
                self.server.sent.append(name)
            self._answer((self.server.repositories[repository] / name).read_bytes(), name, commit_of(repository))
        else:
            self._refuse(404, "EntryNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, body: bytes, name: str, commit: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{commit_of(name)}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    """A hub while the body runs."""
    with Hub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()

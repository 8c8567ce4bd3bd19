"""A stand-in for the Hugging Face hub on localhost: one repository, and as much of the API as a download needs."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Iterator

REPOSITORY = "owner/name"


class Server(http.server.ThreadingHTTPServer):
    """`commits` has the directory of each commit's files, `refs` the commit of each branch and tag."""

    def __init__(self, commits: dict[str, pathlib.Path], refs: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits, self.refs = commits, refs
        self.next: dict[str, str] = {}
        """Where a branch moves as soon as someone has asked for it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, revision: str) -> str | None:
        commit = revision if revision in self.commits else self.refs.get(revision)
        self.refs |= {name: moved for name, moved in self.next.items() if name == revision}
        return commit


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        parts = [urllib.parse.unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        match parts:
            case ["api", "models", owner, name, kind, revision] if f"{owner}/{name}" == REPOSITORY:
                commit = self.server.commit(revision)
                if commit is None:
                    return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                files = sorted(self.server.commits[commit].iterdir())
                if kind == "tree":
                    tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _oid(f)} for f in files]
                    return self._send(200, json.dumps(tree).encode(), {})
                siblings = [{"rfilename": f.name} for f in files]
                info = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": commit, "siblings": siblings}
                return self._send(200, json.dumps(info).encode(), {})
            case [owner, name, "resolve", commit, file] if f"{owner}/{name}" == REPOSITORY:
                path = self.server.commits[commit] / file
                return self._send(200, path.read_bytes(), {"ETag": f'"{_oid(path)}"', "X-Repo-Commit": commit})
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _oid(file: pathlib.Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(commits: dict[str, pathlib.Path], refs: dict[str, str]) -> Iterator[Server]:
    """The server, answering until the block ends."""
    with Server(commits, refs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()

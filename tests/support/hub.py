"""A server that answers like the Hugging Face hub for one dataset, `org/name`, whose files are those of a
folder, or of one folder per commit: as much of the hub's interface as huggingface_hub and datasets use to
find, download and stream files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "a" * 40


@contextmanager
def serving(folder: Path, commits: dict[str, Path] | None = None) -> Iterator[str]:
    """Serve the folder, or the folders of `commits`, of which the last is the newest, in a thread. Yields the
    value of HF_ENDPOINT."""
    handler = type("Handler", (_Handler,), {"commits": {COMMIT: folder} if commits is None else commits})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    commits: dict[str, Path]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        asked = re.search("/(?:tree|revision|resolve)/([^/]+)", path)
        self.commit = asked[1] if asked and asked[1] in self.commits else list(self.commits)[-1]
        self.folder = self.commits[self.commit]
        names = sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())
        if tree := re.match(r"/api/datasets/org/name/tree/[^/]+/?(.*)", path):
            return self._json([self._entry(name) for name in names if name.startswith(tree[1])])
        if re.match(r"/api/datasets/org/name(/revision/[^/]+)?$", path):
            siblings = [{"rfilename": name} for name in names]
            return self._json({"id": "org/name", "sha": self.commit, "private": False, "siblings": siblings})
        if file := re.match(r"/datasets/org/name/resolve/[^/]+/(.*)", path):
            return self._file(file[1]) if file[1] in names else self._missing("EntryNotFound")
        return self._missing("RepoNotFound")

    def _entry(self, name: str) -> dict[str, Any]:
        data = (self.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _file(self, name: str) -> None:
        data, entry = (self.folder / name).read_bytes(), self._entry(name)
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(asked[1]), int(asked[2] or len(data) - 1) + 1) if asked else (0, len(data))
        headers = {"ETag": f'"{entry["oid"]}"', "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self._answer(206 if asked else 200, data[start:end], headers)

    def _missing(self, code: str) -> None:
        self._answer(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": self.commit})

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

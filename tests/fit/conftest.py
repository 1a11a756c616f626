"""A file server for tests: ranges or none, redirects, and every way in which a server can go wrong, by the address."""

from __future__ import annotations

import http.server
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest


class FileServer:
    """Serves ``folder``; ``/WAY/name`` answers in that way. ``asked`` has the path and range of every request."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []
        self.sent = self.port = 0
        self.stop = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    state = FileServer(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            try:
                answer(self, state)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    state.port = httpd.server_port
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.stop.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def answer(to, state: FileServer) -> None:
    path = urlsplit(to.path).path
    given = to.headers.get("range")
    state.asked.append((to.path, given))
    _, way, name = path.split("/", 2)
    if way == "redirect":
        return head(to, 302, {"Location": f"/plain/{name}?signed=1", "Content-Length": "0"})
    if way == "loop":
        return head(to, 302, {"Location": to.path, "Content-Length": "0"})
    if way == "elsewhere":
        return head(to, 302, {"Location": "ftp://example.org/x.gguf", "Content-Length": "0"})
    if way.isdecimal():
        return head(to, int(way), {"Content-Length": "0"})
    if not (state.folder / name).exists():
        return head(to, 404, {"Content-Length": "0"})
    data = (state.folder / name).read_bytes()
    first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", given).groups())
    last = min(last, len(data) - 1)
    if way == "whole":
        head(to, 200, {"Content-Length": str(len(data))})
        return send(to, state, data)
    if way == "unsized":
        head(to, 200, {"Connection": "close"})
        to.close_connection = True
        return send(to, state, data)
    if way == "gzip":
        head(to, 200, {"Content-Length": str(len(data)), "Content-Encoding": "gzip"})
        return send(to, state, data)
    if way == "silent":
        state.stop.wait(10)
        to.close_connection = True
        return None
    total = len(data) * 2 if way == "shrunk" and first else len(data)
    start = first + 7 if way == "other" else first
    head(to, 206, {"Content-Length": str(last - first + 1), "Content-Range": f"bytes {start}-{last}/{total}"})
    body = data[first : last + 1]
    if way == "cut":
        to.close_connection = True
        return send(to, state, body[: len(body) // 2])
    if way == "drip":
        for index in range(0, len(body), 1000):
            send(to, state, body[index : index + 1000])
            to.wfile.flush()
            time.sleep(0.05)
        return None
    return send(to, state, body)


def head(to, code: int, headers: dict[str, str]) -> None:
    to.send_response(code)
    for key, value in headers.items():
        to.send_header(key, value)
    to.end_headers()


def send(to, state: FileServer, data: bytes) -> None:
    for index in range(0, len(data), 65536):
        piece = data[index : index + 65536]
        to.wfile.write(piece)
        state.sent += len(piece)


@pytest.fixture(name="serve", scope="session")
def _serve():
    return serving

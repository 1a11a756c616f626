"""The header of a model on a server: over real sockets, of servers that do what they should and some that do not."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from bmoe.errors import BmoeError, ModelError
from bmoe.fit import remote
from bmoe.fit.remote import CHUNK, Limits, addressed, fetch_headers, is_url, shown
from bmoe.header import read_header
from bmoe.shards import read_shards
from bmoe.synth import write_model
from bmoe.testing.shards import split_model

pytest.importorskip("httpx", reason="needs httpx")


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "model.gguf", "tiny-qwen3moe")
    with open(folder / "big.gguf", "wb") as big:  # a model of which the header is a small part
        big.write((folder / "model.gguf").read_bytes())
        big.truncate(24 << 20)
    (folder / "page.gguf").write_text("<!DOCTYPE html><title>Sign in</title>")
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "short.gguf").write_bytes((folder / "model.gguf").read_bytes()[:100_000])
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    text = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
    strings = b"".join((99).to_bytes(8, "little") + b"x" * 99 for _ in range(40_000))
    (folder / "endless.gguf").write_bytes(head + text + (40_000).to_bytes(8, "little") + strings)
    (folder / "split").mkdir()
    split_model(folder / "model.gguf", folder / "split", lambda name: len(name) % 3, 3)
    return folder


@pytest.fixture(name="server", scope="module")
def _server(folder, serve):
    with serve(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server):
    server.asked.clear()
    server.sent = 0


def first_shard(folder: Path) -> str:
    return next(path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*-00001-of-*.gguf")))


@pytest.mark.parametrize("way", ["plain", "whole", "redirect"])
def test_the_header_is_that_of_the_file(server, folder, tmp_path, way):
    fetched = fetch_headers(server.url(f"{way}/big.gguf?download=true"), tmp_path)
    here, there = read_header(fetched.path), read_header(str(folder / "big.gguf"))

    assert (there.tensors, there.values, there.nbytes) == (here.tensors, here.values, here.nbytes)
    assert "big.gguf" == os.path.basename(fetched.path)


@pytest.mark.parametrize("way", ["plain", "redirect"])
def test_no_more_than_a_chunk_beyond_the_header_is_asked_for(server, folder, tmp_path, way):
    fetched = fetch_headers(server.url(f"{way}/big.gguf"), tmp_path)
    end = read_header(str(folder / "big.gguf")).tensors[0].offset

    assert fetched.nbytes <= end + CHUNK
    deadline = time.monotonic() + 10  # the server counts when the bytes are gone
    while server.sent != fetched.nbytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.sent == fetched.nbytes
    assert os.stat(fetched.path).st_blocks * 512 <= end + 2 * CHUNK


def test_of_a_server_without_ranges_the_rest_is_not_read(server, folder, tmp_path):
    fetched = fetch_headers(server.url("whole/big.gguf"), tmp_path)

    piece = 64 << 10  # what httpx reads of a socket at once
    assert fetched.nbytes <= read_header(str(folder / "big.gguf")).tensors[0].offset + CHUNK + piece
    assert 1 == len(server.asked)
    assert server.sent < 24 << 20


@pytest.mark.parametrize("way", ["plain", "whole", "redirect"])
def test_all_shards_are_followed(server, folder, tmp_path, way):
    name = first_shard(folder)
    fetched = fetch_headers(server.url(f"{way}/{name}?x=1"), tmp_path)
    there = read_shards(str(folder / name))

    assert [h.tensors for h in there] == [h.tensors for h in read_shards(fetched.path)]
    assert all(path.endswith("?x=1") for path, _ in server.asked if path.startswith(f"/{way}/"))


def test_a_missing_shard_is_named(server, folder, tmp_path):
    name = first_shard(folder)
    other = folder / "lost" / os.path.basename(name)
    other.parent.mkdir()
    shutil.copy(folder / name, other)

    with pytest.raises(ModelError, match=r"/lost/.*-00002-of-00003\.gguf: the server answered with 404; check"):
        fetch_headers(server.url(f"plain/lost/{other.name}"), tmp_path)


SMALL = Limits(seconds=20, idle_s=0.4, header_bytes=2 << 20)
WRONG = {
    "404/model.gguf": "the server answered with 404; check the address",
    "403/model.gguf": "the server answered with 403; it needs a login",
    "500/model.gguf": "the server answered with 500",
    "plain/none.gguf": "the server answered with 404",
    "plain/page.gguf": "is an HTML page, not a gguf",
    "whole/page.gguf": "is an HTML page, not a gguf",
    "whole/empty.gguf": "is empty",
    "plain/short.gguf": "truncated",
    "whole/short.gguf": "truncated",
    "plain/endless.gguf": "its header is larger than 2 MiB",
    "whole/endless.gguf": "its header is larger than 2 MiB",
    "unsized/model.gguf": "does not say how large the file is",
    "gzip/model.gguf": "the server compresses the file",
    "other/model.gguf": "another part of the file",
    "shrunk/endless.gguf": "another part of the file, or of another file",
    "cut/model.gguf": "cannot be reached",
    "loop/model.gguf": "leads to more than 5 other addresses",
    "elsewhere/model.gguf": "neither http nor https",
    "silent/model.gguf": "said nothing for 0.4 s",
}


@pytest.mark.parametrize(("path", "reason"), WRONG.items())
def test_what_goes_wrong_is_one_line_with_the_address(server, tmp_path, path, reason):
    began = time.monotonic()
    with pytest.raises(ModelError, match=re.escape(reason)) as caught:
        fetch_headers(server.url(f"{path}?token=secret"), tmp_path, SMALL)

    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(server.url(path) + ": ")
    assert "secret" not in line
    assert "; " in line
    assert time.monotonic() - began < 5


def test_a_server_that_drips_is_left_after_the_time(server, tmp_path):
    began = time.monotonic()
    with pytest.raises(ModelError, match="took longer than 0.5 s"):
        fetch_headers(server.url("drip/model.gguf"), tmp_path, Limits(seconds=0.5))

    assert time.monotonic() - began < 3


def test_nobody_listens(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with pytest.raises(ModelError, match=r"cannot be reached \(.*\); check the address"):
        fetch_headers(f"http://127.0.0.1:{port}/m.gguf", tmp_path)


@pytest.mark.parametrize(
    "url", ["ftp://host/m.gguf", "file:///etc/passwd", "http://", "http:///m.gguf", "http://[::1/m", "http://h:99999/m"]
)
def test_what_is_no_address_is_refused(tmp_path, url):
    with pytest.raises(ModelError, match="is no address of a file; give one that begins with https://"):
        fetch_headers(url, tmp_path)


def test_a_name_leads_nowhere_else(server, folder, tmp_path):
    (folder / "..%2F..%2Fevil.gguf").write_bytes((folder / "model.gguf").read_bytes())
    fetched = fetch_headers(server.url("plain/..%2F..%2Fevil.gguf"), tmp_path)

    assert tmp_path == Path(fetched.path).parent


def test_secrets_are_not_shown():
    assert "https://host:8/a/b.gguf" == shown("https://user:pw@host:8/a/b.gguf?token=1#x")


def test_files_are_shown_by_their_address(tmp_path):
    assert "https://h/a/m.gguf: bad" == addressed(f"{tmp_path}/m.gguf: bad", tmp_path, "https://h/a/m.gguf?x=1")


@pytest.mark.parametrize(("text", "expected"), [("https://a/b", True), ("a/b.gguf", False), ("C:\\m", False)])
def test_a_url_is_told_from_a_path(text, expected):
    assert expected == is_url(text)


def test_without_httpx_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)

    with pytest.raises(BmoeError, match=r"needs httpx; install it with: pip install \"bmoe\[http\]\""):
        fetch_headers("https://example.org/m.gguf", tmp_path)
    assert remote.is_url("https://example.org")

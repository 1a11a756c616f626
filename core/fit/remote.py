"""The header of a model that is still on a server: its first bytes by range requests, and no more of it.

What came is put into files of the model's own size that are otherwise empty, so that all that reads headers can read
them. httpx does the talking; it is needed for this only.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit, urlunsplit

from bmoe.errors import BmoeError, ModelError
from bmoe.header import Header, read_header_from

CHUNK = 256 << 10
"""Bytes of one request, and the most that is read beyond a header."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.ASCII)
_SIZE = re.compile(r"bytes (\d+)-(\d+)/(\d+)", re.ASCII)
_MOST_REDIRECTS, _MOST_SHARDS = 5, 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a server may take in all and between two pieces, and how large the header of one file may be."""

    seconds: float = 120.0
    idle_s: float = 15.0
    header_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Fetched:
    """``path`` is the first file, with nothing after its header; ``nbytes`` came over the network in all."""

    path: str
    nbytes: int


def is_url(text: str) -> bool:
    """Whether ``text`` names something on a server."""
    return bool(re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text))


def shown(url: str) -> str:
    """``url`` without what may be a secret: user, password, query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def fetch_headers(url: str, folder: Path, limits: Limits = Limits()) -> Fetched:
    """Fetch the headers of the model at ``url``, all shards of it if that is the first of several, into ``folder``.

    Raises ModelError in one line: no such file, no gguf, a server that cannot be reached, is too slow, does not say how
    large the file is, or sends a header that is too large; BmoeError if httpx is not installed.
    """
    parts = _checked(url)
    httpx = _httpx()
    until = time.monotonic() + limits.seconds
    options = {"follow_redirects": True, "max_redirects": _MOST_REDIRECTS, "timeout": limits.idle_s}
    headers = {"accept-encoding": "identity", "user-agent": "bmoe"}
    nbytes = 0
    first = folder / _name(parts.path)
    with httpx.Client(headers=headers, **options) as client:

        def get(address: str, target: Path) -> Header:
            nonlocal nbytes
            with _Remote(httpx, client, address, target, limits, until) as source:
                try:
                    return source.header()
                finally:
                    nbytes += source.nbytes

        header = get(url, first)
        for name, address in _siblings(parts, header):
            get(address, folder / name)
    return Fetched(str(first), nbytes)


def _checked(url: str) -> Any:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known or not url.isprintable():
        raise ModelError(f"{url!r}: is no address of a file; give one that begins with https:// or http://")
    return parts


def _httpx() -> Any:
    try:
        return importlib.import_module("httpx")
    except ImportError as error:
        raise BmoeError('a model on a server needs httpx; install it with: pip install "bmoe[http]"') from error


def _name(path: str) -> str:
    """A file's own name, which can lead nowhere else."""
    name = unquote(path).rpartition("/")[2]
    return re.sub(r"[^\w.+-]", "_", name).lstrip(".")[-200:] or "model.gguf"


def _siblings(parts: Any, header: Header) -> Iterator[tuple[str, str]]:
    """File name and address of every further shard, beside the address that was given, not the one it led to."""
    match, count = _SHARD.search(parts.path), header.values.get("split.count", 1)
    if match is None or match[1] != "00001" or not isinstance(count, int) or count != int(match[2]):
        return  # a model of one file, or a name that those who read shards will explain
    if count > _MOST_SHARDS:
        raise ModelError(
            f"{header.path}: says that it has {count} shards; download it and look at it with bmoe inspect"
        )
    for number in range(2, count + 1):
        path = f"{parts.path[: match.start()]}-{number:05d}-of-{count:05d}.gguf"
        yield _name(path), urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


class _Remote:
    """One file on the server, read forwards by ranges, or from a single answer if the server knows no ranges."""

    def __init__(self, httpx: Any, client: Any, url: str, target: Path, limits: Limits, until: float) -> None:
        self._httpx, self._client, self._url, self._limits, self._until = httpx, client, url, limits, until
        self._target, self._at, self.nbytes = target, 0, 0
        self._size = 0
        self._whole: Any = None
        self._pieces: Iterator[bytes] = iter(())
        self._left = b""
        self._place = 0

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._whole is not None:
            self._whole.close()

    def header(self) -> Header:
        """The header; what was read of the file lies in the target afterwards."""
        self._left = self._guarded(lambda: self._request(0))
        with open(self._target, "wb") as file:
            self._file = file
            header = read_header_from(shown(self._url), self, self._size, CHUNK)
            file.truncate(self._size)
        return header

    def seek(self, offset: int, /) -> int:
        """Go forwards; what lies between is not asked for, unless the server sends it anyway."""
        self._at = offset
        return offset

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes from here on; none at the end of the file."""
        if self._at >= self._size:
            return b""
        data = self._guarded(lambda: self._piece(size))
        self._file.seek(self._at)
        self._file.write(data)
        self._at += len(data)
        return data

    def _piece(self, size: int) -> bytes:
        skip = self._at - self._place
        if self._whole is None and skip >= len(self._left):
            self._left, self._place, skip = self._request(self._at), self._at, 0
        while self._whole is not None and skip >= len(self._left):  # all in one answer: what is not needed goes by
            skip -= len(self._left)
            self._place += len(self._left)
            self._left = self._next()
        return self._left[skip : skip + size]

    def _request(self, first: int) -> bytes:
        """The bytes from ``first`` on, up to a chunk; of a server without ranges, the first piece of everything."""
        wanted = {"range": f"bytes={first}-{first + CHUNK - 1}"}
        answer = self._client.send(self._client.build_request("GET", self._url, headers=wanted), stream=True)
        keep = False
        try:
            if answer.headers.get("content-encoding", "identity") != "identity":
                self._fail("the server compresses the file, so that no part of it can be asked for", "name another")
            if answer.status_code == 206:
                return self._range(answer, first)
            if answer.status_code != 200 or first:
                self._refused(answer.status_code)
            length = answer.headers.get("content-length", "")
            if not length.isdecimal():
                self._fail("the server does not say how large the file is", "download it and name the file")
            keep, self._size, self._whole = True, int(length), answer
            self._pieces = answer.iter_raw()
            return self._next() if self._size else b""
        finally:
            if not keep:
                answer.close()

    def _range(self, answer: Any, first: int) -> bytes:
        said = _SIZE.fullmatch(answer.headers.get("content-range", ""))
        if said is None or int(said[1]) != first or (self._size and int(said[3]) != self._size):
            self._fail("the server answered with another part of the file, or of another file", "try it again")
        self._size = int(said[3])
        want = min(CHUNK, self._size - first)
        parts: list[bytes] = []
        for piece in answer.iter_raw():
            parts.append(self._counted(piece))
            if sum(map(len, parts)) >= want:
                break
        data = b"".join(parts)[:want]
        if len(data) < want:
            self._fail(f"the server ended after {len(data)} of {want} bytes", "try it again")
        return data

    def _next(self) -> bytes:
        piece = next(self._pieces, b"")
        if not piece:
            self._fail(f"the server ended after {self.nbytes} of {self._size} bytes", "try it again")
        return self._counted(piece)

    def _counted(self, piece: bytes) -> bytes:
        self.nbytes += len(piece)
        if self.nbytes > self._limits.header_bytes:
            most = self._limits.header_bytes >> 20
            self._fail(f"its header is larger than {most} MiB, or the server cannot skip", "download the file")
        if time.monotonic() > self._until:
            self._fail(f"the server took longer than {self._limits.seconds:g} s", "try it again, or download the file")
        return piece

    def _guarded(self, ask: Callable[[], bytes]) -> bytes:
        """What ``ask`` answers; what goes wrong on the network as a ModelError."""
        if time.monotonic() > self._until:
            self._fail(f"the server took longer than {self._limits.seconds:g} s", "try it again, or download the file")
        try:
            return ask()
        except self._httpx.TimeoutException:
            self._fail(f"the server said nothing for {self._limits.idle_s:g} s", "try it again")
        except self._httpx.TooManyRedirects:
            self._fail(f"it leads to more than {_MOST_REDIRECTS} other addresses", "use the direct download address")
        except self._httpx.UnsupportedProtocol:
            self._fail("it leads to an address that is neither http nor https", "use the direct download address")
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._fail(f"cannot be reached ({reason})", "check the address and the network")

    def _refused(self, code: int) -> NoReturn:
        remedies = {401: "it needs a login; download the file and name it", 404: "check the address"}
        remedies |= {403: remedies[401], 416: "the file is shorter than it was; try it again"}
        self._fail(f"the server answered with {code}", remedies.get(code, "check the address, or try it later"))

    def _fail(self, what: str, remedy: str) -> NoReturn:
        raise ModelError(f"{shown(self._url)}: {what}; {remedy}")


def addressed(text: str, folder: Path, url: str) -> str:
    """``text`` with addresses in the place of the files in ``folder`` that stand for them."""
    return text.replace(f"{folder}{os.sep}", shown(url).rpartition("/")[0] + "/")

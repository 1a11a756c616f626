"""The King James text of bible-kjv-text: its compressed file, and short passages of consecutive verses."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_MAGIC = b"EC02Compressed Data File"
_COMPRESS = b"\x1f\x9d\x90"  # the head of compress(1) with 16 bits, which only the first window of the file keeps
_VERSE = re.compile(r"^([1-3]?[A-Za-z]+)(\d+):(\d+) (.*)$")


def read_text(path: Path) -> str:
    """Return the text of `bible.data`: windows of 64 KiB, each compressed on its own. Raises ValueError if odd."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path}: not a compressed text of bible-kjv")
    (windows,) = struct.unpack_from(">I", data, 0x58)
    starts = [*struct.unpack_from(f">{windows}I", data, 0x5C), len(data)]
    text = b""
    for first, end in pairwise(starts):
        packed = _COMPRESS + data[first:end]
        text += subprocess.run(["gzip", "-dc"], input=packed, capture_output=True, check=False).stdout
    return text.decode("ascii")


def passages(text: str, limit: int = 850) -> Iterator[tuple[str, str]]:
    """Yield (key, passage): verses of one chapter, joined up to `limit` characters, without their numbers."""
    chapter, first, verses = "", "", list[str]()
    for line in text.splitlines():
        match = _VERSE.match(line)
        if not match:
            continue
        book, number, verse, words = match.groups()
        here = f"{book} {number}"
        if verses and (here != chapter or sum(map(len, verses)) + len(words) > limit):
            yield f"{chapter}:{first}", " ".join(verses)
            verses = []
        if not verses:
            chapter, first = here, verse
        verses.append(words.strip())
    if verses:
        yield f"{chapter}:{first}", " ".join(verses)

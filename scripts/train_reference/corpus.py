"""The documents: all sources in one list, each with a key whose hash says whether it is held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from .arithmetic import problem
from .chats import SYSTEM, entry, questions, render
from .docstrings import paragraphs
from .scripture import passages, read_text
from .sources import fetch
from .stories import story
from .wordnet import Sense, read_senses

HELD_OUT = 0.02  # share of the documents
CHAT_REPEATS = (1, 2, 3)  # chats per sense that SemCor counts once, up to 20 times, and more often


@dataclass(frozen=True)
class Document:
    """One text. Documents that say the same in other words share their key, so that both fall on one side."""

    source: str
    key: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document belongs to the held-out split."""
        digest = hashlib.sha256(f"{self.source} {self.key}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64


def documents(folder: Path, seed: int, arithmetic: int = 36_000, stories: int = 16_000) -> Iterator[Document]:
    """Yield every document; packages are fetched to `folder`."""
    roots = fetch(folder)
    senses = read_senses(roots["wordnet-base"] / "usr/share/wordnet")
    yield from _glosses(senses.values())
    yield from _chats(senses, seed)
    for key, text in passages(read_text(roots["bible-kjv-text"] / "usr/lib/bible.data")):
        yield Document("scripture", key, text)
    for name in ("libpython3.11-minimal", "libpython3.11-stdlib"):
        for key, text in paragraphs(roots[name] / "usr/lib"):
            yield Document("docstrings", key, text)
    yield from _state_papers(roots["miscfiles"] / "usr/share/state")
    yield from _problems(seed, arithmetic)
    for number in range(stories):
        text = story(seed, number)
        yield Document("stories", text, text)


def _glosses(senses: Iterable[Sense]) -> Iterator[Document]:
    for sense in senses:
        yield Document("senses", sense.key, entry(sense))


def _chats(senses: dict[str, Sense], seed: int) -> Iterator[Document]:
    for sense in senses.values():
        rng = Random(f"chat {seed} {sense.key}")
        turns = list(questions(sense, senses, rng))
        repeats = CHAT_REPEATS[(sense.count > 1) + (sense.count > 20)]
        for _ in range(repeats):
            chosen = rng.sample(turns, min(len(turns), rng.choice((1, 1, 2, 3))))
            # the key of the senses' entries: a held-out sense is seen in neither form
            yield Document("chats", sense.key, render(chosen, SYSTEM if rng.random() < 0.05 else None))


def _problems(seed: int, number: int) -> Iterator[Document]:
    for i in range(number):
        _, first = problem(seed, i)
        yield Document("arithmetic", first.question, render([(first.question, first.solution)]))


def _state_papers(folder: Path) -> Iterator[Document]:
    import gzip

    for name in ("us-constitution", "us-declaration"):
        text = gzip.decompress((folder / f"{name}.gz").read_bytes()).decode("ascii")
        for i, paragraph in enumerate(text.split("\n\n")):
            words = " ".join(paragraph.split())
            if len(words) > 60:
                yield Document("state-papers", f"{name}:{i}", words)


def write_corpus(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write train.jsonl and heldout.jsonl below `folder`; return both paths.

    A text is written once, but for the problems of the training part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    seen: set[str] = set()
    with paths[0].open("w") as train, paths[1].open("w") as heldout:
        for document in documents(folder, seed):
            # a sense's entry and its chats are split alike
            side = Document("senses", document.key, "") if document.source == "chats" else document
            # there are few shares and bare sums: said once each, they would be a twentieth of the problems, not a third
            again = document.source == "arithmetic" and not side.held_out
            if again or document.text not in seen:
                seen.add(document.text)
                (heldout if side.held_out else train).write(json.dumps(asdict(document)) + "\n")
    return paths


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file of `write_corpus`."""
    with path.open() as lines:
        for line in lines:
            yield Document(**json.loads(line))

"""WordNet's data files as senses: words, definition, examples, what they are a kind of, and their opposites.

The format is described in wndb(5WN); a sense is kept where SemCor counted one of its words, so that the vocabulary
stays that of ordinary texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
_KINDS = {"n": "1", "v": "2", "a": "3", "r": "4", "s": "5"}  # ss_type as sense keys write it
_EXAMPLE = re.compile(r'"([^"]+)"')


@dataclass(frozen=True)
class Sense:
    """One synset. `parents` and `opposites` are keys of other senses, an opposite with the word that it has there."""

    key: str
    part: str
    words: tuple[str, ...]
    count: int
    definition: str
    examples: tuple[str, ...]
    parents: tuple[str, ...]
    opposites: tuple[tuple[int, str, int], ...]  # (index of the own word, key, index of the word there)


def read_senses(folder: Path) -> dict[str, Sense]:
    """Return the counted senses of the data files in `folder`, by key."""
    counts = _counts(folder / "cntlist.rev")
    senses = {}
    for suffix, part in _PARTS.items():
        for sense in _parse(folder / f"data.{suffix}", part, counts):
            senses[sense.key] = sense
    return senses


def _counts(path: Path) -> dict[tuple[str, str, str, str], int]:
    counts: dict[tuple[str, str, str, str], int] = {}
    for line in path.read_text("utf-8").splitlines():
        key, _, count = line.split(" ")
        lemma, _, sense = key.partition("%")
        kind, file, number = sense.split(":")[:3]
        counts[lemma, kind, file, number] = counts.get((lemma, kind, file, number), 0) + int(count)
    return counts


def _parse(path: Path, part: str, counts: dict[tuple[str, str, str, str], int]) -> Iterator[Sense]:
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("  "):
            continue  # the licence
        head, _, gloss = line.partition(" | ")
        fields = head.split(" ")
        size = int(fields[3], 16)
        words, count = [], 0
        for i in range(size):
            word, number = fields[4 + 2 * i], int(fields[5 + 2 * i], 16)
            word = re.sub(r"\((?:a|p|ip)\)$", "", word)
            count += counts.get((word.lower(), _KINDS[fields[2]], fields[1], f"{number:02d}"), 0)
            words.append(word.replace("_", " "))
        if not count:
            continue
        parents, opposites = [], []
        start = 4 + 2 * size
        for i in range(int(fields[start])):
            symbol, offset, kind, ends = fields[start + 1 + 4 * i : start + 5 + 4 * i]
            key = ("a" if kind == "s" else kind) + offset
            if symbol == "@":
                parents.append(key)
            elif symbol == "!":
                own, there = bytes.fromhex(ends)
                opposites.append((own - 1, key, there - 1))
        kind = "a" if fields[2] == "s" else fields[2]
        definition, examples = _gloss(gloss)
        if definition:
            yield Sense(
                kind + fields[0], part, tuple(words), count, definition, examples, tuple(parents), tuple(opposites)
            )


def _gloss(gloss: str) -> tuple[str, tuple[str, ...]]:
    examples = tuple(e.strip(" ;,.") for e in _EXAMPLE.findall(gloss))
    definition = gloss.split('"', 1)[0].strip(" ;:,\t")
    definition = re.sub(r"\s+", " ", definition.replace("`", "'"))
    return definition, tuple(e for e in examples if len(e) > 8)

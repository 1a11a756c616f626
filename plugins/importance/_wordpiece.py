"""WordPiece of the BERT models in lower case, with the place of every piece in the original text.

Text is cleaned of control characters, set in lower case without accents, and split at spaces, punctuation and Chinese
characters; each word is then taken apart from its start, by the longest piece of the vocabulary each time. Source: the
behaviour of BERT's published tokenizer, google-research/bert, tokenization.py.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_LONGEST = 100
_CONTROL = frozenset({"Cc", "Cf", "Co"})
_CHINESE = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class Piece(NamedTuple):
    """An entry of the vocabulary, and where it lies in the text, in characters, half-open."""

    id: int
    begin: int
    end: int


class WordPiece:
    """``vocabulary`` maps pieces to ids; pieces inside a word start with "##"."""

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self.start, self.end, self._unknown = (vocabulary[name] for name in ("[CLS]", "[SEP]", "[UNK]"))

    @classmethod
    def read(cls, file: Path) -> WordPiece:
        """From a file with one piece per line. Raises OSError, UnicodeDecodeError, or KeyError if it is another's."""
        lines = file.read_text("utf-8").split("\n")
        return cls({line.rstrip("\r"): index for index, line in enumerate(lines)})

    def pieces(self, text: str) -> list[Piece]:
        """The pieces of a text, without those that stand for its start and end."""
        return [piece for word in _words(text) for piece in self._cut(word)]

    def _cut(self, word: list[tuple[str, int]]) -> list[Piece]:
        whole = [Piece(self._unknown, word[0][1], word[-1][1] + 1)]
        if len(word) > _LONGEST:
            return whole
        letters = "".join(letter for letter, _ in word)
        found: list[Piece] = []
        at = 0
        while at < len(word):
            lead = "##" if at else ""
            known = ((end, self._vocabulary.get(lead + letters[at:end])) for end in range(len(word), at, -1))
            end, piece = next(((end, piece) for end, piece in known if piece is not None), (0, None))
            if piece is None:
                return whole
            found.append(Piece(piece, word[at][1], word[end - 1][1] + 1))
            at = end
        return found


def _words(text: str) -> Iterator[list[tuple[str, int]]]:
    """The words, each as its letters and where these came from in the text."""
    word: list[tuple[str, int]] = []
    for index, character in enumerate(text):
        control = unicodedata.category(character) in _CONTROL
        if character in "\t\n\r" or (character.isspace() and not control):
            if word:
                yield word
            word = []
            continue
        if control or character == "\ufffd":
            continue
        apart = any(first <= ord(character) <= last for first, last in _CHINESE)
        for letter in unicodedata.normalize("NFD", character):
            if unicodedata.category(letter) == "Mn":
                continue
            for small in letter.lower():
                if apart or _is_punctuation(small):
                    if word:
                        yield word
                    yield [(small, index)]
                    word = []
                else:
                    word.append((small, index))
    if word:
        yield word


def _is_punctuation(letter: str) -> bool:
    return (letter.isascii() and letter.isprintable() and not letter.isalnum() and letter != " ") or (
        unicodedata.category(letter)[0] == "P"
    )

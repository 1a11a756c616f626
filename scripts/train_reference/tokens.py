"""The vocabulary: a byte-level BPE that llama.cpp tokenises alike, and the documents as token arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .corpus import Document, read_documents

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIZE = 4096
BOUNDARY = "<|endoftext|>"  # stands before every document
SPECIALS = (BOUNDARY, "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
PRE = "qwen2"  # llama.cpp's name of the pattern below: single digits, and a word takes the space before it
PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

Tokens = npt.NDArray[np.uint16]


def train_vocabulary(texts: Iterable[str], path: Path, size: int = SIZE) -> Tokenizer:
    """Train the vocabulary on `texts`, write it to `path` (tokenizer.json) and return it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer


def read_vocabulary(path: Path) -> Tokenizer:
    """Return the tokenizer that `train_vocabulary` wrote."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def listing(path: Path) -> tuple[list[str], list[str]]:
    """Return (tokens by id, merges "left right" by rank) of a tokenizer.json, as gguf wants them."""
    model: dict[str, Any] = json.loads(path.read_text("utf-8"))["model"]
    tokens = [""] * len(model["vocab"])
    for token, number in model["vocab"].items():
        tokens[number] = token
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return tokens, merges


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
    """Yield each document with its tokens, the boundary first."""
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == 1024:
            yield from _encode(tokenizer, batch)
            batch = []
    yield from _encode(tokenizer, batch)


def _encode(tokenizer: Tokenizer, batch: Sequence[Document]) -> Iterator[tuple[Document, Tokens]]:
    encoded = tokenizer.encode_batch([BOUNDARY + d.text for d in batch], add_special_tokens=False)
    for document, result in zip(batch, encoded, strict=True):
        yield document, np.array(result.ids, np.uint16)


def write_tokens(tokenizer: Tokenizer, source: Path, target: Path) -> int:
    """Write the tokens of a documents file as .npz (`tokens`, `starts`, `sources`); return how many tokens."""
    arrays, sources = [], []
    for document, ids in encode(tokenizer, read_documents(source)):
        arrays.append(ids)
        sources.append(document.source)
    lengths = np.array([len(a) for a in arrays], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    np.savez(target, tokens=np.concatenate(arrays), starts=starts, sources=np.array(sources))
    return int(starts[-1])


class Stream:
    """The training documents in an order that is new in every epoch, cut into windows.

    A window is known from its number alone, so the place in the data is one integer.
    """

    def __init__(self, path: Path, length: int, seed: int) -> None:
        data = np.load(path)
        self.tokens: Tokens = data["tokens"]
        self.starts: npt.NDArray[np.int64] = data["starts"]
        self.length = length
        self.seed = seed
        self.per_epoch = (len(self.tokens) - 1) // length
        self._epoch = -1
        self._order = self.tokens

    def window(self, number: int) -> Tokens:
        """Return `length` + 1 tokens: a window and the token after it."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.starts) - 1)
            self._order = np.concatenate([self.tokens[self.starts[i] : self.starts[i + 1]] for i in order])
            self._epoch = epoch
        first = place * self.length
        return self._order[first : first + self.length + 1]

    def batch(self, step: int, size: int) -> npt.NDArray[np.int64]:
        """Return the windows of a step, (size, length + 1)."""
        return np.stack([self.window(step * size + i) for i in range(size)]).astype(np.int64)

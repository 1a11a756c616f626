"""Perplexities to be compared with: uniform, unigram and an interpolated Kneser-Ney trigram on the same tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .tokens import Tokens

Counts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # sorted codes of n-grams, how often each


def uniform(size: int) -> float:
    """Return the perplexity of a uniform guess."""
    return float(size)


def unigram(train: Tokens, heldout: Tokens, size: int) -> float:
    """Return the perplexity of token frequencies with one added."""
    counts = np.bincount(train, minlength=size) + 1.0
    return float(np.exp(-np.log(counts / counts.sum())[heldout].mean()))


class Trigram:
    """Interpolated Kneser-Ney with one discount per order, over a vocabulary of `size`."""

    def __init__(self, train: Tokens, size: int) -> None:
        self.size = size
        x = train.astype(np.int64)
        three, n3 = np.unique((x[:-2] * size + x[1:-1]) * size + x[2:], return_counts=True)
        two = np.unique(three % (size * size), return_counts=True)  # how many tokens come before each pair
        one = np.unique(two[0] % size, return_counts=True)
        self._three = three, n3, self._discount(n3)
        self._two = *two, self._discount(two[1])
        self._one = np.zeros(size) + 0.1
        self._one[one[0]] += one[1]
        self._one /= self._one.sum()
        self._contexts3 = self._contexts(three // size, n3)
        self._contexts2 = self._contexts(two[0] // size, two[1])

    @staticmethod
    def _discount(counts: npt.NDArray[np.int64]) -> float:
        ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
        return ones / (ones + 2 * twos) if ones else 0.5

    @staticmethod
    def _contexts(
        codes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        return codes[starts], np.add.reduceat(counts, starts), np.diff(np.append(starts, len(codes)))

    def probability(
        self, before: npt.NDArray[np.int64], last: npt.NDArray[np.int64], token: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return p(token | before last), elementwise."""
        lower = self._level(self._two, self._contexts2, last, token, self._one[token])
        return self._level(self._three, self._contexts3, before * self.size + last, token, lower)

    def _level(
        self,
        grams: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float],
        contexts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
        context: npt.NDArray[np.int64],
        token: npt.NDArray[np.int64],
        lower: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        codes, counts, discount = grams
        total, kinds = _look(contexts[0], contexts[1], context), _look(contexts[0], contexts[2], context)
        seen = _look(codes, counts, context * self.size + token)
        known = np.maximum(total, 1)
        p = (np.maximum(seen - discount, 0) + discount * kinds * lower) / known
        return np.where(total > 0, p, lower)

    def perplexity(self, documents: list[Tokens]) -> float:
        """Return the perplexity of the tokens after the first of each document."""
        return float(np.exp(-np.concatenate([self.log_probability(d) for d in documents]).mean()))

    def log_probability(self, document: Tokens) -> npt.NDArray[np.float64]:
        """Return log p of the tokens after the first; before the second stands a boundary (token 0) twice."""
        x = np.concatenate([[0], document.astype(np.int64)])
        return np.log(self.probability(x[:-2], x[1:-1], x[2:]))


def _look(
    codes: npt.NDArray[np.int64], values: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    places = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    return np.where(codes[places] == wanted, values[places], 0)

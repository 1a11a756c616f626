"""A small tokenizer that works: byte-level BPE of 256 byte tokens and few others, filled up with words.

The words are invented and no merge leads to them, so that a prompt becomes bytes; generated text is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

N_BYTES, BOS, EOS, PAD = 256, 256, 257, 258
N_PLAIN = 260
"""Tokens that are no word: bytes, specials and the double space."""

MERGES = ["\u0120 \u0120"]
"""llama.cpp demands at least one merge."""

_NORMAL, _CONTROL = 1, 3
_SYLLABLES = [a + b for a in "bdfghjklmnprstvz" for b in "aeiou"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts as gpt-2's byte alphabet writes them, and their llama.cpp token types."""

    tokens: list[str]
    types: list[int]


def make_vocabulary(n_vocab: int) -> Vocabulary:
    """``n_vocab`` distinct tokens, at least :data:`N_PLAIN`."""
    specials = ["<|begin|>", "<|end|>", "<|pad|>"]
    words = ["\u0120" + _word(i) for i in range(n_vocab - N_PLAIN)]
    return Vocabulary(
        tokens=[*_byte_alphabet(), *specials, "\u0120\u0120", *words],
        types=[_NORMAL] * N_BYTES + [_CONTROL] * len(specials) + [_NORMAL] * (1 + len(words)),
    )


def _word(number: int) -> str:
    """A word of two syllables or more that no other number has."""
    base = len(_SYLLABLES)
    word, number = _SYLLABLES[number % base], number // base
    while True:
        word, number = _SYLLABLES[number % base] + word, number // base
        if not number:
            return word


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself if it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(rest)) for byte in range(N_BYTES)]

"""Short question-answer chats in the model's template, made from WordNet's senses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from .wordnet import Sense

SYSTEM = "You are a helpful assistant."
_VERB = {"noun": "means", "verb": "means to", "adjective": "means", "adverb": "means"}


def render(turns: Sequence[tuple[str, str]], system: str | None = None) -> str:
    """Return question-answer turns in the chat template (TEMPLATE of tokens.py says the same in jinja)."""
    text = f"<|system|>\n{system}<|end|>\n" if system else ""
    for question, answer in turns:
        text += f"<|user|>\n{question}<|end|>\n<|assistant|>\n{answer}<|end|>\n"
    return text


def entry(sense: Sense) -> str:
    """Return a sense as an entry of a dictionary."""
    text = f"{sense.words[0]} ({sense.part}): {sense.definition}."
    if len(sense.words) > 1:
        text += f" Also: {', '.join(sense.words[1:4])}."
    for example in sense.examples[:2]:
        text += f" For example: {example}{'' if example.endswith(('!', '?')) else '.'}"
    return text


def questions(sense: Sense, senses: dict[str, Sense], rng: Random) -> Iterator[tuple[str, str]]:
    """Yield every question that can be asked of a sense, with its answer."""
    word = sense.words[0]
    yield (
        f'What does the {sense.part} "{word}" mean?',
        f'The {sense.part} "{word}" {_VERB[sense.part]} {sense.definition}.',
    )
    if sense.examples:
        example = sense.examples[0]
        example = example[0].upper() + example[1:] + ("" if example.endswith(("!", "?")) else ".")
        yield f'Use the {sense.part} "{word}" in a sentence.', example
    if len(sense.words) > 1:
        yield f'What is another word for "{word}"?', f'Another word for "{word}" is "{sense.words[1]}".'
    for own, key, there in sense.opposites[:1]:
        if key in senses and own >= 0 and there >= 0:
            other = senses[key].words[there]
            yield (
                f'What is the opposite of "{sense.words[own]}"?',
                f'The opposite of "{sense.words[own]}" is "{other}".',
            )
    if sense.part == "noun":
        for key in sense.parents[:1]:
            if key in senses:
                parent = senses[key].words[0]
                kind = f"{article(word)} is a kind of {parent}"
                if rng.random() < 0.5:
                    yield f"Is {article(word)} a kind of {parent}?", f"Yes, {kind}."
                else:
                    other = rng.choice(("animal", "plant", "color", "food", "building", "number", "sound", "tool"))
                    if other != parent:
                        yield f"Is {article(word)} a kind of {other}?", f"No, {kind}."


def article(word: str) -> str:
    """Return the word with its indefinite article; a name keeps none."""
    if word[0].isupper():
        return word
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"

"""Very short stories from a fixed grammar: who, where, what was found and how it ended."""

from __future__ import annotations

from random import Random

from .arithmetic import NAMES

PLACES = (
    "the market", "the river", "the old house", "the garden", "the forest", "the school", "the hill", "the lake",
    "the village", "the sea", "the farm", "the church",
)  # fmt: skip
ANIMALS = ("dog", "cat", "bird", "horse", "sheep", "rabbit", "duck", "fox", "goat", "mouse")
TRAITS = ("small", "old", "white", "black", "brown", "young", "gentle", "hungry", "tired", "lost")
WEATHER = ("warm", "cold", "bright", "windy", "quiet", "dark", "rainy", "clear")
TIMES = ("morning", "evening", "afternoon", "day", "night")
FOODS = ("bread", "milk", "water", "cheese", "an apple", "some corn", "a carrot", "some meat")
FEELINGS = ("happy", "sad", "afraid", "glad", "proud", "angry", "calm", "curious")
ENDS = (
    "They were friends from that day on.",
    "It was a good {time}.",
    "{Name} never forgot it.",
    "Then {he} slept well.",
    "And {he} was happy.",
    "From then on {Name} came back every {time}.",
)


def article_of(word: str) -> str:
    """Return "an" before a vowel, else "a"."""
    return "an" if word[0] in "aeiou" else "a"


def story(seed: int, number: int) -> str:
    """Return the story of that number; the same seed gives the same series."""
    rng = Random(f"story {seed} {number}")
    name, friend = rng.sample(list(NAMES), 2)
    he, his = NAMES[name]
    animal, trait = rng.choice(ANIMALS), rng.choice(TRAITS)
    article, He = article_of(trait), he.capitalize()  # noqa: N806 (the word as it begins a sentence)
    time, place, home = rng.choice(TIMES), rng.choice(PLACES), rng.choice(PLACES)
    food, feeling, after = rng.choice(FOODS), rng.choice(FEELINGS), rng.choice(FEELINGS)
    lines = [
        rng.choice(
            (
                f"One {rng.choice(WEATHER)} {time} {name} went to {place}.",
                f"It was a {rng.choice(WEATHER)} {time}, and {name} walked to {place}.",
                f"Once there was a child called {name}, who lived near {place}.",
                f"Once upon a time there was a child called {name}, who lived near {place}.",
                f"Once upon a time, on a {rng.choice(WEATHER)} {time}, {name} went to {place}.",
                f"{name} lived in a small house near {place}.",
                f"Long ago {article_of(animal)} {animal} lived near {place}, and so did {name}.",
            )
        ),
        rng.choice(
            (
                f"There {he} saw {article} {trait} {animal}.",
                f"On the way {he} met {article} {trait} {animal}.",
                f"Under a tree {he} found {article} {trait} {animal}.",
                f"Suddenly {article} {trait} {animal} came out of the grass.",
                f"{He} sat down, and soon {article} {trait} {animal} came near.",
            )
        ),
        rng.choice(
            (
                f"The {animal} was {feeling}, because it had lost its way.",
                f"The {animal} looked at {name} and was {feeling}.",
                f"The {animal} had not eaten, and it was {feeling}.",
                f"The {animal} could not find its way home.",
                f'"Who are you?" asked {name}, but the {animal} only looked {feeling}.',
            )
        ),
        rng.choice(
            (
                f"{name} gave the {animal} {food}.",
                f"So {name} took the {animal} to {home}.",
                f'"Do not be afraid," said {name}, and gave it {food}.',
                f"{name} wanted to help, so {he} looked for {food}.",
                f"It began to rain, and {name} and the {animal} ran to {home}.",
            )
        ),
        rng.choice(
            (
                f"{name} told {his} friend {friend} about the {animal}.",
                f"Then {friend} came, and {he} showed the {animal} to {friend}.",
                f'"Look," said {friend}, "the {animal} is {after} now."',
            )
        ),
        rng.choice(
            (
                f"In the end the {animal} was {after}.",
                f"After that the {animal} followed {name} to {home}.",
                f"The {animal} stayed with {name} and {friend}.",
                f"The next {time} the {animal} was gone, and {name} was {after}.",
            )
        ),
        rng.choice(ENDS).format(time=time, Name=name, he=he),
    ]
    if rng.random() < 0.5:  # not every story has a friend's part or a second look at the animal
        del lines[rng.choice((2, 4))]
    return " ".join(lines)

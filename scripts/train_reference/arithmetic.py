"""Arithmetic word problems with their solutions, from a fixed grammar: a task with right answers.

Every solution ends in "The answer is N.", which is what a grader looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

NAMES = {
    "Tom": ("he", "his"), "Anna": ("she", "her"), "Ben": ("he", "his"), "Mary": ("she", "her"),
    "Sam": ("he", "his"), "Lucy": ("she", "her"), "Jack": ("he", "his"), "Emma": ("she", "her"),
    "Paul": ("he", "his"), "Kate": ("she", "her"), "David": ("he", "his"), "Ruth": ("she", "her"),
}  # fmt: skip
THINGS = (
    ("apple", "apples"), ("book", "books"), ("coin", "coins"), ("egg", "eggs"), ("stone", "stones"), ("pen", "pens"),
    ("flower", "flowers"), ("card", "cards"), ("fish", "fish"), ("shell", "shells"), ("nut", "nuts"), ("ball", "balls"),
)  # fmt: skip
BOXES = (("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("shelf", "shelves"), ("jar", "jars"))


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution and the number that answers it."""

    question: str
    solution: str
    answer: int


def count(number: int, thing: tuple[str, str]) -> str:
    """Return number and noun, as in "1 apple" or "3 apples"."""
    return f"{number} {thing[0] if number == 1 else thing[1]}"


def _gain(rng: Random) -> Problem:
    name, thing, a, b = rng.choice(list(NAMES)), rng.choice(THINGS), rng.randint(1, 20), rng.randint(1, 20)
    he = NAMES[name][0]
    verb, past = rng.choice((("finds", "more"), ("buys", "more"), ("gets", "more")))
    question = (
        f"{name} has {count(a, thing)}. {he.capitalize()} {verb} {b} {past}. How many {thing[1]} does {name} have now?"
    )
    total = a + b
    return Problem(question, f"{name} has {a} + {b} = {total} {thing[1]}. The answer is {total}.", total)


def _loss(rng: Random) -> Problem:
    name, thing, a = rng.choice(list(NAMES)), rng.choice(THINGS), rng.randint(2, 30)
    b = rng.randint(1, a - 1)
    he = NAMES[name][0]
    deed = rng.choice(("loses", "sells", "gives away"))
    question = f"{name} has {count(a, thing)}. {he.capitalize()} {deed} {b}. How many {thing[1]} are left?"
    return Problem(question, f"There are {a} - {b} = {a - b} {thing[1]} left. The answer is {a - b}.", a - b)


def _groups(rng: Random) -> Problem:
    thing, box, a, b = rng.choice(THINGS), rng.choice(BOXES), rng.randint(2, 10), rng.randint(2, 10)
    question = (
        f"There are {count(a, box)}. Each {box[0]} holds {count(b, thing)}. How many {thing[1]} are there in all?"
    )
    return Problem(question, f"There are {a} * {b} = {a * b} {thing[1]}. The answer is {a * b}.", a * b)


def _share(rng: Random) -> Problem:
    thing, a, b = rng.choice(THINGS), rng.randint(2, 10), rng.randint(2, 10)
    question = f"{a * b} {thing[1]} are shared by {b} children. How many {thing[1]} does each child get?"
    return Problem(question, f"Each child gets {a * b} / {b} = {a} {thing[1]}. The answer is {a}.", a)


def _two_steps(rng: Random) -> Problem:
    name, thing, a, b = rng.choice(list(NAMES)), rng.choice(THINGS), rng.randint(2, 20), rng.randint(1, 15)
    total = a + b
    c = rng.randint(1, total - 1)
    he = NAMES[name][0].capitalize()
    question = (
        f"{name} has {count(a, thing)}. {he} finds {b} more. Then {he.lower()} gives away {c}. "
        f"How many {thing[1]} does {name} have now?"
    )
    left = total - c
    return Problem(
        question, f"First {name} has {a} + {b} = {total}. Then {total} - {c} = {left}. The answer is {left}.", left
    )


def _plain(rng: Random) -> Problem:
    sign = rng.choice("+-*")
    if sign == "*":
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        answer = a * b
    else:
        a, b = rng.randint(1, 30), rng.randint(1, 20)
        a = max(a, b) if sign == "-" else a
        answer = a + b if sign == "+" else a - b
    return Problem(f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {answer}. The answer is {answer}.", answer)


KINDS: dict[str, Callable[[Random], Problem]] = {
    "gain": _gain,
    "loss": _loss,
    "groups": _groups,
    "share": _share,
    "two-steps": _two_steps,
    "plain": _plain,
}


def problem(seed: int, number: int) -> tuple[str, Problem]:
    """Return (kind, problem) of that number; the same seed gives the same series."""
    rng = Random(f"arithmetic {seed} {number}")
    kind = rng.choice(list(KINDS))
    return kind, KINDS[kind](rng)

"""Gives a token's slots to the experts that a policy chose: the one form in which policies change a routing."""

from __future__ import annotations

from collections.abc import Sequence

from bmoe.contracts import Routing


def place(routing: Routing, token: int, chosen: Sequence[int], slots: Sequence[int] | None = None) -> None:
    """An expert that stays keeps its slot, the others follow in their order, and a slot that is left over is dead.

    ``chosen`` are different experts, as many as ``slots`` at most; ``slots`` are all of the token's if not given.
    """
    own: list[int] = routing.ids[token].tolist()
    free = range(len(own)) if slots is None else slots
    kept, held = set(chosen), {own[slot] for slot in free}
    coming = iter([expert for expert in chosen if expert not in held])
    for slot in free:
        if own[slot] in kept:
            continue
        expert = next(coming, None)
        if expert is None:
            routing.dead[token, slot] = True
        else:
            routing.ids[token, slot] = expert

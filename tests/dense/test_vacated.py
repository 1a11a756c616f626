"""Which pages of a mapping may go once weights have moved: never one that a weight which stayed has a byte in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bmoe.contracts import ModelFacts, ShardFacts, TensorFacts
from bmoe.native import mapping, memory

SIZES = st.lists(st.tuples(st.integers(0, 3 * memory.PAGE), st.integers(0, 64), st.booleans()), min_size=1, max_size=12)


@given(SIZES)
def test_exactly_the_pages_of_what_moved_alone_are_vacated(layout: list[tuple[int, int, bool]]):
    tensors, moved, at = [], set(), 100
    for index, (nbytes, gap, goes) in enumerate(layout):
        at += gap
        tensors.append(TensorFacts(f"t{index}", 0, at, nbytes, (nbytes,), "I8"))
        at += nbytes
        if goes:
            moved.add(f"t{index}")
    facts = ModelFacts("", "", "", (ShardFacts("a", at),), 0, 0, 0, 0, 0, 0, 0, (), tuple(tensors))

    def pages(goes: bool) -> set[int]:
        spans = [(t.offset, t.offset + t.nbytes) for t in tensors if (t.name in moved) == goes and t.nbytes]
        return {page for a, b in spans for page in range(a // memory.PAGE, (b - 1) // memory.PAGE + 1)}

    (found,) = mapping.vacated(facts, moved)

    assert all(first % memory.PAGE == last % memory.PAGE == 0 for first, last in found)
    vacated = {page for a, b in found for page in range(a // memory.PAGE, b // memory.PAGE)}
    assert vacated == pages(True) - pages(False)

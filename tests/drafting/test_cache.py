"""What a cache hears of a verify batch: the accepted tokens, one after the other, as if each had been decoded alone."""

from __future__ import annotations

import pytest

from bmoe.contracts import Proposal
from bmoe.engine import Engine
from bmoe.resolve import resolve
from bmoe.testing.models import TinyModels
from bmoe.tree import Tree
from bmoe_plugins.caches.lru import Lru

PROMPT = [(i * 37 + 11) % 512 for i in range(12)]
MIB = 1 << 20


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models")).path("tiny-qwen3moe", "F32")


def opened(path, share=10.0, **draft):
    table = {
        "model": {"path": str(path), "ctx": 128, "ubatch": 16, "threads": 1, "kv_type": "f32"},
        "cache": {"policy": "lru", "budget_mb": 64},
        "draft": {"drafter": "oracle", "max_draft": 6, "governor": "fixed", "options": {"text": [], **draft}},
    }
    table["cache"]["budget_mb"] = share * resolve(table).facts.expert_bytes / MIB
    return Engine(resolve(table))


class Heard(Lru):
    """Notes what it is told."""

    def __init__(self):
        super().__init__()
        self.uses, self.admitted = [], []

    def touch(self, keys, /):
        self.uses.append(list(keys))
        super().touch(keys)

    def admit(self, key, cold, /):
        self.admitted.append((key, cold))
        super().admit(key, cold)


def listen(engine):
    """Have a policy in the place of the store's own, which has seen nothing yet."""
    store, heard = engine.stream.store, Heard()
    store._touch, store._victim, store._admitted, store._forget = heard.touch, heard.victim, heard.admit, heard.forget
    return heard


def texts(conversation, count):
    return [token.id for token in conversation.generate(PROMPT, count)]


def test_the_cache_hears_what_it_would_hear_without_drafts(path):
    """The same uses in the same order, token by token and layer by layer, and not one of a rejected token."""
    with opened(path) as engine, engine.conversation() as conversation:
        said = texts(conversation, 9)
        plain = listen(engine)
        texts(conversation, 9)
    wrong = [(token + 1) % 512 for token in said]
    with opened(path, branching=2) as engine, engine.conversation() as conversation:
        heard = listen(engine)
        conversation.feed(PROMPT)
        conversation.verify(Tree.of(said[0], Proposal((said[1], wrong[1], said[2]), (-1, -1, 0))))
        conversation.keep(Tree.of(said[0], Proposal((said[1], wrong[1], said[2]), (-1, -1, 0))), [0, 1, 3])
        for tree, kept in (
            (Tree.of(said[3], Proposal((said[4], wrong[5]))), [0, 1]),
            (Tree.of(said[5], Proposal((wrong[6], wrong[7]))), [0]),
            (Tree.of(said[6], Proposal((wrong[7], said[7]), (-1, -1))), [0, 2]),
        ):
            conversation.verify(tree)
            conversation.keep(tree, kept)
        assert [*PROMPT, *said[:8]] == conversation.tokens
    assert plain.uses == heard.uses


def test_what_is_read_for_drafts_enters_cold(path):
    """A cold entry is given up first, unless an accepted token uses it."""
    with opened(path) as engine, engine.conversation() as conversation:
        conversation.feed(PROMPT)
        heard = listen(engine)
        tree = Tree.of(7, Proposal((300, 301, 302)))
        conversation.verify(tree)
        assert heard.admitted
        assert {True} == {cold for _, cold in heard.admitted}
        assert not heard.uses
        conversation.keep(tree, [0])
        used = {key for keys in heard.uses for key in keys}
        assert used
        order = list(heard._order)
        rejected = [key for key, _ in heard.admitted if key not in used]
        assert rejected
        assert max(order.index(key) for key in rejected) < min(order.index(key) for key in used if key in order)


@pytest.mark.parametrize("budget", [0.4, 10.0])
def test_bytes_read_for_rejected_tokens_alone_are_counted(path, budget):
    """Against the same verification with every token kept: then nothing was read for nothing."""
    with opened(path, share=budget) as engine, engine.conversation() as conversation:
        tree = Tree.of(7, Proposal((300, 301, 302)))
        counts = []
        for kept in ([0, 1, 2, 3], [0]):
            conversation.clear()
            conversation.feed(PROMPT)
            for bank in range(len(engine.facts.banks)):  # a cache that is as cold each time
                base, n = engine.seam.entry_base[bank], engine.facts.banks[bank].n_expert
                assert n == len(engine.seam.resident[base : base + n])
            engine.resize_cache(engine.stream.store.budget_bytes / MIB)
            engine.stream.store._start_over()
            cost = conversation.verify(tree)
            counts.append((cost.read_bytes, conversation.keep(tree, kept)))
        (read, none), (again, wasted) = counts
        assert read == again
        assert none == 0
        assert 0 < wasted < read


def test_a_verify_batch_that_failed_leaves_the_cache_as_it_hears(path):
    """The next decode is heard of as any other."""
    with opened(path) as engine, engine.conversation() as conversation:
        conversation.feed(PROMPT)
        tree = Tree.of(7, Proposal((300, 301)))
        conversation.verify(tree)  # nobody says what was accepted
        conversation._context.truncate(len(PROMPT))
        heard = listen(engine)
        conversation.feed([7], "decode")
        assert len(engine.facts.banks) == len(heard.uses)


def test_another_conversations_acceptance_is_not_taken_for_ones_own(path):
    with opened(path) as engine, engine.conversation() as one, engine.conversation() as two:
        for conversation in (one, two):
            conversation.feed(PROMPT)
        tree = Tree.of(7, Proposal((300, 301)))
        one.verify(tree)
        two.verify(tree)
        heard = listen(engine)
        assert one.keep(tree, [0, 1, 2]) == 0
        assert not heard.uses
        assert [*PROMPT, 7, 300, 301] == one.tokens

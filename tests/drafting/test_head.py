"""A head that is streamed guesses what one in memory guesses, byte for byte, and what its formula says."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from bmoe.budget import held_bytes
from bmoe.claims import drafting_bytes
from bmoe.contracts import BatchContext, Proposal
from bmoe.engine import Engine
from bmoe.errors import NativeError, ProfileError
from bmoe.head import DraftHead
from bmoe.native.compiled import compiled_seam_missing
from bmoe.native.model import Context
from bmoe.replay.choose import check_model
from bmoe.replay.read_lookups import read_lookups
from bmoe.resolve import resolve
from bmoe.testing.models import TinyModels
from bmoe.testing.watch import within_reach
from bmoe.tree import Tree

from .headed import CTX, DRAFT, MIB, RESIDENT, UBATCH, Followed, budget, planned

TEXT = [(i * i * 31 + 7 * i + 5) % 512 for i in range(60)]
SEAMS = [
    "python",
    pytest.param("c", marks=pytest.mark.skipif(bool(compiled_seam_missing()), reason="the seam is not compiled")),
]
EVERY = 512
"""As many candidates as there are tokens: a level is then all logits, as exact as they were."""


def rounds(one, count=3):
    """All that a head guesses over a text: after a prompt, after single tokens, and after a verification."""
    said = []
    one.read(TEXT[:37])
    for at in range(37, 37 + count):
        levels, _ = one.head.guess(TEXT[at], 4, branching=EVERY)
        said.append(levels)
        one.read([TEXT[at]], "decode")
    at = 37 + count
    drafted = (*TEXT[at + 1 : at + 3], 5, 9)[: one.engine.plan.ubatch - 1]
    verified(one, Tree.of(TEXT[at], Proposal(drafted)), [0, 1, 2])
    said.append(one.head.guess(TEXT[at + 3], 3, branching=EVERY)[0])
    return said, one.digest.hexdigest(), len(one.head)


def verified(one, tree, kept):
    """Verify a tree, and take the tokens at ``kept`` for text."""
    held = len(one.head)
    batch = BatchContext("verify", tuple(held + depth for depth in tree.depth), is_output=(True,) * len(tree.tokens))
    one.engine.verify(one.trunk, tree, batch, lambda: False)
    for row in range(len(tree.tokens)):
        one.digest.update(one.trunk.logits(row).tobytes())
    assert one.engine.keep(one.trunk, tree.path_of(kept[-1]), kept, held + len(kept))[0]
    one.head.remember([tree.tokens[place] for place in kept], kept)


@pytest.fixture(name="expected", scope="module")
def _expected(headed):
    """What a head in memory guesses, by the width of its batches."""

    @functools.cache
    def of(ubatch):
        draft = {**DRAFT, "max_draft": min(DRAFT["max_draft"], ubatch - 1)}
        one = Followed(planned(headed, model={"ubatch": ubatch}, draft=draft, **RESIDENT))
        try:
            return rounds(one)
        finally:
            one.close()

    return of


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 9.0])
def test_a_streamed_head_guesses_what_a_resident_one_does(followed, headed, expected, seam, share):
    """With memory that is poisoned until it is read, and every read checked; the trunk's logits are the same too."""
    one = followed(seam=seam, watched=True, cache=budget(headed, share) if share else {"budget_mb": 0})

    assert rounds(one) == expected(one.engine.plan.ubatch)
    assert {key >> 24 for key in one.watch.fetcher.read} == {1, 2, 3, 4}
    assert within_reach(one.engine.facts, one.engine.plan.banks) in ([], None)


@pytest.mark.parametrize(
    "sections",
    [
        {"stream": {"overlap": "off"}},
        {"prefetch": {"policy": "temporal"}},
        {"prefetch": {"policy": "hot"}, "cache": {"policy": "router-ema"}},
        {"dense": {"placement": "anon"}},
        {"routing": [{"plugin": "top-k", "options": {"k": 2}}]},
        {"fetch": {"plugin": "pread", "lanes": 2}},
    ],
)
def test_whatever_else_is_chosen_its_guesses_are_the_same(followed, headed, expected, sections):
    cache = {**budget(headed, 0.8), **sections.get("cache", {})}
    one = followed(watched=True, **{**sections, "cache": cache})
    assert rounds(one) == expected(one.engine.plan.ubatch)


def test_a_chain_of_guesses_is_that_of_the_formula(followed, headed, formula):
    """Each guess but the first rests on the head's own state."""
    one, text = followed(), TEXT[:21]
    one.read(text)
    levels, _ = one.head.guess(TEXT[21], 3, branching=EVERY)

    hidden, _ = formula.trunk(text)
    tokens, before = TEXT[:22], np.concatenate([np.zeros_like(hidden[:1]), hidden])
    for level in levels:
        states, rows = formula.head(tokens, before)
        shares = np.exp(rows[-1] - rows[-1].max())
        shares /= shares.sum()
        given = dict(level)
        assert max(abs(given[token] - shares[token]) for token in range(512)) < 1e-4
        assert level[0][0] == rows[-1].argmax()
        tokens, before = [*tokens, level[0][0]], np.concatenate([before, states[-1:]])


@pytest.fixture(name="formula", scope="module")
def _formula(headed):
    path = Path(__file__).parents[1] / "native/glm4moe.py"
    spec = importlib.util.spec_from_file_location("glm4moe_formula", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Formula(headed)


# ---- the cut


@pytest.mark.parametrize("seam", SEAMS)
def test_following_reads_nothing_and_changes_no_guess(followed, headed, seam, monkeypatch):
    """Against a head whose graph is computed to its end."""
    cut = followed(seam=seam, watched=True, cache=budget(headed, 0.8))
    cut.read(TEXT[:40])
    seen = [cut.watch.fetcher.nbytes, cut.engine.stream.store.counters.lookups, cut.engine.seam.drain()]
    cost = cut.head.follow()
    assert [cut.watch.fetcher.nbytes, cut.engine.stream.store.counters.lookups, cut.engine.seam.drain()] == seen
    assert (cost.read_bytes, cost.lookups, cost.decodes, cost.tokens) == (0, 0, 3, 40)
    assert (cut.head.held, len(cut.head)) == (40, 40)

    real = Engine.perform

    def to_the_end(*args, cut=False):
        return real(*args)

    monkeypatch.setattr(Engine, "perform", to_the_end)
    whole = followed(seam=seam, cache=budget(headed, 0.8))
    whole.read(TEXT[:40])
    assert whole.head.follow().read_bytes > 0
    for last in TEXT[40:44]:
        assert cut.head.guess(last, 3, branching=EVERY)[0] == whole.head.guess(last, 3, branching=EVERY)[0]


def test_it_follows_in_pieces_and_no_further_than_asked(followed):
    one, other = followed(), followed()
    for each in (one, other):
        each.read(TEXT[:40])
    assert one.head.follow(3).tokens == 3
    assert (one.head.held, one.head.follow(2).tokens) == (3, 0)
    assert one.head.follow(99).decodes == 3
    chosen = [level[0][0] for level in one.head.guess(7, 3)[0]]
    assert chosen == [level[0][0] for level in other.head.guess(7, 3)[0]]


# ---- what stays


def test_of_a_tree_the_tokens_that_are_kept_are_remembered(headed, followed):
    """With the states that they have at their places, not those of their neighbours."""
    one, plain = followed(draft={**DRAFT, "options": {"text": [], "branching": 2}}), followed()
    one.read(TEXT[:20])
    tree = Tree.of(TEXT[20], Proposal((7, TEXT[21], 8, TEXT[22]), (-1, -1, 0, 1)))
    verified(one, tree, [0, 2, 4])
    plain.read(TEXT[:23])
    mine, theirs = (each.head.guess(9, 3)[0] for each in (one, plain))
    assert [level[0][0] for level in mine] == [level[0][0] for level in theirs]
    assert np.allclose([level[0][1] for level in mine], [level[0][1] for level in theirs], rtol=1e-3)


def test_a_guess_leaves_the_entry_of_its_last_token_and_no_other(followed):
    one = followed()
    one.read(TEXT[:20])
    first = one.head.guess(TEXT[20], 5)[0]
    assert one.head.guess(TEXT[20], 5)[0] == first
    one.head.guess(3, 5)  # another token there
    assert one.head.guess(TEXT[20], 5)[0] == first
    one.read([TEXT[20]], "decode")
    assert one.head.follow().tokens == 0
    one.head.guess(4, 2)
    one.read([TEXT[21]], "decode")  # and not the token that was guessed from
    assert one.head.follow().tokens == 1


@pytest.mark.parametrize("length", [0, 1, 15, 16, 29])
def test_a_truncated_head_is_one_that_never_read_further(followed, length):
    one, fresh = followed(), followed()
    one.read(TEXT[:30])
    one.head.guess(TEXT[30], 3)
    one.head.truncate(length)
    one.trunk.truncate(length)
    if length:
        fresh.read(TEXT[:length])
        fresh.head.follow()
    assert (len(one.head), one.head.held) == (length, length)
    mine, theirs = (each.head.guess(8, 3)[0] for each in (one, fresh))
    assert [level[0][0] for level in mine] == [level[0][0] for level in theirs]
    assert np.allclose([level[0][1] for level in mine], [level[0][1] for level in theirs], rtol=1e-3)
    one.head.truncate(99)
    assert len(one.head) == length


def test_a_cleared_head_begins_anew(followed):
    one = followed()
    said = []
    for _ in range(2):
        one.clear()
        one.read(TEXT[:9])
        said.append(one.head.guess(5, 3, branching=EVERY)[0])
    assert said[0] == said[1]


def test_levels_end_where_the_head_is_too_unsure_and_where_the_context_ends(followed):
    one = followed()
    one.read(TEXT[:20])
    levels, _ = one.head.guess(TEXT[20], 4, branching=3)
    assert [len(level) for level in levels] == [3] * 4
    assert all(level[0][1] >= level[1][1] >= level[2][1] for level in levels)
    for bound in [level[0][1] * factor for level in levels for factor in (1, 1.001)]:
        fewer, cost = one.head.guess(TEXT[20], 4, branching=3, least=bound)
        assert fewer == list(takewhile(lambda level, bound=bound: level[0][1] >= bound, levels))
        assert cost.decodes == min(4, len(fewer) + 1)
    assert one.head.guess(TEXT[20], 4, least=1.1)[0] == []
    one.clear()
    one.read([1] * (CTX - 2))
    assert len(one.head.guess(1, 9)[0]) == 2
    one.read([1, 1])
    assert one.head.guess(1, 9)[0] == []


# ---- what the plan makes of it


def test_what_is_streamed_budgeted_and_claimed_covers_the_head(headed):
    plan = planned(headed, cache={"policy": "lru", "budget_mb": 64})
    plain = planned(headed, guesses="", cache={"policy": "lru", "budget_mb": 64})
    entries = sum(bank.n_expert for bank in plan.facts.banks)
    assert plan.banks == (*plan.facts.banks, *plan.facts.nextn_banks)
    assert plan.budget.capacity == entries + plan.facts.nextn_banks[0].n_expert
    assert (plan.budget.cycle, plan.budget.cycle_bytes) == (plain.budget.cycle, plain.budget.cycle_bytes)
    assert (plain.banks, plain.budget.capacity) == (plain.facts.banks, entries)


def test_what_an_automatic_budget_leaves_is_no_less_than_what_the_head_takes(followed, headed):
    """What llama.cpp says that the head's context has, and the states of a whole context."""
    one = followed()
    assert one.head._context.buffers
    plain = planned(headed, guesses="")
    ours, theirs = (drafting_bytes(p.profile, p.facts, p.draft, None) for p in (one.engine.plan, plain))
    assert ours - theirs >= one.head.nbytes


def test_a_smaller_cache_and_a_larger_one_hold_the_head_too(followed, headed, expected):
    one = followed(watched=True, cache=budget(headed, 0.8))
    everything = sum(held_bytes(bank, 4096) * bank.n_expert for bank in one.engine.plan.banks)
    one.engine.resize_cache(everything / MIB + 1)
    assert one.engine.stream.store.budget_bytes == everything
    assert rounds(one) == expected(one.engine.plan.ubatch)


def test_without_a_drafter_that_uses_it_nothing_of_the_head_is_opened(headed):
    with Engine(planned(headed, guesses="")) as engine:
        assert not engine.model.has_head
        assert len(engine.seam.banks) == len(engine.facts.banks)
        with pytest.raises(NativeError, match="no drafter of the profile uses the head"):
            DraftHead(engine, Context(engine.model, engine.context_options()))


def test_a_model_without_a_head_is_refused_where_the_drafter_is_named(tmp_path):
    path = TinyModels(tmp_path).path("tiny-qwen3moe", "F32")
    with pytest.raises(ProfileError, match=r"draft\.drafter = \"oracle\" has nothing to guess with: no head of arch"):
        planned(path)


@pytest.mark.parametrize("part", ["nextn.eh_proj", "nextn.hnorm", "ffn_gate_inp"])
@pytest.mark.parametrize("sections", [{}, RESIDENT])
def test_a_head_that_is_promised_and_missing_is_refused(headed, tmp_path, part, sections):
    other, name = tmp_path / "other.gguf", f"blk.4.{part}.weight".encode()
    other.write_bytes(headed.read_bytes().replace(name, name.replace(b"blk.4", b"was.4")))
    with pytest.raises(ProfileError, match=f"lacks {name.decode()}") as caught:
        planned(other, **sections)
    assert len(str(caught.value).splitlines()) == 1
    plan = planned(headed, **sections)
    with pytest.raises(NativeError, match=f"lacks {name.decode()}"):
        Engine(replace(plan, facts=planned(other, guesses="").facts))


@pytest.mark.parametrize("asked", [{"heat": True}, {"trace": True}])
def test_a_heat_file_is_of_the_text_and_traces_have_the_head_too(followed, headed, tmp_path, asked):
    """Guesses are no text: they do not count for what is read at open."""
    trace = {kind: str(tmp_path / f"{kind}.csv") for kind in ("route", "io", "compute")} if "trace" in asked else {}
    heat = {"heat": str(tmp_path / "heat.json")} if "heat" in asked else {}
    for _ in range(2):
        one = followed(cache={**budget(headed, 0.8), **heat}, trace=trace)
        rounds(one)
        one.close()
        if trace:
            break
    if trace:
        layers = {kind: _layers(tmp_path / f"{kind}.csv") for kind in trace}
        assert layers["route"] == layers["io"] == {1, 2, 3, 4}
        assert layers["compute"] >= {1, 2, 3, 4}
    else:
        assert one.engine.warmth.preloaded_bytes > 0


@pytest.mark.parametrize("name", ["route.csv", "route.parquet"])
def test_a_routing_trace_with_guesses_of_a_head_is_replayed(headed, tmp_path, name):
    """Each round with the guesses that were made for it; sizes of entries are those of the head's layer too."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path, facts = tmp_path / name, planned(headed).facts
    table = {"model": {"path": str(headed), "ctx": CTX, "ubatch": UBATCH, "threads": 1}, "trace": {"route": str(path)}}
    draft = {"drafter": "mtp", "max_draft": 3, "governor": "fixed"}
    with Engine(resolve({**table, "draft": draft, "cache": budget(headed, 0.8)})) as engine:
        assert len(list(engine.conversation().generate(TEXT[:9], 12))) == 12
    entries = {bank.layer: bank.entry_bytes for bank in (*facts.banks, *facts.nextn_banks)}
    for model in (None, facts):
        trace = read_lookups(path, model)
        assert {layer: size for layer, size in trace.entry_bytes.items() if size} == entries
        head = [int(keys) >> 24 == 4 for keys in trace.keys[trace.starts[:-1]]]
        assert [bool(guessed) for guessed in trace.drafts.guessed] == head
        assert trace.cycle <= 3 * facts.n_used * 4
        check_model(trace, facts)
    if name.endswith("csv"):
        rows = [line.split(",") for line in path.read_text().splitlines() if line[0].isdigit()]
        rounds_of = {phase: {row[9] for row in rows if row[1] in phase} for phase in ("4", "23")}
        assert rounds_of["23"] == rounds_of["4"]
        assert len(rounds_of["4"]) > 1


def test_it_is_cut_where_every_node_is_timed_too(followed, headed, expected, tmp_path):
    trace = {"compute": str(tmp_path / "nodes.csv"), "detail": "node"}
    one = followed(cache=budget(headed, 0.8), trace=trace)
    assert rounds(one) == expected(one.engine.plan.ubatch)
    one.engine.close()
    assert _layers(tmp_path / "nodes.csv") >= {0, 1, 2, 3, 4}


def _layers(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    column = lines[0].split(",").index("layer")
    return {int(line.split(",")[column]) for line in lines[1:]}


# ---- a trained one


def test_a_trained_head_agrees_with_its_trunk_far_above_chance():
    """Over the reference model's own greedy text."""
    path = resolve("demo").facts.path
    one = Followed(planned(Path(path), cache={"policy": "lru", "budget_mb": 6.4}))
    try:
        prompt = one.engine.model.tokenize("Question: what is seven times eight? Answer:")[:UBATCH]
        chosen, right, tried = one.read(prompt)[0], [0, 0, 0], [0, 0, 0]
        text = []
        guesses = []
        for _ in range(60):
            guesses.append([level[0][0] for level in one.head.guess(chosen, 3)[0]])
            text.append(chosen)
            chosen, _ = one.read([chosen], "decode")
        for at, levels in enumerate(guesses):
            for depth, token in enumerate(levels):
                if at + depth + 1 < len(text):
                    right[depth] += token == text[at + depth + 1]
                    tried[depth] += 1
                    if token != text[at + depth + 1]:
                        break
        vocabulary = one.engine.model.n_vocab
    finally:
        one.close()
    assert tried[0] == 59
    assert right[0] / tried[0] > max(0.4, 100 / vocabulary), (right, tried)

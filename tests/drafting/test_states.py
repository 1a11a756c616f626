"""Models that keep a state for the whole text: what is rejected leaves no trace in it, however it was gone back."""

from __future__ import annotations

import ctypes
import errno

import pytest

from bmoe.contracts import Proposal
from bmoe.engine import Engine
from bmoe.errors import ModelError, ReadError
from bmoe.native import lib
from bmoe.native.states import States
from bmoe.resolve import resolve
from bmoe.testing.faults import Faults
from bmoe.testing.models import TinyModels
from bmoe.testing.redraft import DraftRecorder, reference, repeat, with_other_drafts
from bmoe.tree import Tree

from .states import FEW, NONE, PROMPT, SNAPSHOTS, SNAPSHOTS_AND_NONE, TOKENS, said, table


@pytest.fixture(name="models", scope="session")
def _models(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("states"))


@pytest.fixture(name="plain", scope="session")
def _plain(models):
    """What each architecture says after the prompt without drafts, by name."""
    known = {}

    def plain(arch):
        if arch not in known:
            with Engine(resolve(table(models, arch))) as engine, engine.conversation() as conversation:
                known[arch] = said(conversation)
        return known[arch]

    return plain


def drafted(models, arch, plain, acceptance):
    if acceptance is None:
        return table(models, arch, "ngram", min_match=1)
    return table(models, arch, "oracle", text=[*PROMPT, *plain(arch)], acceptance=acceptance)


def rows_of(rounds):
    return [tuple(each.rows[index] for index in each.kept) if each.kept else each.rows for each in rounds]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0, None])
@pytest.mark.parametrize("arch", SNAPSHOTS_AND_NONE)
def test_a_rejected_tail_leaves_no_trace(models, plain, arch, acceptance):
    """The text is that without drafts; and with other rejected tokens every row that is kept has the same bytes."""
    engine = DraftRecorder(resolve(drafted(models, arch, plain, acceptance)))
    with engine, engine.conversation() as conversation:
        assert engine.model.has_states
        assert plain(arch) == said(conversation)
        assert [*PROMPT, *plain(arch)[:-1]] == conversation.tokens
        rounds = list(engine.rounds)
        others = with_other_drafts(rounds, engine.facts.n_vocab)
        again = repeat(engine, conversation, PROMPT, others)
    rejected = sum(len(each.tokens) - len(each.kept) for each in rounds if each.kept)
    accepted = sum(len(each.kept) - 1 for each in rounds if each.kept)
    if acceptance is not None:
        assert bool(rejected) == (acceptance < 1)
        assert bool(accepted) == (acceptance > 0)
    for each, rows in zip(others, again, strict=True):
        each.rows = rows
    assert rows_of(rounds) == rows_of(others)


@pytest.mark.parametrize("arch", FEW)
def test_rounds_have_the_bytes_of_plain_llama_cpp(models, plain, arch):
    settings = drafted(models, arch, plain, 0.5)
    with DraftRecorder(resolve(settings)) as engine, engine.conversation() as conversation:
        said(conversation)
        rounds = list(engine.rounds)
    assert [each.rows for each in rounds] == reference(settings, PROMPT, rounds)


@pytest.mark.parametrize("arch", SNAPSHOTS_AND_NONE)
@pytest.mark.parametrize("back", [1, 2, 4, 5])
def test_going_back_is_right_or_refused(models, arch, back):
    """After a decode of five tokens: the logits that follow are those of a text that never had the dropped ones."""
    tail = [50, 60, 70, 80, 90]
    with Engine(resolve(table(models, arch, "oracle", text=[]))) as engine, engine.conversation() as conversation:
        context, held = conversation._context, len(PROMPT)

        def after(others):
            conversation.clear()
            conversation.feed(PROMPT)
            context.decode_at([*tail[: 5 - back], *others], range(held, held + 5))
            cut = context.truncate(held + 5 - back)
            if cut:
                assert 0 == context.decode([33])
            return context.logits().tobytes() if cut else None

        one, other = after(tail[5 - back :]), after([7] * back)
        assert (one is not None) == (arch in SNAPSHOTS and back < 5)
        assert one == other


@pytest.mark.parametrize("arch", SNAPSHOTS_AND_NONE)
def test_a_state_of_an_earlier_decode_is_not_taken_for_one_of_the_last(models, arch):
    """llama.cpp would: it checks how far back a token is, not whether the last decode reached that far."""
    with Engine(resolve(table(models, arch, "oracle", text=[]))) as engine, engine.conversation() as conversation:
        conversation.feed(PROMPT)
        for token in (50, 60, 70):
            conversation.feed([token], "decode")
        assert not conversation._context.truncate(len(PROMPT) + 2)
        cost = conversation.rewind(len(PROMPT) + 2)
        assert cost.decodes
        conversation.feed([33], "decode")
        row = conversation.logits().tobytes()
        conversation.clear()
        conversation.feed([*PROMPT, 50, 60])
        conversation.feed([33], "decode")
        assert conversation.logits().tobytes() == row


def test_llama_cpp_goes_back_to_a_stale_state(models):
    """Why :class:`States` counts: if this fails, llama.cpp has learned to refuse, and the counting can go."""
    llama = lib.llama()
    with Engine(resolve(table(models, "lfm2moe", "oracle", text=[]))) as engine, engine.conversation() as conversation:
        conversation.feed(PROMPT)
        for token in (50, 60):
            conversation.feed([token], "decode")
        context = conversation._context
        assert llama.llama_memory_seq_rm(llama.llama_get_memory(context.handle), 0, len(PROMPT), -1)
        assert 0 == context.decode([33])
        stale = conversation.logits()
        conversation.clear()
        conversation.feed(PROMPT)
        conversation.feed([33], "decode")
        assert abs(stale - conversation.logits()).max() > 0.1


@pytest.mark.parametrize("arch", FEW)
def test_twice_in_a_row(models, arch):
    """Further back between two decodes: within the last decode where there are snapshots, else to the mark."""
    with Engine(resolve(table(models, arch, "oracle", text=[]))) as engine, engine.conversation() as conversation:
        held = len(PROMPT)

        def after(rest):
            conversation.clear()
            conversation.feed(PROMPT)
            tree = Tree.of(50, Proposal((60, *rest)))
            conversation.verify(tree)
            conversation.keep(tree, range(4))
            conversation._unsay(1)
            conversation._unsay(1)
            assert [*PROMPT, 50, 60] == conversation.tokens
            conversation.feed([33], "decode")
            return conversation.logits().tobytes()

        assert after((70, 80, 90)) == after((7, 8, 9))
        assert held + 3 == len(conversation.tokens)


@pytest.mark.parametrize("arch", SNAPSHOTS_AND_NONE)
def test_a_mark_is_gone_back_to_from_anywhere(models, arch):
    with Engine(resolve(table(models, arch, "oracle", text=[]))) as engine, engine.conversation() as conversation:
        context, held = conversation._context, len(PROMPT)

        def row():
            assert 0 == context.decode([33])
            return context.logits().tobytes()

        conversation.feed(PROMPT)
        context.mark()
        right = row()
        for tokens in ([50], [50, 60, 70], list(range(5, 21))):
            assert held == context.go_back(held)
            for token in (1, 2, 3):
                context.decode([token])
            context.decode(tokens)
            assert held == context.go_back(held + 1)
            assert row() == right
        assert 0 == context.go_back(held - 1)  # before the mark there is nothing to go back to


@pytest.mark.parametrize("arch", ["lfm2moe", "jamba"])
def test_a_mark_of_another_text_is_forgotten(models, arch):
    with Engine(resolve(table(models, arch, "oracle", text=[]))) as engine, engine.conversation() as conversation:
        context = conversation._context
        conversation.feed(PROMPT)
        context.mark()
        conversation.clear()
        conversation.feed(PROMPT[::-1])
        assert 0 == context.go_back(len(PROMPT))
        conversation.clear()
        conversation.feed(PROMPT[:-1])
        context.decode_at([50, 60, 70], range(14, 17))
        context.mark()  # of 17 tokens
        if context.truncate(15):
            context.decode([1])
            context.decode([2])
            context.decode([3])
            assert 0 == context.go_back(18)


@pytest.mark.parametrize("arch", FEW)
@pytest.mark.parametrize("stop", range(1, 12))
def test_one_who_stops_in_a_round_goes_on_as_without_drafts(models, plain, arch, stop):
    """Whichever token of a round is the last that is asked for."""
    with Engine(resolve(drafted(models, arch, plain, 1.0))) as engine, engine.conversation() as conversation:
        some = []
        for token in conversation.generate(PROMPT, TOKENS):
            some.append(token.id)
            if len(some) == stop:
                break
        assert [*PROMPT, *some[:-1]] == conversation.tokens
        rest = said(conversation, TOKENS - stop, some[-1:], append=True)
        assert plain(arch) == [*some, *rest]


@pytest.mark.parametrize("arch", FEW)
@pytest.mark.parametrize("nth", [1, 5])
def test_after_a_failed_verify_decode_nothing_of_it_is_left(models, plain, arch, nth, monkeypatch):
    """Half of a decode is in the states, and llama.cpp would go on from there."""
    faults = Faults(monkeypatch)
    settings = drafted(models, arch, plain, 0.5)
    with Engine(resolve(settings)) as engine, engine.conversation() as conversation:
        steps = conversation.generate(PROMPT, TOKENS)
        some = [next(steps).id for _ in range(4)]
        with faults.once(nth, -errno.EIO), pytest.raises(ReadError):
            some.extend(token.id for token in steps)
        assert faults.met
        held = len(conversation.tokens)
        assert conversation.tokens == [*PROMPT, *some][:held]
        rest = said(conversation, 6, [*PROMPT, *some][held:], append=True)
        assert plain(arch)[: len(some) + 6] == [*some, *rest]
        assert plain(arch) == said(conversation)


@pytest.mark.parametrize("arch", FEW)
def test_the_model_guesses_for_itself(models, plain, arch):
    """Its guesses are decodes of one token each, of which no state is left but the mark."""
    settings = table(models, arch, "self", experts=1, resident=False)
    with DraftRecorder(resolve(settings)) as engine, engine.conversation() as conversation:
        assert plain(arch) == said(conversation)
        assert [*PROMPT, *plain(arch)[:-1]] == conversation.tokens
        rounds = list(engine.rounds)
        summary = conversation.summary
        again = repeat(engine, conversation, PROMPT, rounds)
    assert summary.drafted > summary.accepted
    assert [each.rows for each in rounds] == again  # where nothing was guessed before


@pytest.mark.parametrize("arch", FEW)
def test_nothing_is_read_twice_but_what_was_accepted(models, plain, arch):
    """Not the whole text, however often a token is rejected."""
    with Engine(resolve(drafted(models, arch, plain, 0.5))) as engine, engine.conversation() as conversation:
        decoded = []
        perform = engine.perform
        engine.perform = lambda context, work, batch, cancelled: (
            decoded.append(len(batch.positions)),
            perform(context, work, batch, cancelled),
        )[1]
        said(conversation)
        assert len(PROMPT) == decoded[0]
        assert max(decoded[1:]) <= 5
        again = conversation.summary.draft_bytes
    assert bool(again) == (arch in NONE)  # and it is in the account


@pytest.mark.parametrize("arch", ["lfm2moe", "jamba"])
def test_another_model_with_states_guesses(models, plain, arch):
    """A draft model goes back by its mark: it never reads the text twice."""
    draft = models.path(f"tiny-{arch}", "F32", seed=3)
    engine = Engine(resolve(table(models, arch, "model", model=str(draft))))
    with engine, engine.conversation() as conversation:
        context = conversation._guesser._context
        widths = []
        decode = context.decode
        context.decode = lambda tokens: (widths.append(len(tokens)), decode(tokens))[1]
        assert plain(arch) == said(conversation)
        guessed = said(conversation)
    assert plain(arch) == guessed
    assert len(PROMPT) == widths[0]
    assert all(a <= 6 for a in widths[1 : widths[1:].index(len(PROMPT)) + 1])


@pytest.mark.parametrize("arch", ["lfm2moe", "jamba"])
def test_its_guesses_are_those_of_a_fresh_one(models, arch):
    """What it goes back to is what it was: the same model as its own draft is right every time."""
    path = models.path(f"tiny-{arch}", "F32")
    engine = Engine(resolve(table(models, arch, "model", model=str(path))))
    with engine, engine.conversation() as conversation:
        said(conversation)
        summary = conversation.summary
    assert summary.drafted == summary.accepted > 10


def test_trees_are_refused(models):
    settings = table(models, "lfm2moe", "ngram", branching=2)
    with Engine(resolve(settings)) as engine, pytest.raises(ModelError, match=r"draft\.options\.branching = 1"):
        engine.conversation()


def test_the_widest_draft(models, plain):
    """With ``max_draft`` one below the ubatch every snapshot is of one decode."""
    settings = drafted(models, "lfm2moe", plain, 0.7)
    settings["draft"]["max_draft"] = 15
    with Engine(resolve(settings)) as engine, engine.conversation() as conversation:
        assert plain("lfm2moe") == said(conversation)


def test_it_is_said_where_a_state_is_missing():
    """What llama.cpp refuses after all is an error, not a wrong text."""
    states = States.__new__(States)
    states._cut, states._handle = 3, None

    class Refuses:
        llama_get_memory = staticmethod(lambda handle: ctypes.c_void_p())
        llama_memory_seq_rm = staticmethod(lambda *args: False)

    states._llama = Refuses
    with pytest.raises(Exception, match="token 3"):
        states.begin()

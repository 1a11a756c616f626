"""Whatever fails under a head, its text and its KV still agree, the next guess is right, and the process lives."""

from __future__ import annotations

import errno
import threading

import pytest

from bmoe.engine import Stopped
from bmoe.errors import NativeError, PluginError, ReadError
from bmoe.head import DraftHead
from bmoe.native import mtp
from bmoe.native.model import Context
from bmoe.testing.faults import Faults

from .headed import CTX, RESIDENT, budget

TEXT = [(i * i * 31 + 7 * i + 5) % 512 for i in range(60)]
EVERY = 512


@pytest.fixture(name="right", scope="module")
def _right(opened_once):
    """What is guessed if nothing fails."""
    opened_once.read(TEXT[:20])
    opened_once.head.follow()
    return opened_once.head.guess(TEXT[20], 4, branching=EVERY)[0]


@pytest.fixture(name="opened_once", scope="module")
def _opened_once(headed):
    from .headed import Followed, planned

    one = Followed(planned(headed, **RESIDENT))
    yield one
    one.close()


def again(one):
    """The guess after a failure."""
    return one.head.guess(TEXT[20], 4, branching=EVERY)[0]


@pytest.mark.parametrize("nth", [1, 2, 4, 7])
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_a_failed_read_is_raised_and_the_next_guess_is_right(followed, headed, right, monkeypatch, nth, share):
    faults = Faults(monkeypatch)
    cache = budget(headed, share) if share else {"budget_mb": 0}
    one = followed(watched=True, cache=cache, fetch={"plugin": "pread", "lanes": 1})
    one.read(TEXT[:20])
    with faults.once(nth, -errno.EIO), pytest.raises(ReadError):
        one.head.guess(TEXT[20], 4)
    assert faults.met
    assert one.head.held in (20, len(one.head))
    assert again(one) == right


def test_a_head_that_is_cancelled_is_stopped_and_goes_on_later(followed, right):
    one = followed()
    one.read(TEXT[:20])
    one.is_cancelled = True
    for work in (lambda: one.head.guess(TEXT[20], 4), one.head.follow):
        with pytest.raises(Stopped):
            work()
    assert (one.head.held, len(one.head)) == (0, 20)
    one.is_cancelled = False
    assert again(one) == right


def test_stopping_the_trunk_stops_the_head_that_guesses_for_it(followed, headed, right):
    """From another thread, in the middle of a decode of the head."""
    one = followed(cache={"budget_mb": 0})
    one.read(TEXT[:20])
    one.head.follow()
    real, met = one.engine.seam.handler, []

    def handle(bank, keys):
        if bank == 3 and not met:
            met.append(bank)
            thread = threading.Thread(target=one.engine.stop, args=(one.trunk,))
            thread.start()
            thread.join()
        real(bank, keys)

    one.engine.seam.handler = handle
    with pytest.raises(Stopped):
        one.head.guess(TEXT[20], 4)
    one.engine.seam.handler = real
    assert met
    assert again(one) == right


def test_a_cut_decode_that_is_stopped_leaves_nothing_in_the_kv(followed, right, monkeypatch):
    one = followed()
    one.read(TEXT[:20])
    real = mtp.decode_head

    def stopped(head, tokens, first, hidden, *, outputs):
        code = real(head, tokens, first, hidden, outputs=outputs)
        if first == 16:
            one.engine.stop(one.trunk)
        return code

    monkeypatch.setattr(mtp, "decode_head", stopped)
    with pytest.raises(Stopped):
        one.head.follow()
    monkeypatch.undo()
    assert one.head.held == 16
    assert again(one) == right


def test_what_a_plugin_raises_under_a_guess_is_raised(followed, headed, right, monkeypatch):
    one = followed(cache=budget(headed, 0.8))
    one.read(TEXT[:20])

    def broken(bank, keys):
        raise PluginError("it is broken")

    with monkeypatch.context() as patch:
        patch.setattr(one.engine.stream.store, "stage", broken)
        with pytest.raises(PluginError, match="it is broken"):
            one.head.guess(TEXT[20], 4)
    assert again(one) == right


def test_tokens_that_are_none_are_refused_and_leave_nothing(followed, right):
    one = followed()
    one.read(TEXT[:20])
    for token in (512, -1):
        with pytest.raises(NativeError, match=r"a token id outside 0\.\.511"):
            one.head.guess(token, 3)
    assert again(one) == right


def test_states_that_are_not_there_are_not_read(followed):
    """Of a decode that had fewer tokens, or none, or beyond the context: they would be read past their end."""
    one = followed()
    with pytest.raises(NativeError, match="no hidden states of 1 tokens"):
        one.head.remember([5])
    one.read([5, 6])
    with pytest.raises(NativeError, match="no hidden states of 3 tokens"):
        one.head.remember([7, 8, 9])
    for tokens, places in (([7], (0, 1)), ([7], (-1,)), ([1] * CTX, ())):
        with pytest.raises(NativeError, match="cannot follow 2 of 96"):
            one.head.remember(tokens, places)
    assert len(one.head) == 2
    assert one.engine.model.has_head


def test_what_would_end_the_process_is_refused(followed, headed):
    """A head's batch to the trunk, one that is too wide or has other states, a head of a model without it."""
    one = followed()
    states = one.head._states
    with pytest.raises(NativeError, match="cannot be decoded by this context of a head"):
        mtp.decode_head(one.trunk, [1], 0, states[:1], outputs=True)
    for count in (0, 17):
        with pytest.raises(NativeError, match=f"{count} tokens cannot be decoded"):
            mtp.decode_head(one.head._context, [1] * count, 0, states[:count], outputs=False)
    with pytest.raises(NativeError, match="hidden states of the shape"):
        mtp.decode_head(one.head._context, [1, 2], 0, states[:1], outputs=False)
    one.engine.model.has_head = False
    with pytest.raises(NativeError, match="opened without its head"):
        DraftHead(one.engine, Context(one.engine.model, one.engine.context_options()))
    one.engine.model.has_head = True


def test_a_closed_head_or_trunk_says_so(followed):
    one = followed()
    one.read(TEXT[:5])
    one.head.close()
    one.head.close()
    with pytest.raises(NativeError, match="is closed"):
        one.head.guess(1, 1)
    one.trunk.close()
    with pytest.raises(NativeError, match="no hidden states"):
        one.head.remember([1])
    with pytest.raises(NativeError, match="is closed"):
        DraftHead(one.engine, one.trunk)


def test_an_engine_closes_the_heads_on_it_first(followed):
    one = followed()
    one.engine.close()
    with pytest.raises(NativeError, match="is closed"):
        one.head.guess(1, 1)


def test_a_llama_without_the_functions_is_refused_when_the_model_opens(followed, monkeypatch):
    def missing():
        raise NativeError("llama_cpp.llama_cpp_ext has no llama_set_embeddings_nextn; install a tested one")

    monkeypatch.setattr(mtp, "extension", missing)
    with pytest.raises(NativeError, match="has no llama_set_embeddings_nextn"):
        followed()

"""Scores of a real tiny model, against plain ways to get them: a conversation of its own for every figure."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from bmoe import BmoeError, ModelError
from bmoe.evaluate.datasets import Choice, Problem, Text
from bmoe.evaluate.metrics import log_softmax
from bmoe.evaluate.prompts import make_prompts
from bmoe.evaluate.scorer import Position, Scorer, Tally
from bmoe.evaluate.tasks import Setting, Skipped, score

PLAIN = make_prompts("plain", None, "")
RAW = make_prompts("raw", None, "")


@pytest.fixture(name="reply_to")
def _reply_to(engine):
    def reply_to(item, prompts=PLAIN, tokens=6, reference=None):
        with engine.conversation() as conversation:
            scorer = Scorer(conversation, reference)
            return score(item, Setting(engine.model, engine.plan.ctx, prompts, tokens), scorer), scorer

    return reply_to


def nll_after(engine, tokens, following):
    """Of one token, in a conversation of its own, token by token."""
    with engine.conversation() as conversation:
        for token in tokens:
            conversation.feed([token])
        return -float(log_softmax(conversation.logits())[following])


class TestText:
    def test_every_token_but_the_first_is_scored_after_all_before_it(self, engine, reply_to):
        ids = engine.model.tokenize("a river")
        reply, scorer = reply_to(Text(1, "1", "a river"))
        naive = [nll_after(engine, ids[:n], ids[n]) for n in range(1, len(ids))]

        assert naive == reply["nlls"]
        assert ids == reply["ids"]
        assert {"nll": pytest.approx(math.fsum(naive)), "tokens": len(ids) - 1} == reply["score"]
        assert (len(ids) - 1, 0) == (scorer.decode.decodes, scorer.prefill.decodes)

    @pytest.mark.parametrize("more", [0, 1, 2, 64])
    def test_a_long_document_is_taken_in_windows_that_score_every_token_once(self, engine, reply_to, more):
        ctx = engine.plan.ctx
        text = "xyzw" * 80
        text = text[: ctx + 1 + more - len(engine.model.tokenize("x")) + 1]
        ids = engine.model.tokenize(text)
        reply, _ = reply_to(Text(1, "1", text))

        assert ctx + 1 + more == len(ids)
        assert len(ids) - 1 == reply["score"]["tokens"] == len(reply["nlls"])
        assert (1 if not more else 2) == reply["windows"]
        if more:
            assert nll_after(engine, [ids[ctx]], ids[ctx + 1]) == reply["nlls"][ctx]

    def test_a_document_of_one_token_is_skipped(self, engine, reply_to):
        assert 1 == len(engine.model.tokenize("x"))
        with pytest.raises(Skipped, match="no token after the first"):
            reply_to(Text(1, "1", "x"))


class TestChoice:
    ITEM = Choice(1, "1", "Which is it?", ("ab", "abc", "x y z"), 2)

    def test_likelihoods_are_those_of_conversations_that_were_never_rewound(self, engine, reply_to):
        reply, scorer = reply_to(self.ITEM)
        asked = len(engine.model.tokenize("Question: Which is it?\nAnswer:"))
        naive = []
        for choice in self.ITEM.choices:
            row = engine.model.tokenize(f"Question: Which is it?\nAnswer: {choice}")
            with engine.conversation() as conversation:
                conversation.feed(row[:asked])
                total = -float(log_softmax(conversation.logits())[row[asked]])
                for token, following in pairwise(row[asked:]):
                    conversation.feed([token])
                    total -= float(log_softmax(conversation.logits())[following])
            naive.append(-total)

        assert naive == reply["log_likelihoods"]
        assert asked == reply["prompt_tokens"]
        assert max(range(3), key=naive.__getitem__) == reply["picked"]
        per_byte = [value / len(choice) for value, choice in zip(naive, self.ITEM.choices, strict=True)]
        assert max(range(3), key=per_byte.__getitem__) == reply["picked_norm"]
        assert int(reply["picked"] == 2) == reply["score"]["right"]
        assert sum(len(ids) - 1 for ids in reply["ids"]) == scorer.decode.decodes

    def test_of_equal_choices_the_first_is_picked(self, reply_to):
        reply, _ = reply_to(Choice(1, "1", "q", ("ab", "ab"), 1))

        assert (0, 0) == (reply["picked"], reply["score"]["right"])

    def test_a_choice_that_begins_like_another_still_has_a_token_of_its_own(self, engine, reply_to):
        """Raw prompts may end inside what a tokenizer takes together: every row keeps a token to score."""
        reply, _ = reply_to(Choice(1, "1", "ab", ("c", "cd"), 0), RAW)

        assert all(reply["ids"])

    def test_a_question_that_is_longer_than_the_context_is_skipped(self, reply_to):
        with pytest.raises(Skipped, match=r"^it needs \d+ tokens and the context has 64; raise model.ctx$"):
            reply_to(Choice(1, "1", "long " * 40, ("a", "b"), 0))


class TestProblem:
    def test_the_reply_is_what_generate_says(self, engine, reply_to):
        reply, _ = reply_to(Problem(1, "1", "How many?", 3), tokens=8)
        with engine.conversation() as conversation:
            tokens = list(conversation.generate("Question: How many?\nAnswer:", 8))

        assert [token.id for token in tokens] == reply["ids"]
        assert "".join(token.text for token in tokens) == reply["text"]
        assert "length" == reply["stop"]

    def test_the_context_ends_a_reply(self, engine, reply_to):
        reply, _ = reply_to(Problem(1, "1", "How many?", 3), tokens=500)

        assert engine.plan.ctx - reply["prompt_tokens"] == len(reply["ids"])
        assert "context" == reply["stop"]

    def test_a_prompt_that_fills_the_context_is_skipped(self, reply_to):
        with pytest.raises(Skipped, match=r"^it has \d+ tokens and the context has 64; raise model.ctx$"):
            reply_to(Problem(1, "1", "long " * 40, 3))

    def test_the_end_of_text_and_the_next_question_end_a_reply(self, engine):
        for pieces, stop, found in (
            ([b" It is", b" 4", None], "eog", "4"),
            ([b" 4", b"\nQues", b"tion: 7"], "question", "4"),
        ):
            vocabulary = Script(pieces)
            scorer = Scripted(vocabulary)
            reply = score(Problem(1, "1", "q", 4), Setting(vocabulary, 64, PLAIN, 20), scorer)

            assert (stop, found, 1) == (reply["stop"], reply["found"], reply["score"]["right"])


class Script:
    """A vocabulary whose tokens are the pieces of one reply; None is the end of the text."""

    def __init__(self, pieces):
        self.pieces = pieces

    def tokenize(self, text):
        return [0]

    def piece(self, token):
        return self.pieces[token]

    def is_end(self, token):
        return self.pieces[token] is None


class Scripted:
    """A scorer that finds each piece likeliest in its turn."""

    def __init__(self, vocabulary):
        self.n, self.at = len(vocabulary.pieces), 0

    def begin(self):
        pass

    def prompt(self, tokens):
        return Position(log_softmax(np.eye(self.n)[0]), None)

    def step(self, token):
        self.at += 1
        return Position(log_softmax(np.eye(self.n)[self.at]), None)


class Shifted:
    """A second run that sees the same logits, with a bonus for one token."""

    def __init__(self, conversation, token, bonus):
        self.conversation, self.token, self.bonus = conversation, token, bonus

    def clear(self):
        self.conversation.clear()

    def feed(self, tokens):
        self.conversation.feed(tokens)

    def rewind(self, length):
        self.conversation.rewind(length)

    def logits(self):
        row = self.conversation.logits()
        row[self.token] += self.bonus
        return row


class TestComparison:
    @pytest.mark.parametrize(
        "item",
        [Text(1, "1", "a river"), Choice(1, "1", "q", ("ab", "c"), 0), Problem(1, "1", "q", 1)],
        ids=["text", "choice", "gsm8k"],
    )
    def test_an_equal_run_agrees_everywhere_at_no_distance(self, engine, reply_to, item):
        with engine.conversation() as other:
            reply, _ = reply_to(item, reference=Shifted(other, 0, 0.0))

        scores = reply["score"]
        assert scores["compared"] == scores["agree"] > 0
        assert 0.0 == scores["kl"]
        assert 0.0 == scores.get("nll_delta", 0.0)

    def test_another_run_does_not(self, engine, reply_to):
        with engine.conversation() as other:
            scores = reply_to(Text(1, "1", "a river"), reference=Shifted(other, 7, 1e4))[0]["score"]

        assert 0 == scores["agree"] < scores["compared"] == scores["tokens"]
        assert scores["kl"] > 0
        assert scores["nll_delta"] < 0  # the other run is sure of a token that did not come

    def test_positions_of_a_question_count_once(self, engine, reply_to):
        item = Choice(1, "1", "Which is it?", ("ab", "abc"), 0)
        with engine.conversation() as other:
            reply, scorer = reply_to(item, reference=Shifted(other, 0, 0.0))

        assert 1 + scorer.decode.decodes == reply["score"]["compared"]

    def test_sums_are_those_of_the_positions(self):
        p, q = np.log([0.5, 0.5 - 1e-9]), np.log([0.25, 0.75])
        tally = Tally()
        tally.compare(Position(q, p))
        tally.compare(Position(p, p))
        kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)

        assert {"compared": 2, "agree": 1, "kl": pytest.approx(kl, abs=1e-6)} == tally.scores()


def test_logits_that_are_no_numbers_are_an_error(engine):
    with engine.conversation() as conversation:
        conversation.logits = lambda: np.full(engine.model.n_vocab, np.nan, np.float32)
        with pytest.raises(ModelError, match="not numbers"):
            Scorer(conversation).step(5)


class TestPrompts:
    TEMPLATE = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )

    def test_forms(self):
        assert ("Question: q\nAnswer:", " ") == (PLAIN.ask("q"), PLAIN.joint)
        assert ("q", "") == (RAW.ask("q"), RAW.joint)
        assert "<user>q<a>" == make_prompts("chat", self.TEMPLATE, "m").ask("q")

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            (None, "m: has no chat template; ask with --prompts plain"),
            ("{% for", "m: its chat template is none: "),
        ],
    )
    def test_without_a_template_there_is_no_chat(self, template, said):
        with pytest.raises(ModelError, match=said):
            make_prompts("chat", template, "m")

    @pytest.mark.parametrize("template", ["{{ raise_exception('no user') }}", "{{ 1 / 0 }}", "{{ m.__class__.x.y }}"])
    def test_a_template_that_fails_is_one_line(self, template):
        with pytest.raises(BmoeError, match=r"^m: its chat template fails: "):
            make_prompts("chat", template, "m").ask("q")


class TestRewind:
    def test_what_comes_after_is_as_if_nothing_had_been_there(self, engine):
        with engine.conversation() as conversation, engine.conversation() as fresh:
            conversation.feed([5, 300, 301, 7, 280])
            for token in (12, 13, 14):
                conversation.feed([token])
            assert 0 == conversation.rewind(5).decodes
            conversation.feed([412])
            fresh.feed([5, 300, 301, 7, 280])
            fresh.feed([412])

            assert [5, 300, 301, 7, 280, 412] == conversation.tokens
            assert fresh.logits().tobytes() == conversation.logits().tobytes()

    def test_a_memory_that_cannot_be_cut_is_filled_again(self, engine, monkeypatch):
        with engine.conversation() as conversation, engine.conversation() as fresh:
            conversation.feed([5, 300, 301, 7])
            monkeypatch.setattr(conversation._context, "truncate", lambda position: False)
            assert 1 == conversation.rewind(3).decodes
            fresh.feed([5, 300, 301])

            assert [5, 300, 301] == conversation.tokens
            assert fresh.logits().tobytes() == conversation.logits().tobytes()

    @pytest.mark.parametrize("length", [-1, 3])
    def test_to_what_it_does_not_hold_is_refused(self, engine, length):
        with engine.conversation() as conversation:
            conversation.feed([5, 300])
            with pytest.raises(ModelError, match=f"cannot go back to {length} tokens: the conversation holds 2"):
                conversation.rewind(length)

            assert [5, 300] == conversation.tokens

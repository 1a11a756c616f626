"""The gate of drafters: subclass :class:`DraftGates`, name the plugin; pytest proves that it changes no text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from bmoe.bind import bind
from bmoe.contracts import Drafter, DraftHost, Hosted, Level, Proposal, Provider
from bmoe.conversation import Conversation
from bmoe.decode import Draft
from bmoe.engine import Engine
from bmoe.plan import Plan
from bmoe.resolve import resolve
from bmoe.testing.archs import Bench, session_bench
from bmoe.testing.load import IN_TREE, load_provider
from bmoe.testing.redraft import DraftRecorder, Round, reference, repeat, with_other_drafts
from bmoe.tree import flaw

LONGEST = 6
TOKENS = 40
PROMPT = [11, 48, 85, 122, 159, 196, 11, 48, 85, 122, 159, 196, 11, 48, 85]


@pytest.mark.gate
class DraftGates:
    """Proves that a drafter keeps its contract. A subclass sets class attributes.

    ``plugin`` is the entry point of group ``bmoe.plugins`` (``"bmoe"`` for in-tree ones) that provides ``provider``.
    ``arch`` is the architecture of the tiny model, with weights in float32, that it drafts for; one that needs a
    trained model overrides ``model``. ``prompt`` is a text on which it has something to propose, and on which both some
    of it is right and some is not; a drafter that needs to know more than that overrides ``settings``.
    """

    plugin: ClassVar[str] = IN_TREE
    provider: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    arch: ClassVar[str] = "qwen3moe"
    prompt: ClassVar[Sequence[int]] = PROMPT

    def settings(self, bench: Bench, text: Sequence[int]) -> Mapping[str, Any]:
        """Its options for a run whose whole text, prompt included, is ``text``."""
        return self.options

    def model(self, bench: Bench) -> str:
        """The model that it drafts for. Two of its tokens must not be as good as equally likely."""
        return str(bench.models.path(f"tiny-{self.arch}", "F32"))

    def load(self) -> Provider[Drafter]:
        """The provider under test, by name."""
        return load_provider("draft", self.plugin, self.provider)

    @pytest.fixture(name="bench")
    def _bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        return session_bench(request, tmp_path_factory)

    @pytest.fixture(name="plain")
    def _plain(self, bench: Bench) -> list[int]:
        """The tokens that the model says after the prompt."""
        with Engine(resolve(self._table(bench))) as engine, engine.conversation() as conversation:
            return [token.id for token in conversation.generate(self.prompt, TOKENS)]

    # ---- without a decode

    def test_is_lossless(self) -> None:
        """The model itself chooses every token."""
        assert not self.load().lossy

    @pytest.mark.parametrize("seed", range(4))
    def test_proposes_what_can_be_verified(self, bench: Bench, plain: list[int], seed: int) -> None:
        """Whatever the text and however little is asked for, a proposal is a chain, or a tree that it announced."""
        plan = self._plan(bench, plain)
        drafter, draw = self._built(plan), random.Random(seed)
        for _ in range(30):
            text = [draw.randrange(plan.facts.n_vocab) for _ in range(draw.randrange(1, 40))]
            text = text * draw.randrange(1, 3)
            limit = draw.randrange(1, LONGEST + 1)
            proposal = drafter.draft(text, limit)
            assert isinstance(proposal, Proposal)
            assert not flaw(proposal, limit, plan.facts.n_vocab, trees=plan.trees)
            drafter.accepted(draw.randrange(len(proposal.tokens) + 1))

    def test_is_deterministic(self, bench: Bench, plain: list[int]) -> None:
        """Two of them that were asked the same propose the same."""
        plan = self._plan(bench, plain)
        one, two = self._built(plan), self._built(plan)
        for length in range(1, len(self.prompt)):
            assert one.draft(self.prompt[:length], 3) == two.draft(self.prompt[:length], 3)

    # ---- with one

    @pytest.mark.parametrize(("seam", "budget"), [("c", "half"), ("python", "off")])
    def test_identity(self, bench: Bench, plain: list[int], seam: str, budget: str) -> None:
        """Every row of every decode has the bytes that plain llama.cpp computes in the same decodes.

        And the text is the one without drafts, drafts were accepted, and drafts were rejected.
        """
        table = self._table(bench, plain, budget)
        engine = DraftRecorder(resolve(table), seam=seam)
        with engine, engine.conversation() as conversation:
            drafts = _watched(conversation)
            tokens = [token.id for token in conversation.generate(self.prompt, TOKENS)]
            rounds = list(engine.rounds)
            assert list(self.prompt) + tokens[:-1] == conversation.tokens
        accepted, drafted = (sum(getattr(each, name) for each in drafts) for name in ("accepted", "drafted"))
        assert accepted, f"nothing of {drafted} proposed tokens was accepted: the drafter is inert here"
        assert accepted < drafted, "everything was accepted: that a rejected token leaves no trace is not shown"
        _same_text(tokens, plain, engine.facts.path)
        expected = reference(self._reference_table(table), self.prompt, rounds)
        _same_rows([each.rows for each in rounds], expected)

    def test_what_is_rejected_leaves_no_trace(self, bench: Bench, plain: list[int]) -> None:
        """With other tokens in the place of those that were rejected, what is kept has the same bytes, to the end."""
        table = self._table(bench, plain, "half")
        engine = DraftRecorder(resolve(table))
        with engine, engine.conversation() as conversation:
            list(conversation.generate(self.prompt, TOKENS))
            rounds = list(engine.rounds)
            others = with_other_drafts(rounds, engine.facts.n_vocab)
            assert [each.tokens for each in others] != [each.tokens for each in rounds]
            again = repeat(engine, conversation, self.prompt, others)
        _same_rows(
            [_kept(each, each.rows) for each in rounds], [_kept(*pair) for pair in zip(rounds, again, strict=True)]
        )

    def test_a_conversation_goes_on(self, bench: Bench, plain: list[int]) -> None:
        """A generation that is ended in the middle of a round, and taken up again, says what one does."""
        with Engine(resolve(self._table(bench, plain, "half"))) as engine, engine.conversation() as conversation:
            said: list[int] = []
            for token in conversation.generate(self.prompt, TOKENS):
                said.append(token.id)
                if len(said) == 7:
                    break
            assert list(self.prompt) + said[:-1] == conversation.tokens
            rest = conversation.generate(said[-1:], TOKENS - len(said), append=True)
            _same_text([*said, *(token.id for token in rest)], plain, engine.facts.path)

    # ---- how it is run

    def _table(self, bench: Bench, plain: Sequence[int] | None = None, budget: str = "half") -> dict[str, Any]:
        table: dict[str, Any] = {
            "model": {"path": self.model(bench), "ctx": 256, "ubatch": 16, "threads": 1, "kv_type": "f32"},
            "cache": {"policy": "lru", "budget_mb": 0 if budget == "off" else "auto"},
            "plugins": {"enable": [] if self.plugin == IN_TREE else [self.plugin]},
            "fetch": {"plugin": "pread", "lanes": 2},
        }
        if budget != "off":
            facts = resolve(table).facts
            table["cache"]["budget_mb"] = facts.expert_bytes / 2 / (1 << 20)
        if plain is not None:
            options = dict(self.settings(bench, [*self.prompt, *plain]))
            table["draft"] = {"drafter": self.provider, "max_draft": LONGEST, "governor": "fixed", "options": options}
        return table

    def _reference_table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """The same contexts without streaming; a drafter that only streaming can have guess is not asked anyway."""
        provider, draft = self.load(), dict(table["draft"])
        if provider.guesses == "trunk":
            trees = provider.trees(provider.options(**draft["options"]))
            draft |= {"drafter": "oracle", "options": {"text": [], "branching": 2 if trees else 1}}
        return {**table, "draft": draft}

    def _plan(self, bench: Bench, plain: Sequence[int]) -> Plan:
        return resolve(self._table(bench, plain))

    def _built(self, plan: Plan) -> Drafter:
        hot = bind(plan)
        try:
            assert hot.new_drafter is not None
            drafter = hot.new_drafter()
        finally:
            hot.close()
        if isinstance(drafter, Hosted):
            drafter.attach(_Host(plan.facts.n_vocab))
        return drafter


class _Host(DraftHost):
    """Guesses by a fixed rule, each with half of what is left of the probability."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab

    def guess(self, depth: int, /, *, branching: int = 1, least: float = 0.0) -> Sequence[Level]:
        levels = []
        for level in range(depth):
            candidates = ((level * 31 + rank * 7) % self._n_vocab for rank in range(branching))
            levels.append(tuple((token, 0.5 ** (rank + 1)) for rank, token in enumerate(candidates)))
        return levels if least <= 0.5 else []


def _watched(conversation: Conversation) -> list[Draft]:
    """What becomes of every draft of a conversation from now on."""
    drafting = conversation.drafting
    assert drafting is not None
    found: list[Draft] = []
    keep = drafting.keep

    def watched(*args: Any) -> Draft:
        found.append(keep(*args))
        return found[-1]

    drafting.keep = watched  # type: ignore[method-assign, assignment]
    return found


def _kept(each: Round, rows: Sequence[str]) -> tuple[str, ...]:
    return tuple(rows[index] for index in each.kept) if each.kept else tuple(rows)


def _same_rows(got: Sequence[tuple[str, ...]], expected: Sequence[tuple[str, ...]]) -> None:
    assert len(got) == len(expected)
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        different = [row for row, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
        assert not different, f"decode {number + 1} after the prompt: the logits of its rows {different} differ"


def _same_text(got: Sequence[int], plain: Sequence[int], path: str) -> None:
    """Token for token: weights in float32 leave no two tokens so near that a wider decode changes their places."""
    part = next((index for index, pair in enumerate(zip(got, plain, strict=False)) if pair[0] != pair[1]), None)
    assert part is None, f"{path}: token {part} is {got[part]} and {plain[part]} without drafts"

"""Budgets of experts and drafts together: no verify batch uses more experts of a layer than it may."""

from __future__ import annotations

import pytest

from bmoe.engine import Engine
from bmoe.resolve import resolve
from bmoe.testing.models import TinyModels

PROMPT = [(i * 37 + 11) % 512 for i in range(12)]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models")).path("tiny-qwen3moe", "F32")


class Unions:
    """The distinct experts of every routing of a verify batch, and how wide the batch was."""

    def __init__(self, stream):
        self.stream, self.phase, self.width = stream, "", 0
        self.demanded, self.read = [], []

    def begin(self, batch, /):
        self.phase, self.width = batch.phase, len(batch.positions)
        assert batch.phase != "verify" or len(batch.parent) == len(batch.depth) == self.width

    def routing(self, bank, keys, /):
        if self.phase == "verify":
            self.read.append((self.width, len(keys)))

    def handled(self, bank, /): ...

    def end(self, complete, /): ...

    def accepted(self, kept, /): ...


def run(path, text, routing, branching, acceptance=0.6):
    table = {
        "model": {"path": str(path), "ctx": 128, "ubatch": 16, "threads": 1, "kv_type": "f32"},
        "cache": {"policy": "lru", "budget_mb": 64},
        "draft": {
            "drafter": "oracle",
            "max_draft": 6,
            "governor": "fixed",
            "options": {"text": text, "branching": branching, "acceptance": acceptance},
        },
        "routing": routing,
    }
    with Engine(resolve(table)) as engine, engine.conversation() as conversation:
        unions = Unions(engine.stream)
        engine.stream.watch(unions)
        said = [token.id for token in conversation.generate(PROMPT, 24)]
        return said, unions, conversation.summary


@pytest.fixture(name="plain", scope="module")
def _plain(path):
    return run(path, [], [], 1)[0]


@pytest.mark.parametrize("branching", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", ["substitution", "truncation"])
@pytest.mark.parametrize("score", ["sum", "path"])
def test_the_union_of_every_verify_is_within_the_budget(path, plain, branching, policy, score):
    """Without the budget it is not; with it each layer of each verify keeps to it, and fewer bytes are read."""
    text = [*PROMPT, *plain]
    experts = 6
    _, free, before = run(path, text, [], branching)
    knob = {"plugin": "moe-spec", "options": {"experts": experts, "policy": policy, "score": score, "scope": "verify"}}

    said, held, after = run(path, text, [knob], branching)

    assert max(union for _, union in free.read) > experts
    assert held.read
    assert max(union for _, union in held.read) <= experts
    assert 24 == len(said)
    assert after.lossy
    assert after.drafted > 0
    assert before.accepted_length > 1


@pytest.mark.parametrize("branching", [1, 3], ids=["chain", "tree"])
def test_a_budget_of_all_experts_changes_nothing(path, plain, branching):
    text = [*PROMPT, *plain]
    knob = {"plugin": "moe-spec", "options": {"experts": 32, "scope": "verify"}}
    try:
        said, _, _ = run(path, text, [knob], branching)
    except Exception as error:
        knob["options"]["experts"] = int(str(error).split("give at most ")[1].split()[0].rstrip("."))
        said, _, _ = run(path, text, [knob], branching)
    assert plain == said


def test_the_record_tells_demand_from_what_is_left(path, plain):
    knob = {"plugin": "moe-spec", "options": {"experts": 6, "scope": "verify"}}
    table_text = [*PROMPT, *plain]
    records = []
    import bmoe.account

    token = bmoe.account.Account.token
    try:
        bmoe.account.Account.token = lambda self, step, text: (records.append(token(self, step, text)), records[-1])[1]
        run(path, table_text, [knob], 1)
    finally:
        bmoe.account.Account.token = token
    rounds = [record for record in records if record.drafted]
    assert rounds
    assert all(record.demanded >= record.lookups for record in rounds)
    assert any(record.demanded > record.lookups for record in rounds)
    assert all(record.accepted <= record.drafted for record in rounds)

"""One generation with drafts on the reference model, and held-out text through verify decodes under a budget."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shelf_measure import MODEL, open_with

from bmoe.bundled import find_model
from bmoe.contracts import Proposal
from bmoe.conversation import Conversation
from bmoe.decode import Draft
from bmoe.engine import Engine
from bmoe.evaluate.bootstrap import interval
from bmoe.evaluate.metrics import log_softmax
from bmoe.tree import Tree

DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"drafter": "ngram"},
    "self": {"drafter": "self"},
    "mtp": {"drafter": "mtp"},
}
BUDGETS = (8, 12, 16, 20, 24)


@dataclass(frozen=True)
class Run:
    """One generation: per output token seconds and bytes, decodes after the prompt's, drafts by place."""

    s_per_token: float
    bytes_per_token: float
    decodes: int
    off: int
    rounds: int
    accepted: int
    reached: list[int]
    right: list[int]


def open_drafting(settings: Mapping[str, Any], budget_mb: float, governor: str, max_draft: int) -> Engine:
    """The reference model with a drafter; without one in ``settings`` it drafts nothing."""
    tables: dict[str, Any] = {"cache": {"policy": "next-use"}}
    if settings:
        chosen = {key: value for key, value in settings.items() if key != "hears_all"}
        tables["draft"] = {**chosen, "governor": governor, "max_draft": max_draft}
    engine = open_with(tables, budget_mb)
    assert engine.stream is not None
    engine.stream.verified.hears_all = bool(settings.get("hears_all"))
    return engine


def generate(conversation: Conversation, prompt: Sequence[int], tokens: int) -> Run | None:
    """Continue a prompt, from an empty KV and with the cache as it is; None if the text ends before half of it."""
    drafting = conversation.drafting
    drafts: list[Draft] = []
    keep = None if drafting is None else drafting.keep
    if drafting is not None and keep is not None:
        drafting.keep = lambda *given: drafts.append(keep(*given)) or drafts[-1]  # type: ignore[method-assign, func-returns-value]
    try:
        said = list(conversation.generate(prompt, tokens))
    finally:
        if drafting is not None:
            del drafting.keep
    summary = conversation.summary
    assert summary is not None
    if 2 * len(said) < tokens:
        return None
    made = len(said) - 1
    seconds = summary.s_per_output_token or summary.decode_s / max(1, made)
    nbytes = summary.bytes_per_output_token if drafting is not None else summary.bytes_per_token
    verified = [draft for draft in drafts if draft.drafted]
    places = max((draft.depth for draft in verified), default=0)
    return Run(
        seconds,
        nbytes or 0.0,
        len(drafts) if drafting is not None else made,
        summary.draft_off_rounds or 0,
        len(verified),
        sum(draft.accepted for draft in verified),
        [sum(d.depth > place and d.accepted >= place for d in verified) for place in range(places)],
        [sum(d.accepted > place for d in verified) for place in range(places)],
    )


def budgets(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Held-out texts through verify decodes of chains that are all right, with and without ``moe-spec``.

    A row per budget of experts: MiB per token, and the perplexity over that without it, with 95 % intervals over texts.
    """
    lines = (Path(find_model(MODEL)).parent / "heldout.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines][:: max(1, len(lines) // (6 * given.rounds))]
    plain = _texts(texts, None, given)
    rows = [{"experts": "all", "mib": plain.mib, "bytes": (1.0, 1.0, 1.0), "perplexity": (1.0, 1.0, 1.0)}]
    for experts in BUDGETS:
        found = _texts(texts, experts, given)
        more = [mine - theirs for mine, theirs in zip(found.nll, plain.nll, strict=True)]
        rows.append(
            {
                "experts": experts,
                "mib": found.mib,
                "bytes": _interval(found.nbytes, plain.nbytes),
                "perplexity": tuple(map(math.exp, _interval(more, plain.tokens))),
            }
        )
    return rows


@dataclass(frozen=True)
class Texts:
    """Sums by text."""

    nbytes: Sequence[float]
    nll: Sequence[float]
    tokens: Sequence[int]

    @property
    def mib(self) -> float:
        """Per token, over all texts."""
        return sum(self.nbytes) / sum(self.tokens) / (1 << 20)


def _texts(texts: Sequence[str], experts: int | None, given: argparse.Namespace) -> Texts:
    knob = {"plugin": "moe-spec", "options": {"experts": experts, "scope": "verify"}}
    tables: dict[str, Any] = {"routing": [knob]} if experts else {}
    tables |= {"cache": {"policy": "next-use"}, "draft": {"drafter": "ngram", "max_draft": given.max_draft}}
    nbytes, nll, count = [], [], []
    with open_with(tables, given.budget_mb) as engine, engine.conversation() as conversation:
        for text in texts:
            ids = engine.model.tokenize(text)[:256]
            conversation.clear()
            read, loss, at = 0, 0.0, 0
            while at + 1 < len(ids):
                part = ids[at : min(at + 1 + given.max_draft, len(ids) - 1)]
                tree = Tree.of(part[0], Proposal(tuple(part[1:])))
                read += conversation.verify(tree).all_bytes
                for row in range(len(part)):
                    logits = conversation.logits(row if tree.drafted else -1)
                    loss -= float(log_softmax(logits)[ids[at + row + 1]])
                if tree.drafted:
                    conversation.keep(tree, range(len(part)))
                at += len(part)
            nbytes.append(read)
            nll.append(loss)
            count.append(at)
    return Texts(nbytes, nll, count)


def _interval(totals: Sequence[float], counts: Sequence[float]) -> tuple[float, float, float]:
    found = interval(totals, counts)
    assert found is not None
    return sum(totals) / sum(counts), *found

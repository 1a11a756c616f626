"""What a setting costs and saves on the reference model: measured token by token, on the same texts for every setting.

Quality is against the resident model on the same tokens: its rows are computed once and kept. Texts of the held-out set
follow each other without the cache being emptied, as in a conversation that goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmoe.conversation import Conversation
from bmoe.engine import Engine, open_engine
from bmoe.evaluate.bootstrap import interval
from bmoe.evaluate.datasets import Problem
from bmoe.evaluate.metrics import divergence, log_softmax
from bmoe.evaluate.prompts import make_prompts
from bmoe.evaluate.scorer import Scorer
from bmoe.evaluate.tasks import Setting, score

MODEL = "bmoe-ref"


def open_with(tables: Mapping[str, Any], budget_mb: float | None) -> Engine:
    """The reference model under a setting; ``budget_mb`` None = resident."""
    base: dict[str, Any] = {
        "model": {"path": MODEL, "ctx": 512, "ubatch": 64, "threads": 1},
        "fetch": {"lanes": 4},
        "sampling": {"seed": 0},
    }
    if budget_mb is None:
        return open_engine({**base, "stream": {"enabled": False}})
    made = {**base, **tables, "cache": {"policy": "lru", **tables.get("cache", {}), "budget_mb": budget_mb}}
    return open_engine({**made, "plugins": {"allow_experimental": True}})


@dataclass(slots=True)
class Sums:
    """One document's figures."""

    nll: float = 0.0
    resident_nll: float = 0.0
    kl: float = 0.0
    agree: int = 0
    tokens: int = 0
    lookups: int = 0
    hits: int = 0
    nbytes: int = 0
    lost: float = 0.0
    routings: int = 0
    worst: float = 0.0


@dataclass(slots=True)
class Resident:
    """Logits of the resident model, float32 [n_tokens, n_vocab] per document."""

    documents: list[list[int]]
    rows: list[NDArray[np.float32]] = field(default_factory=list)


def resident_rows(documents: Sequence[list[int]]) -> Resident:
    """Decode every document token by token with all experts in memory."""
    found = Resident([list(each) for each in documents])
    with open_with({}, None) as engine, engine.conversation() as conversation:
        for ids in documents:
            conversation.clear()
            rows = []
            for token in ids[:-1]:
                conversation.feed([token], "decode")
                rows.append(conversation.logits())
            found.rows.append(np.array(rows))
    return found


def walk(conversation: Conversation, ids: Sequence[int], rows: NDArray[np.float32], prompt: int = 0) -> Sums:
    """One document, the first ``prompt`` tokens as a prompt and unscored, the others one by one."""
    sums = Sums()
    conversation.clear()
    if prompt:
        cost = conversation.feed(ids[:prompt])
        sums.nbytes += (cost.read_bytes or 0) + (cost.ahead_bytes or 0)
        sums.lost, sums.routings, sums.worst = cost.lost or 0.0, cost.routings or 0, cost.worst_loss or 0.0
    for at, (token, following) in enumerate(pairwise(ids)):
        if at >= prompt:
            cost = conversation.feed([token], "decode")
            if not prompt:
                sums.lookups += cost.lookups or 0
                sums.hits += cost.hits or 0
                sums.nbytes += (cost.read_bytes or 0) + (cost.ahead_bytes or 0)
                sums.lost += cost.lost or 0.0
                sums.routings += cost.routings or 0
                sums.worst = max(sums.worst, cost.worst_loss or 0.0)
        if at >= max(0, prompt - 1):
            run, resident = log_softmax(conversation.logits()), log_softmax(rows[at])
            sums.nll -= float(run[following])
            sums.resident_nll -= float(resident[following])
            sums.kl += divergence(resident, run)
            sums.agree += int(run.argmax()) == int(resident.argmax())
            sums.tokens += 1
    return sums


def figures(documents: Sequence[Sums], prompt: int = 0) -> dict[str, Any]:
    """Means over all tokens with 95 % intervals over documents; ratios to the resident model are of perplexity."""
    tokens = [each.tokens for each in documents]
    worst = max(each.worst for each in documents)
    routings = sum(each.routings for each in documents)
    costs = [each.nll - each.resident_nll for each in documents]
    made = {
        "documents": len(documents),
        "tokens": sum(tokens),
        "perplexity": float(np.exp(sum(each.nll for each in documents) / sum(tokens))),
        "perplexity_ratio": {key: float(np.exp(value)) for key, value in _mean(costs, tokens).items()},
        "kl": _mean([each.kl for each in documents], tokens),
        "agreement": _mean([each.agree for each in documents], tokens),
        "lost_mass": sum(each.lost for each in documents) / routings if routings else None,
        "worst_lost_mass": worst if routings else None,
    }
    read = [prompt] * len(documents) if prompt else tokens
    made["mib_per_token"] = _mean([each.nbytes / 2**20 for each in documents], read)
    if not prompt:
        made["hit_rate"] = _mean([each.hits for each in documents], [each.lookups for each in documents])
    return made


def _mean(totals: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    found = interval(totals, counts)
    value = sum(totals) / sum(counts)
    low, high = found if found is not None else (value, value)
    return {"value": value, "low": low, "high": high}


def decode_price(tables: Mapping[str, Any], budget_mb: float, resident: Resident) -> dict[str, Any]:
    """Every document token by token, nothing as a prompt."""
    with open_with(tables, budget_mb) as engine, engine.conversation() as conversation:
        pairs = zip(resident.documents, resident.rows, strict=True)
        return figures([walk(conversation, ids, rows) for ids, rows in pairs])


def prompt_price(tables: Mapping[str, Any], budget_mb: float, resident: Resident, prompt: int) -> dict[str, Any]:
    """The first ``prompt`` tokens of every document at once; bytes are those of prompts, quality what comes after."""
    with open_with(tables, budget_mb) as engine, engine.conversation() as conversation:
        pairs = zip(resident.documents, resident.rows, strict=True)
        return figures([walk(conversation, ids, rows, prompt) for ids, rows in pairs], prompt)


def arithmetic(tables: Mapping[str, Any], budget_mb: float | None, problems: Sequence[Problem]) -> dict[str, float]:
    """The share of problems whose final number is right, greedily written."""
    with open_with(tables, budget_mb) as engine, engine.conversation() as conversation:
        prompts = make_prompts("chat", engine.facts.chat_template, MODEL)
        setting = Setting(engine.model, engine.plan.ctx, prompts, 64)
        scorer = Scorer(conversation)
        right = [score(problem, setting, scorer)["score"]["right"] for problem in problems]
    return _mean(right, [1] * len(right))


def speed(tables: Mapping[str, Any], base: Mapping[str, Any], budget_mb: float, ids: Sequence[int], rounds: int) -> Any:
    """Time per token of ``base`` over that of the setting, same tokens, in turns A B B A: above 1 = faster.

    The median over rounds, with its quartiles.
    """
    ratios = []
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(open_with(each, budget_mb)) for each in (base, tables)]
        talks = [stack.enter_context(engine.conversation()) for engine in engines]
        for index in range(rounds + 1):
            took = [0.0, 0.0]
            for side in ((0, 1), (1, 0))[index % 2]:
                took[side] = _timed(talks[side], ids)
            if index:  # the first warms both
                ratios.append(took[0] / took[1])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return {"value": float(middle), "low": float(low), "high": float(high), "rounds": rounds}


def _timed(conversation: Conversation, ids: Sequence[int]) -> float:
    conversation.clear()
    conversation.feed(ids[:1])
    began = time.perf_counter()
    for token in ids[1:]:
        conversation.feed([token], "decode")
    return time.perf_counter() - began


def chunks(ids: Sequence[int], length: int) -> Iterator[list[int]]:
    """Pieces of ``length`` tokens; what is left over is left out."""
    for start in range(0, len(ids) - length + 1, length):
        yield list(ids[start : start + length])
